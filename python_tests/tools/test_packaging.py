"""What is packed and installed: the sdist, the pair's package, a checkout that was not built.

`make test-wheels` builds wheels of the sdist and runs them under two torches, `make test-hub` loads
the layout for Hugging Face `kernels`.
"""

import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from processes import output_of

from specdec_ext import _installed, triton
from specdec_ext.commands import pair
from specdec_ext.models.draft_llama import DraftLlama

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "specdec_ext"
WEIGHTS = "benchmarks/pair/package/"


def run_setup(tmp_path, *words, before="", **environment):
    """Run setup.py in a copy of its own, so that nothing of this checkout is rebuilt."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "specdec_ext").mkdir()
    (tmp_path / "specdec_ext" / "__init__.py").write_text('__version__ = "0"\n')
    script = f"{before}\nimport runpy, sys\nsys.argv = {['setup.py', *words]}\n"
    script += "runpy.run_path('setup.py', run_name='__main__')"
    return output_of(sys.executable, "-c", script, cwd=tmp_path, **environment)


# ---- sdist ---------------------------------------------------------------------------------------


def test_sdist_has_all_that_git_has_but_the_weights(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("no git here")
    tracked = set(output_of("git", "ls-files")[1].splitlines())
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    status, output = output_of(sys.executable, "setup.py", "--quiet", "sdist", cwd=tmp_path)
    assert status == 0, output
    (made,) = (tmp_path / "dist").iterdir()
    with tarfile.open(made) as archive:
        packed = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert "csrc/cpu/verify.cpp" in packed and "CMakeLists.txt" in packed
    assert packed >= {name for name in tracked if not name.startswith(WEIGHTS)}
    assert not {name for name in packed if name.startswith(WEIGHTS)}
    made_by_setuptools = {name for name in packed - tracked if ".egg-info/" in name}
    assert packed - tracked - made_by_setuptools == {"PKG-INFO", "setup.cfg"}


# ---- what a build lacks --------------------------------------------------------------------------

WITHOUT = "import sys; sys.modules[{!r}] = None"


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (WITHOUT.format("torch"), "needs the Python package torch, which is not in"),
        (WITHOUT.format("pybind11"), "needs the Python package pybind11, which is not in"),
        (WITHOUT.format("cmake"), "needs cmake: pip install 'setuptools>=77' 'cmake>=3.26'"),
        (WITHOUT.format("ninja"), "needs ninja: pip install 'setuptools>=77' 'cmake>=3.26'"),
        (
            "import setuptools; setuptools.__version__ = '65.5.0'",
            "specdec_ext needs setuptools 77 or later, got 65.5.0: pip install 'setuptools>=77'",
        ),
        (
            "import setuptools; import importlib.metadata as m; m.version = lambda _: '2.10.1'",
            "needs torch 2.11.0 or later, got 2.10.1",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path, before, message):
    compiler = tmp_path / "c++"  # the only program on the path
    compiler.touch(mode=0o755)
    status, output = run_setup(tmp_path, "build_ext", before=before, PATH=str(tmp_path), CXX="")
    assert status != 0
    assert message in output
    assert "Traceback" not in output


def test_a_missing_compiler_is_named(tmp_path):
    status, output = run_setup(tmp_path, "build_ext", PATH=str(tmp_path), CXX="")
    assert status != 0
    assert "error: building specdec_ext needs a C++17 compiler, and there is no c++" in output
    (tmp_path / "other").mkdir()
    status, output = run_setup(tmp_path / "other", "build_ext", CXX="no-such-compiler")
    assert status != 0 and "there is no no-such-compiler on the PATH" in output


def test_interpreters_that_are_not_there(tmp_path):
    status, output = run_setup(tmp_path, "wheels", "--pythons=python3.99")
    assert status != 0 and "error: --pythons: there is no python3.99" in output


# ---- a checkout that was not built ---------------------------------------------------------------


def put_package(folder, *, built, version="0.1.0", is_installed=False):
    """Copy the package; as pip leaves it, if it is installed."""
    ignored = shutil.ignore_patterns("__pycache__", *([] if built else ["*.so"]))
    shutil.copytree(PACKAGE, folder / "specdec_ext", ignore=ignored)
    if is_installed:
        facts = folder / f"specdec_ext-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.4\nName: specdec_ext\n"
                                        f"Version: {version}\n")  # fmt: skip
    return folder


WHERE = "import specdec_ext; from specdec_ext import _ops; print(_ops.CPU_LIBRARY.parents[1])"


@pytest.mark.parametrize("built", [True, False])
def test_an_unbuilt_checkout_steps_aside(tmp_path, built):
    installed = put_package(tmp_path / "site", built=True, is_installed=True)
    checkout = put_package(tmp_path / "checkout", built=built)
    status, output = output_of(
        *(sys.executable, "-c", WHERE), cwd=checkout, PYTHONPATH=str(installed)
    )
    assert status == 0, output
    assert output.splitlines()[-1] == str(checkout if built else installed)
    says_so = f"{checkout}/specdec_ext was not built: the copy that is installed in {installed}"
    assert (says_so in output) == (not built)


def test_an_unbuilt_checkout_with_another_version_installed(tmp_path):
    installed = put_package(tmp_path / "site", built=True, version="0.0.9", is_installed=True)
    checkout = put_package(tmp_path / "checkout", built=False)
    status, output = output_of(
        *(sys.executable, "-c", WHERE), cwd=checkout, PYTHONPATH=str(installed)
    )
    assert status != 0
    assert (
        f"version 0.1.0 and was not built, and what is installed is 0.0.9 in {installed}" in output
    )


def test_an_unbuilt_checkout_alone(tmp_path):
    checkout = put_package(tmp_path / "checkout", built=False)
    status, output = output_of(sys.executable, "-c", WHERE, cwd=checkout, PYTHONPATH="")
    if "steps aside" in output or "was not built" in output:
        pytest.skip("a copy is installed here")
    assert status != 0
    assert re.search(r"_C.so is missing: build it with `pip install --no-build-isolation", output)


def test_a_complete_package_looks_no_further(monkeypatch):
    monkeypatch.setattr(_installed, "distributions", lambda **_: pytest.fail("looked"))
    assert _installed.find_complete(PACKAGE, "0.1.0") is None


# ---- the pair, Triton ----------------------------------------------------------------------------


def test_the_pair_of_a_checkout():
    assert pair.find_pair() == ROOT / WEIGHTS / "specdec_ext_pair" / "stdlib-pair"


def test_the_pair_that_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(pair, "IN_A_CHECKOUT", tmp_path / "no-checkout")
    monkeypatch.syspath_prepend(str(ROOT / WEIGHTS))
    assert pair.find_pair() == ROOT / WEIGHTS / "specdec_ext_pair" / "stdlib-pair"


def test_the_pair_that_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(pair, "IN_A_CHECKOUT", tmp_path / "no-checkout")
    monkeypatch.setitem(sys.modules, "specdec_ext_pair", None)
    with pytest.raises(ImportError, match="pip install specdec-ext-pair .*--target and --draft"):
        pair.find_pair()


def test_the_draft_for_smollm2(monkeypatch, tmp_path):
    folder = pair.find_draft("smollm2")
    assert folder == ROOT / WEIGHTS / "specdec_ext_pair" / "smollm2-draft"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8e6
    draft = DraftLlama.from_pretrained(folder, dtype=torch.float32).eval()
    assert draft.config.vocab_size == 49_152 and len(draft.draft_token_ids.unique()) == 8_192
    # It copies: behind "a b c ... a b" it often expects "c", even of tokens in no order.
    torch.manual_seed(0)
    said = torch.stack([draft.draft_token_ids[torch.randperm(8_192)[:24]] for _ in range(40)])
    said = said.repeat(1, 2)
    with torch.no_grad():
        expected = draft(said).logits[:, 24:-1].argmax(-1)
    copied = (draft.draft_token_ids[expected] == said[:, 25:]).float().mean()
    assert copied > 0.3  # 1 / 8,192 for one that does not
    monkeypatch.setattr(pair, "IN_A_CHECKOUT", tmp_path / "no-checkout")
    monkeypatch.setitem(sys.modules, "specdec_ext_pair", None)
    with pytest.raises(ImportError, match="pip install specdec-ext-pair"):
        pair.find_draft("smollm2")


def test_the_card_of_the_draft_has_the_figures_of_its_record():
    card = (pair.find_draft("smollm2") / "README.md").read_text()
    record = ROOT / "benchmarks" / "results" / "distilled-cpu-2026-11-28.md"
    figures = re.findall(r"0\.\d{3} \(0\.\d{3}\)", card)
    assert len(figures) == 12 and all(figure in record.read_text() for figure in figures)


def test_triton_that_is_absent(monkeypatch):
    monkeypatch.setattr(triton, "_is_installed", lambda: False)
    assert triton.absence().startswith("triton is not installed: pip install 'specdec_ext[triton]'")


# ---- Hugging Face kernels ------------------------------------------------------------------------


def test_the_kernel_and_the_package_say_the_same():
    build, project, setup = (
        (ROOT / name).read_text() for name in ("build.toml", "pyproject.toml", "setup.py")
    )
    (floor,) = re.findall(r'^TORCH_FLOOR = "([\d.]+)\.0"', setup, re.MULTILINE)
    assert re.findall(r'^c\w+ = "([\d.]+)"', build, re.MULTILINE) == [floor, floor]
    for name, other in (("license", "license"), ("name", "name")):
        (ours,) = re.findall(rf'^{name} = "([\w.-]+)"$', build, re.MULTILINE)
        (theirs,) = re.findall(rf'^{other} = "([\w.-]+)"$', project, re.MULTILINE)
        assert ours.replace("-", "_") == theirs.replace("-", "_")
