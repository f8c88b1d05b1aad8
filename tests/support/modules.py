"""Where the test modules are: their names are unique, whatever folder they lie in."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def paths() -> dict[str, Path]:
    """Each module that needs nothing but the extra "test", by its name."""
    return {path.name: path for path in sorted(TESTS.rglob("test_*.py")) if path.parent != TESTS / "clients"}
