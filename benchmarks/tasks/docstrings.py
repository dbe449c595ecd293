"""Functions of installed Python packages, and the summaries that their docstrings begin with."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tasks.records import SourceError, one_line

_SKIPPED = {
    "site-packages",
    "dist-packages",
    "lib2to3",
    "test",
    "tests",
    "idle_test",
}


def modules(package: str) -> Iterator[tuple[str, str]]:
    """Yield the path below its root, and the text, of a package's modules; tests are left out.

    Parameters
    ----------
    package : str
        The name of an installed package, or ``stdlib``. Nothing of it is run.

    Raises
    ------
    SourceError
        Where the package is not installed.
    """
    root = Path(sysconfig.get_path("stdlib")) if package == "stdlib" else _root(package)
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        below = path.relative_to(root)
        if _SKIPPED.isdisjoint(below.parts) and not below.name.startswith("_sysconfigdata"):
            try:
                yield below.as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _root(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SourceError(f"the package {package} is not installed here: pip install {package}")
    return Path(next(iter(found.submodule_search_locations)))


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the functions of a module that have a docstring: the code without it, its summary.

    The summary is the docstring's first paragraph, up to the end of its first sentence.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes, in somebody else's text
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            document = ast.get_docstring(node)
            if document and len(node.body) > 1:
                yield _without_docstring(node, lines), summary(document)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    first = node.body[0]
    kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
    return inspect.cleandoc("\n" + "\n".join(kept)).strip()


def summary(document: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = one_line(re.split(r"\n\s*\n", document.strip())[0])
    end = re.search(r"(?<!e\.g)(?<!i\.e)(?<!etc)[.!?](?=\s+[A-Z])", paragraph)
    return paragraph[: end.end()] if end else paragraph
