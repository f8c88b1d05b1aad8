"""scripts/check_references.py finds names of files in comments that do not exist."""

from __future__ import annotations

from pathlib import Path

import check_references
import pytest


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        (
            "csrc/cuda/one.cuh",
            '// Of common/two.h, ../two.h and two.h.\nconst char* kName = "three.h"; // url',
            [],
        ),
        ("csrc/cuda/one.cuh", "/* See\n   three.h. */", ["csrc/cuda/one.cuh:2: no file is called three.h"]),
        ("csrc/one.cpp", "// t*.h, <kind>.h, common/{name}.h", []),
        ("csrc/one.cpp", "// s*.h", ["csrc/one.cpp:1: no file is called s*.h"]),
        ("scripts/one.py", '"""Two.h."""\nname = "three.h"\n', ["scripts/one.py:1: no file is called Two.h"]),
        (
            "scripts/one.py",
            "x = 1  # see csrc/cuda/two.h",
            ["scripts/one.py:1: no file is called csrc/cuda/two.h"],
        ),
        (
            "docs/one.md",
            "```\nthree.h\n```\n[two.h](../csrc/common/two.h), three.h",
            ["docs/one.md:4: no file is called three.h"],
        ),
        ("CHANGELOG.md", "three.h", []),
    ],
)
def test_names(name: str, text: str, missing: list[str], tmp_path: Path) -> None:
    for path, content in (("csrc/common/two.h", ""), ("csrc/cuda/two.h/kept.txt", ""), (name, text)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    assert check_references.dangling(tmp_path) == missing
