"""docs/files.md lists every source, and scripts/list_files.py finds those without a comment."""

from __future__ import annotations

from pathlib import Path

import list_files
import pytest
from pages import ROOT, text_of


def test_the_page_is_what_the_command_writes() -> None:
    text, silent = list_files.page(ROOT)
    assert silent == [], "a file needs a first comment, or a docstring, that says what it holds"
    assert text == text_of(list_files.PAGE), "python scripts/list_files.py --write"


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("a.h", "// Rows of keys.\n// Read once.\n#pragma once\n", "Rows of keys"),
        ("a.cuh", "#pragma once\n\n// Rows of 2.5 keys, e.g. three:\n// one by one. And more.\n",
         "Rows of 2.5 keys, e.g. three: one by one"),
        ("a.cpp", "#include <x>\n\n// A function.\nint f();\n", ""),
        ("a.cu", "namespace a {}\n", ""),
        ("a.py", '"""Draws\nmasks."""\n', "Draws masks"),
        ("a.py", "# Draws masks.\n", ""),
        ("a.sh", "#!/bin/sh\n# Runs all\n#\n# of it.\n", "Runs all"),
        ("run", "#!/usr/bin/env bash\nset -e\n", ""),
    ],
)  # fmt: skip
def test_first_sentence(name: str, source: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(source, encoding="utf-8")
    assert list_files.first_sentence(tmp_path / name) == sentence


def test_a_source_shares_its_headers_line_and_silent_files_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "csrc" / "core"
    folder.mkdir(parents=True)
    files = {
        "rows.cpp": "int rows;\n",
        "rows.h": "// Rows | *columns* of ``keys*``, by :mod:`.rows`.\n",
        "silent.cpp": "int silent;\n",
        "own.h": "// A header.\n",
        "own.cpp": "// A source.\n",
        "__own__.h": "// Underscores.\n",
        "table.txt": "no source\n",
    }
    for name, source in files.items():
        (folder / name).write_text(source, encoding="utf-8")
    text, silent = list_files.page(tmp_path)
    assert silent == ["csrc/core/silent.cpp"]
    assert text.splitlines()[-5:] == [
        "| [`__own__.h`](../csrc/core/__own__.h) | Underscores |",
        "| [own.cpp](../csrc/core/own.cpp) | A source |",
        "| [own.h](../csrc/core/own.h) | A header |",
        "| [rows.h](../csrc/core/rows.h), [rows.cpp](../csrc/core/rows.cpp) "
        "| Rows \\| \\*columns\\* of ``keys*``, by `rows` |",
        "| [silent.cpp](../csrc/core/silent.cpp) |  |",
    ]
