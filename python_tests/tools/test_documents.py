"""What README, the manual and the comments say is so: code runs, commands and paths exist.

A Python block runs as pasted, after those before it on its page; a ``text`` block behind it is what
it prints. Tables of figures are compared with the records that they name.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import importlib
import importlib.util
import io
import json
import re
import shlex
import tokenize
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from specdec_ext.__main__ import COMMANDS
from specdec_ext.engines.vllm.settings import VARIABLE, parse_settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    RESULTS / "README.md",
]
LONGEST_README = 120


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


# --- pages ----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A fenced block: what is in it, in which language, from which line on."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], page.count("\n", 0, m.start()) + 2) for m in found]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)


def anchor(heading: str) -> str:
    """Give the fragment by which a heading is linked."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") <= LONGEST_README


# --- Python blocks --------------------------------------------------------------------------------


def run_blocks(page: str, name: str) -> int:
    """Run a page's Python blocks in order; compare what they print where the page says it."""
    names: dict[str, object] = {"__name__": "__main__"}
    every = blocks(page)
    count = 0
    following = [*every, Block("", "", 0)][1:]
    for block, after in zip(every, following, strict=True):
        if block.language != "python":
            continue
        count += 1
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if after.language == "text":
            assert printed.getvalue() == after.text, f"{name}, line {after.line}"
    return count


@documents
def test_python_blocks_run_as_pasted(document):
    page = document.read_text()
    if "import xgrammar" in page:
        pytest.importorskip("xgrammar")
    torch.manual_seed(0)
    run_blocks(page, name_of(document))


def test_there_are_python_blocks_to_run():
    having = {name_of(path) for path in DOCUMENTS if "```python" in path.read_text()}
    assert {"README.md", "docs/verify.md", "docs/trees.md", "docs/generation.md"} <= having


@pytest.mark.parametrize(
    "page, error",
    [
        ("```python\nnever_defined\n```\n", NameError),
        ("```python\na = 1\n```\n\n```python\nassert a == 2\n```\n", AssertionError),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", AssertionError),
    ],
)
def test_a_block_that_does_not_run_is_found(page, error):
    with pytest.raises(error):
        run_blocks(page, "page")


def test_blocks_share_names_and_what_they_print_is_compared():
    page = "```python\na = 1\n```\nwords\n```python\nprint(a)\n```\n\n```text\n1\n```\n"
    assert run_blocks(page, "page") == 2


# --- shell blocks ---------------------------------------------------------------------------------


def shell_commands(page: str) -> Iterator[list[str]]:
    for block in blocks(page):
        if block.language in ("bash", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def fault_of_command(words: list[str]) -> str | None:
    """Say what a command names that does not exist; None where all is there."""
    program, *rest = words
    if program.startswith(f"{VARIABLE}="):
        parse_settings(program.partition("=")[2])
        return fault_of_command(rest)
    if program == "vllm":  # that the server takes these is python_tests/engines' affair
        config = rest[rest.index("--speculative-config") + 1]
        return None if rest[0] == "serve" and json.loads(config) else f"vllm {rest[0]}?"
    if program == "torchrun":
        path = next((word for word in rest if word.endswith(".py")), "")
        return None if path and (ROOT / path).exists() else f"no file {path}"
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        variables = re.findall(r"^(\w+) *[:?]?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known = {*targets, *variables}
        return next((f"no {word}" for word in rest if word.partition("=")[0] not in known), None)
    if program == "pip":
        return fault_of_pip(rest)
    if program == "python" and rest[:2] == ["-m", "specdec_ext"]:
        return fault_of_subcommand(rest[2:])
    if program == "python":
        path, *options = rest
        if not (ROOT / path).exists():
            return f"no file {path}"
        own = [path, f"{path}/__main__.py"]
        text = "".join((ROOT / name).read_text() for name in own if (ROOT / name).is_file())
        given = [word for word in options if word.startswith("--") and word != "--inplace"]
        return next((f"{path} has no {word}" for word in given if f'"{word}"' not in text), None)
    return f"what is {program}?"


def fault_of_subcommand(words: list[str]) -> str | None:
    import argparse

    command, *options = words
    if command not in COMMANDS:
        return f"no command {command}"
    parser = argparse.ArgumentParser()
    COMMANDS[command][0].add_arguments(parser)
    known = parser.format_help()
    given = [word for word in options if word.startswith("--")]
    return next((f"{command} has no {word}" for word in given if word not in known), None)


def fault_of_pip(words: list[str]) -> str | None:
    """Requirements are those of pyproject.toml, extras exist."""
    metadata = (ROOT / "pyproject.toml").read_text()
    for word in words[1:]:
        if word.startswith("-") or word in (".", "dist"):
            continue
        if word.startswith("./"):
            if not (ROOT / word / "pyproject.toml").is_file():
                return f"no package in {word}"
            continue
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if extras:
            for extra in extras[1].split(","):
                if not re.search(rf"^{extra} = \[", metadata, re.MULTILINE):
                    return f"no extra {extra}"
        elif f'"{word}"' not in metadata:
            return f"pyproject.toml does not require {word}"
    return None


@documents
def test_shell_commands_exist(document):
    faults = [fault_of_command(words) for words in shell_commands(document.read_text())]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize(
    "command",
    [
        "make everything",
        "pip install 'torch>=1.0'",
        "pip install '.[everything]'",
        "python -m specdec_ext juggle",
        "python -m specdec_ext demo --juggle",
        "python benchmarks/bench_nothing.py",
        "python benchmarks/bench_verify.py --juggle",
        "torchrun --nproc-per-node 2 examples/nothing.py",
        "frobnicate",
    ],
)
def test_a_command_that_does_not_exist_is_found(command):
    assert fault_of_command(shlex.split(command)) is not None


# --- links, and names in backquotes ---------------------------------------------------------------


def broken_links(page: str, folder: Path) -> list[str]:
    """Links to files that are not there, or to headings that their pages do not have."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (folder / path).resolve() if path else None
        if target is not None and not target.exists():
            found.append(link)
        elif fragment:
            linked = page if target is None else target.read_text()
            if fragment not in map(anchor, headings(linked)):
                found.append(link)
    return found


@documents
def test_links_lead_somewhere(document):
    assert broken_links(document.read_text(), document.parent) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# One, two\n\n```text\n# three\n```\n")
    page = "[a](other.md) [b](other.md#one-two) [c](other.md#three) [d](none.md) [e](#none)\n"
    assert broken_links(page, tmp_path) == ["other.md#three", "none.md", "#none"]


def missing_names(page: str, folder: Path) -> list[str]:
    """Paths and dotted names of the package, in backquotes, that do not exist."""
    tops = [path.name for path in ROOT.iterdir() if path.is_dir()]
    found = []
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        word = code.split()[0].split("(")[0]
        if re.fullmatch(r"specdec_ext(\.\w+)+", word):
            if not resolves(word):
                found.append(word)
        elif re.fullmatch(r"[\w.*-]+(/[\w.*-]+)+/?", word) and word.split("/")[0] in tops:
            if not any(ROOT.glob(word.rstrip("/"))):
                found.append(word)
        elif re.fullmatch(r"[\w-]+-cpu-[\w*.-]+", word) and not any(folder.glob(word)):
            found.append(word)  # a record beside its page
    return found


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return all(
            hasattr(value, part) and (value := getattr(value, part), True)[1]
            for part in parts[end:]
        )
    return False


@documents
def test_names_in_backquotes_exist(document):
    folder = RESULTS if document.parent == RESULTS else RESULTS.parent
    assert missing_names(document.read_text(), folder) == []


def test_a_missing_name_is_found():
    page = "`specdec_ext.verify(...)` `specdec_ext.juggle` `csrc/core/*.h` `csrc/none/x.h`"
    assert missing_names(page, RESULTS) == ["specdec_ext.juggle", "csrc/none/x.h"]


# --- what comments and docstrings cite ------------------------------------------------------------

C_LIKE = (".h", ".cuh", ".cpp", ".cu")
# Files that are cited and are not of this repository.
FOREIGN = {
    "decoding.py",  # of the authors of "Draft & Verify"
    "torch/extension.h",
}


def source_files() -> list[Path]:
    folders = ("csrc", "specdec_ext", "python_tests", "benchmarks", "examples", "docs")
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".pyi", *C_LIKE)
    ]
    return [*found, ROOT / "setup.py", ROOT / "CMakeLists.txt", ROOT / "Makefile"]


def comments(path: Path, text: str) -> str:
    """All comments and docstrings of a file, those of neighbouring lines joined."""
    if path.suffix in C_LIKE:
        lines = re.findall(r"^.*?//(.*)$", text, re.MULTILINE)
        return " ".join(" ".join(lines).split())
    if path.suffix not in (".py", ".pyi"):
        return " ".join(re.findall(r"^\s*#(.*)$", text, re.MULTILINE))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node) or "")
    return re.sub(r"\s+", " ", " ".join(found))


def wrong_citations(cited: str, path: Path, known: set[str]) -> list[str]:
    """Paths that a file's comments cite and that are not there, and sections that no page has."""
    found = []
    for name in re.findall(r"(?<![\w/.<*])([\w*/-]+\.(?:pyi?|h|cuh|cpp|cu|md|toml))\b", cited):
        if name in FOREIGN or any(entry.endswith(f"/{name}") for entry in known):
            continue
        if "*" in name and (any(ROOT.glob(name)) or any(path.parent.glob(name))):
            continue
        found.append(name)
    for page, section in re.findall(r'docs/([\w-]+\.md)(?:, "([^"]*)")?', cited):
        source = ROOT / "docs" / page
        if source.exists() and section and section not in headings(source.read_text()):
            found.append(f'docs/{page}, "{section}"')
    found += re.findall(r"DESIGN\b[^.]{0,20}", cited)
    return found


def known_paths() -> set[str]:
    tracked = [*source_files(), *DOCUMENTS, ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"]
    return {f"/{path.relative_to(ROOT)}" for path in tracked}


@pytest.fixture(scope="module")
def known() -> set[str]:
    return known_paths()


@pytest.mark.thorough
def test_what_comments_cite_exists(known):
    wrong = {}
    for path in source_files():
        if path != Path(__file__).resolve():
            found = wrong_citations(comments(path, path.read_text()), path, known)
            if found:
                wrong[name_of(path)] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("a.py", '"""See csrc/core/philox.h."""', []),
        ("a.py", '"""See csrc/core/none.h."""', ["csrc/core/none.h"]),
        ("a.py", "x = 1  # as in philox.h and none.cuh", ["none.cuh"]),
        ("a.h", 'int x;  // docs/design.md,\n// "Acceptance"', []),
        ("a.h", '// docs/design.md, "Nothing"', ['docs/design.md, "Nothing"']),
        ("a.h", "// DESIGN section 4", ["DESIGN section 4"]),
        ("a.h", '#include "none.h"', []),
    ],
)
def test_a_wrong_citation_is_found(known, name, text, expected):
    path = ROOT / "csrc" / name
    assert wrong_citations(comments(path, text), path, known) == expected


# --- figures --------------------------------------------------------------------------------------

FILTERS = {"": "none", ", top-k + top-p": "top_k+top_p", ", top-p": "top_p"}


def median(record: list[dict[str, str]], contestant: str, acceptance: str, **cell: str) -> dict:
    wanted = {**cell, "contestant": contestant, "acceptance": acceptance}
    (row,) = (row for row in record if all(row[key] == value for key, value in wanted.items()))
    return row


def same_figure(printed: str, value: str) -> bool:
    """Whether a printed figure is the record's, rounded to as many digits."""
    _, _, digits = printed.partition(".")
    return abs(float(printed) - float(value)) <= 0.5 * 10.0 ** -len(digits) + 1e-9


def wrong_rows(page: str, record: list[dict[str, str]]) -> tuple[int, list[str]]:
    """Compare the rows of a page's tables of `verify` with the record; how many, and the wrong."""
    found, wrong = 0, []
    row = re.compile(r"^\| ((?:token|block)[^|]*) \| (float32|bfloat16) \| (\d) \| (.*) \|$", re.M)
    for match in row.finditer(page):
        found += 1
        rule, filters = re.fullmatch(r"(token|block)(.*)", match[1]).groups()
        cell = {"rule": rule, "filters": FILTERS[filters], "dtype": match[2], "batch": match[3]}
        ours, theirs, ratio, *full = match[4].split(" | ")
        eager, _, way = theirs.partition(" ")
        how = re.search(r"`(\w+)`", way)
        name = f"eager {how[1]}" if how else "eager"
        figures = [
            (ours, median(record, "specdec_ext", "0.7", **cell)["median_ms"]),
            (eager, median(record, name, "0.7", **cell)["median_ms"]),
            (ratio.rstrip("x"), median(record, name, "0.7", **cell)["ratio_median"]),
        ]
        if full:
            figures += [
                (full[0], median(record, "specdec_ext", "full", **cell)["median_ms"]),
                (full[1].rstrip("x"), median(record, name, "full", **cell)["ratio_median"]),
            ]
        if not all(same_figure(printed, value) for printed, value in figures):
            wrong.append(match[0])
    return found, wrong


@pytest.mark.parametrize("document, rows", [(ROOT / "README.md", 4), (RESULTS / "README.md", 12)])
def test_figures_are_those_of_the_record(document, rows):
    page = document.read_text()
    assert "verify-cpu-2026-11-21-bars.csv" in page
    with (RESULTS / "verify-cpu-2026-11-21-bars.csv").open(newline="") as lines:
        record = list(csv.DictReader(lines))
    assert wrong_rows(page, record) == (rows, [])
    other = page.replace("| token | bfloat16 | 8 | 1.09 |", "| token | bfloat16 | 8 | 1.19 |")
    assert len(wrong_rows(other, record)[1]) == 1


# --- the picture ----------------------------------------------------------------------------------


def test_the_picture_is_what_a_terminal_shows():
    spec = importlib.util.spec_from_file_location("draw_demo", ROOT / "docs" / "draw_demo.py")
    draw_demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_demo)
    written = "\x1b[1mtarget\x1b[0m\n  a\x1b[32m <b\x1b[0m\x1b[31;9m c\x1b[0m\n"
    texts = [
        (node.text, node.get("class"), node.get("y"))
        for node in ET.fromstring(draw_demo.draw(written)).iter("{http://www.w3.org/2000/svg}text")
    ]
    first, second = texts[0][2], texts[1][2]
    assert texts == [
        ("target", "strong", first),
        ("a", None, second),
        ("<b", "accepted", second),
        ("c", "replaced", second),
    ]
    drawn = ET.parse(ROOT / "docs" / "demo.svg").getroot()
    classes = {node.get("class") for node in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"accepted", "replaced", "target"} <= classes


# --- merges -------------------------------------------------------------------------------------

MARKER = re.compile(r"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
TEXTS = {".py", ".md", ".toml", ".cpp", ".h", ".cu", ".cuh", ".txt", ".yaml", ""}
OURS = ("benchmarks", "csrc", "docs", "examples", "python_tests", "specdec_ext", ".ci")


def texts_of_the_tree() -> list[Path]:
    """Return the files that people write."""
    found = [path for folder in OURS for path in (ROOT / folder).rglob("*")]
    return [path for path in [*found, *ROOT.iterdir()] if path.is_file() and path.suffix in TEXTS]


def unmerged(text: str) -> bool:
    return MARKER.search(text) is not None


def test_no_merge_was_left_half_done():
    """Such lines once stood in a page for days, and nothing failed."""
    texts = texts_of_the_tree()
    assert len(texts) > 400
    assert [str(path) for path in texts if unmerged(path.read_text(errors="replace"))] == []


def test_a_merge_left_half_done_is_found():
    assert unmerged("a\n" + "<" * 7 + " HEAD\nb\n" + "=" * 7 + "\nc\n" + ">" * 7 + " branch\n")
    assert not unmerged("a heading\n=======\n\n>>> 1 + 1\n2\n")
