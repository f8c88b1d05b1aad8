"""modules.py relies on unique names, and no test module lies on the first level of tests/."""

from __future__ import annotations

from collections import Counter

import modules


def test_every_test_module_is_in_a_folder() -> None:
    assert sorted(path.name for path in modules.TESTS.glob("test_*")) == []


def test_files_have_different_names() -> None:
    files = [
        path for path in modules.TESTS.rglob("*.*") if path.is_file() and path.parent.name != "__pycache__"
    ]
    counts = Counter(path.name for path in files if path.name != "conftest.py" and path.name[0] != ".")
    assert sorted(name for name, count in counts.items() if count > 1) == []
