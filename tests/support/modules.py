"""Paths of the test modules, whose names are unique among all folders."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def paths() -> dict[str, Path]:
    """Returns, by its name, each module that needs only the extra "test"."""
    return {
        path.name: path
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.parent.name not in ("clients", "site")
    }
