"""No modules or packages of selfattn_ext import each other, directly or through others.

To read a module, one then needs the modules that it imports, and none that import it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "selfattn_ext"

#: Each module or package, and the set of those that it imports.
Imports = dict[str, set[str]]


def names_of_modules(package: Path) -> dict[str, Path]:
    """Returns the modules of a package by full names; an __init__.py has its package's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name: str, path: Path) -> Iterator[str]:
    """Yields the full names that a module imports, also in functions and for type checkers."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports_of(package: Path) -> Imports:
    """Returns each module's imports from its own package. ``from a import b`` imports the module a.b, or a
    if there is no such module.
    """
    modules = names_of_modules(package)
    return {
        name: {
            module
            for imported in imported_names(name, path)
            for module in [imported if imported in modules else imported.rpartition(".")[0]]
            if module in modules and module != name
        }
        for name, path in modules.items()
    }


def of_packages(modules: Imports) -> Imports:
    """Returns the same imports for the first level: packages, and modules outside of packages."""

    def first_level(name: str) -> str:
        return ".".join(name.split(".")[:2])

    found: Imports = {first_level(name): set() for name in modules}
    for name, imported in modules.items():
        found[first_level(name)] |= {first_level(each) for each in imported} - {first_level(name)}
    return found


def circle(imports: Mapping[str, set[str]]) -> list[str] | None:
    """Returns names of which each imports the next and the last is the first, or None without a circle."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for imported in sorted(imports[name]):
                if found := search(imported, [*way, name]):
                    return found
            done.add(name)
        return None

    return next((found for name in sorted(imports) if (found := search(name, []))), None)


def test_modules_do_not_import_each_other() -> None:
    assert len(imports_of(PACKAGE)) > 50
    assert circle(imports_of(PACKAGE)) is None


def test_packages_do_not_import_each_other() -> None:
    assert circle(of_packages(imports_of(PACKAGE))) is None


@pytest.mark.parametrize(
    ("sources", "modules", "packages"),
    [
        ({"a.py": "from . import b", "b.py": "from .a import x"}, True, True),
        ({"a.py": "from .b import x", "b.py": "from . import c", "c.py": "import top.a"}, True, True),
        ({"a.py": "from .b import x", "b.py": "def f():\n    from .a import y"}, True, True),
        ({"p/__init__.py": "from .a import x", "p/a.py": "from . import x"}, True, False),
        ({"p/a.py": "from ..q import b", "q/b.py": "", "q/c.py": "from ..p import a"}, False, True),
        ({"p/a.py": "from ..q import b", "q/b.py": "from torch import x", "p/__init__.py": ""}, False, False),
    ],
    ids=["two", "three", "in a function", "a package and its module", "packages alone", "none"],
)  # fmt: skip
def test_circles_are_found(tmp_path: Path, sources: dict[str, str], modules: bool, packages: bool) -> None:
    for name, source in {"__init__.py": "", **sources}.items():
        path = tmp_path / "top" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    found = imports_of(tmp_path / "top")
    assert (circle(found) is not None, circle(of_packages(found)) is not None) == (modules, packages)
