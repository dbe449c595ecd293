"""The package's import graph has no circles: a file can be read after those that it builds on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "specdec_ext"


def modules(package: Path) -> dict[str, Path]:
    """Give the file of every module of a package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def is_for_types(node: ast.AST) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Find the imports that run, at module level and inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif is_for_types(child):
            yield from import_statements(ast.Module(child.orelse, []))
        else:
            yield from import_statements(child)


def imported_from(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Give the module that a ``from`` statement names, whole."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports(module: str, known: dict[str, Path]) -> set[str]:
    """Give the modules of the package that a module imports.

    ``from package import name`` is an import of a module of that name if there is one, and of the
    package too, unless the importing module lies in it: then the package is being imported anyway.
    """
    found = set()
    is_package = known[module].name == "__init__.py"
    for node in import_statements(ast.parse(known[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        source = imported_from(node, module, is_package)
        for alias in node.names:
            inside = f"{source}.{alias.name}"
            is_within = inside in known and f"{module}.".startswith(f"{source}.")
            found |= {inside} if is_within else {source, inside}
    return (found & known.keys()) - {module}


def circle(package: Path) -> list[str]:
    """Give the modules of a circle, the first one again at the end; none: an empty list."""
    known = modules(package)
    try:
        TopologicalSorter({module: imports(module, known) for module in known}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_there_is_no_circle():
    assert circle(PACKAGE) == []


def absolute_imports(package: Path) -> list[str]:
    """Give the lines that import the package by its name: under another name they do not work."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if package.name in {name.partition(".")[0] for name in names}:
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_imports_of_the_package_itself_are_relative():
    assert absolute_imports(PACKAGE) == []


@pytest.mark.parametrize("line", ["import p.two", "from p import two", "def f():\n import p"])
def test_an_absolute_import_is_found(tmp_path, line):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "one.py").write_text(f"from . import q\nimport port\n{line}\n")
    assert len(absolute_imports(tmp_path / "p")) == 1


def test_the_ground_floor_imports_nothing_of_the_package():
    assert imports("specdec_ext.contract", modules(PACKAGE)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from .two import value",
        "from . import two",
        "from p.two import value",
        "from p import two",
        "import p.two",
        "def f():\n    from . import two",
        "if True:\n    import p.two",
    ],
)
def test_a_circle_is_found(tmp_path, line):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("")
    (tmp_path / "p" / "one.py").write_text(line + "\n")
    (tmp_path / "p" / "two.py").write_text("from p.one import value\n")
    assert set(circle(tmp_path / "p")) == {"p.one", "p.two"}


def test_a_package_and_its_own_module(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("def f():\n    from . import one\n")
    (tmp_path / "p" / "one.py").write_text("from p import f\n")
    assert set(circle(tmp_path / "p")) == {"p", "p.one"}
    (tmp_path / "p" / "one.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    import p\n"
    )
    assert circle(tmp_path / "p") == []
