"""docs/environment-variables.md names exactly the variables that are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT, text_of

from selfattn_ext import info

_NAME = r"[A-Z][A-Z0-9_]+"
_QUOTED = re.compile(rf'(?<!startswith\()"({_NAME})"')
_OURS = re.compile(r'"(SELFATTN_[A-Z0-9_]+)"')
_CONSTANT = re.compile(rf'^(\w+)(?:: str)? = "({_NAME})"$', re.M)
_OF_A_SHELL = re.compile(rf"\$\{{({_NAME}):?[-+=]")
_OF_MAKE = re.compile(rf"^({_NAME}) \?=", re.M)
_SHELL_IN_MAKE = re.compile(rf"\$\$({_NAME})")
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh"}


def files() -> Iterator[Path]:
    """Yields all sources except test modules, which set variables for other code to read."""
    for folder in ("selfattn_ext", "csrc", ".pep517", "benchmarks", "scripts", "simulators", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and not path.name.startswith("test_"):
                yield path
    yield from (ROOT / "setup.py", ROOT / "Makefile", ROOT / ".ci" / "run")


def read_in(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if path.name == "Makefile":
        return {*_OF_MAKE.findall(text), *_SHELL_IN_MAKE.findall(text)} - {"PATH"}
    if path.suffix == ".sh" or path.name == "run":
        return set(_OF_A_SHELL.findall(text))
    names = set(_OURS.findall(text))
    constants = dict(_CONSTANT.findall(text))
    for line in text.splitlines():
        if re.search(r"\benviron\b|\bgetenv\b", line):
            names.update(_QUOTED.findall(line))
            names.update(constants[word] for word in re.findall(r"\w+", line) if word in constants)
    return names


def documented() -> set[str]:
    """Returns the names in the first column of the page's tables."""
    cells = re.findall(r"^\| (`[^|]+`) \|", text_of("docs/environment-variables.md"), re.M)
    return {name for cell in cells for name in re.findall(rf"`({_NAME})`", cell)}


def test_the_page_names_what_is_read() -> None:
    read = set().union(*map(read_in, files())) | set(info.VARIABLES)
    assert sorted(read - documented()) == []
    assert sorted(documented() - read) == []
