"""What an installed package must do: run by `make test-wheels` in environments of their own.

    python -I python_tests/helpers/installed.py FOLDER

FOLDER is an unpacked sdist, in which nothing was built: a checkout after ``pip install .``. Needs
nothing but the package and what it depends on.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, requires
from importlib.util import find_spec
from pathlib import Path

import torch

import specdec_ext
from specdec_ext import __main__ as commands
from specdec_ext import reference
from specdec_ext.commands.info import describe
from specdec_ext.contract import CHAIN_RULES, TREE_RULES
from specdec_ext.decoding import LookupDrafter

HERE = Path(specdec_ext.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[2]
BATCH, GAMMA, VOCABULARY = 3, 4, 1000


def check_where() -> None:
    """It is the installed copy that runs, and it is not large."""
    assert CHECKOUT / "specdec_ext" not in (HERE, *HERE.parents), HERE
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.suffix != ".pyc")
    assert size < 8e6 or (HERE / "_C_cuda.so").exists(), f"{size} bytes"
    assert not any(name.startswith("triton") and "extra" not in name for name in requires_of())
    (point,) = entry_points(group="vllm.general_plugins", name="specdec")
    assert point.value == "specdec_ext.engines.vllm:register"
    (script,) = entry_points(group="console_scripts", name="specdec")
    assert script.load() is commands.main


def check_complete(folder: str) -> None:
    """All of the package's files in the sources are there, both libraries, and nothing of tests."""
    sources = Path(folder) / "specdec_ext"
    wanted = {
        path.relative_to(sources)
        for path in sources.rglob("*")
        if path.suffix in {".py", ".pyi", ".typed", ".html"}
    }
    there = {path.relative_to(HERE) for path in HERE.rglob("*")}
    assert len(wanted) > 50 and wanted <= there, wanted - there
    libraries = {path.name.partition(".")[0] for path in there if path.suffix == ".so"}
    assert {"_C", "_host"} <= libraries <= {"_C", "_C_cuda", "_host"}, libraries
    assert not [path for path in there if "fibres" in path.name]  # the tests' alone
    sizes = {wheel.name: wheel.stat().st_size for wheel in CHECKOUT.glob("dist/specdec_ext-*.whl")}
    assert sizes and ("_C_cuda" in libraries or max(sizes.values()) < 3e6), sizes
    assert dict(describe())["backend cpu"] == "present"


def requires_of() -> list[str]:
    """Give what the package says that it needs."""
    return requires("specdec_ext") or []


def check_operators() -> None:
    """Every rule gives the tokens that the reference gives."""
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(BATCH, GAMMA + 1, VOCABULARY, generator=generator)
    draft = target[:, :GAMMA] + torch.randn(BATCH, GAMMA, VOCABULARY, generator=generator)
    where = {"seeds": torch.arange(BATCH), "positions": torch.full((BATCH,), 7)}
    tokens = torch.stack(
        [
            specdec_ext.sample(draft[:, i], draft_index=i, temperature=0.8, **where).tokens
            for i in range(GAMMA)
        ],
        1,
    )
    options = {
        **where,
        "temperature": torch.full((BATCH,), 0.8),
        "top_p": torch.full((BATCH,), 0.9),
    }
    for rule in CHAIN_RULES:
        arguments = (target, tokens, draft if rule != "greedy" else None)
        found = torch.ops.specdec.verify(*arguments, **options, rule=rule)
        expected = reference.verify(*arguments, **options, rule=rule)
        assert torch.equal(found[0], expected[0]), rule
    parents = torch.tensor([[-1, 0, 0, 1, 1]]).repeat(BATCH, 1)
    for rule in TREE_RULES:
        arguments = (target, torch.cat([tokens[:, :1], tokens], 1), parents)
        found = torch.ops.specdec.verify_tree(*arguments, **options, rule=rule)
        expected = reference.verify_tree(*arguments, **options, rule=rule)
        assert torch.equal(found[0], expected[0]), rule


def check_host() -> None:
    """The module that belongs to this Python is there: a drafter's data structure."""
    assert LookupDrafter().calls == 0
    from specdec_ext._host import InputMatcher

    matcher = InputMatcher([1, 2, 3])
    matcher.append([2])
    assert matcher.unique_end == 1


def check_absent_triton() -> None:
    """Where Triton is not, the message says how to get it."""
    if find_spec("triton") is not None:
        return
    try:
        specdec_ext.sample(torch.zeros(1, 4), torch.zeros(1).double(), backend="triton")
    except ValueError as error:
        assert "pip install 'specdec_ext[triton]'" in str(error), error
    else:
        raise AssertionError("there is no triton, and it was used")


def check_folder(folder: str) -> None:
    """In a folder with the sources, unbuilt, it is the installed copy that runs, and it says so."""
    assert not (Path(folder) / "specdec_ext" / "_C.so").exists(), folder
    done = subprocess.run(
        [sys.executable, "-m", "specdec_ext", "info"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{HERE}\n" in done.stdout, done.stdout
    assert "was not built: the copy that is installed in" in done.stderr, done.stderr


def main() -> None:
    """Check all of it, and say what it was."""
    check_where()
    check_complete(sys.argv[1])
    check_operators()
    check_host()
    check_absent_triton()
    check_folder(sys.argv[1])
    facts = dict(describe())
    print(f"installed: python {facts['python']}, torch {facts['torch']}, {facts['in']}")


if __name__ == "__main__":
    main()
