""".ci/compile_once.py compiles a text that builds share only once, and every other text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "compile_once.py"

#: A compiler that records its calls if it compiles, but not if it only preprocesses.
COMPILER = """#!/bin/sh
case " $* " in *" -E "*|*--version*) ;; *) echo "$*" >> calls ;; esac
exec c++ "$@"
"""

SOURCE = '#include "sum.h"\nint sum(int a, int b) { return a + b + MORE; }\n'


class Build:
    """A folder with the sources of a build, and the calls of its compiler."""

    def __init__(self, folder: Path, objects: Path) -> None:
        self.folder, self.objects = folder, objects
        for name in ("cpu", "ops"):
            (folder / "csrc" / name).mkdir(parents=True)
            self.write(f"{name}/sum.cpp", SOURCE)
        self.write("sum.h", "#define MORE 0\n")
        (folder / "c++").write_text(COMPILER)
        (folder / "c++").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / "csrc" / name).write_text(text)

    def compile(self, source: str = "cpu/sum.cpp", *flags: str) -> int:
        """Compiles a source and returns the compiler's exit code."""
        csrc = self.folder / "csrc"
        command = [sys.executable, SCRIPT, "-MMD", "-MF", "sum.d", f"-I{csrc}", f"-D{self.folder.name}"]
        command += ["-c", csrc / source, "-o", "sum.o", *flags]
        variables = {"ONCE_CXX": str(self.folder / "c++"), "ONCE_OBJECTS": str(self.objects)}
        done = subprocess.run(command, cwd=self.folder, env={**os.environ, **variables}, capture_output=True)
        return done.returncode

    def compiled(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def builds(tmp_path: Path) -> tuple[Build, Build]:
    (tmp_path / "objects").mkdir()
    first, second = (Build(tmp_path / name, tmp_path / "objects") for name in ("first", "second"))
    return first, second


def test_the_second_build_copies(builds: tuple[Build, Build]) -> None:
    first, second = builds
    assert first.compile("cpu/sum.cpp", "-O1") == second.compile("cpu/sum.cpp", "-O1") == 0
    assert (first.compiled(), second.compiled()) == (1, 0)
    assert (first.folder / "sum.o").read_bytes() == (second.folder / "sum.o").read_bytes()
    # By this file ninja compiles again when a header changes.
    assert str(second.folder / "csrc" / "sum.h") in (second.folder / "sum.d").read_text()


@pytest.mark.parametrize("change", ["source", "header", "flags"])
def test_what_differs_is_compiled(change: str, builds: tuple[Build, Build]) -> None:
    first, second = builds
    if change == "source":
        second.write("cpu/sum.cpp", SOURCE.replace("a + b", "a - b"))
    if change == "header":
        second.write("sum.h", "#define MORE 1\n")
    assert first.compile() == 0
    assert second.compile("cpu/sum.cpp", *(["-O2"] if change == "flags" else [])) == 0
    assert second.compiled() == 1
    assert (first.folder / "sum.o").read_bytes() != (second.folder / "sum.o").read_bytes()


def test_flags_count_by_what_they_say(builds: tuple[Build, Build]) -> None:
    first, second = builds
    assert first.compile("cpu/sum.cpp", "-O1", "-fPIC", "-Wall", "-O2", "-g", "-fwrapv", "-g0") == 0
    assert second.compile("cpu/sum.cpp", "-fwrapv", "-O2", "-MT", "sum.o", "-fPIC", "-fPIC") == 0
    assert second.compiled() == 0
    for others in (["-O2", "-O1"], ["-O2", "-g"], ["-O2", "-fno-wrapv"]):
        before = second.compiled()
        assert second.compile("cpu/sum.cpp", "-fwrapv", "-fPIC", *others) == 0
        assert second.compiled() == before + 1


def test_what_sees_torch_is_always_compiled(builds: tuple[Build, Build]) -> None:
    first, second = builds
    assert first.compile("ops/sum.cpp") == second.compile("ops/sum.cpp") == 0
    assert (first.compiled(), second.compiled()) == (1, 1)
    assert not list(first.objects.iterdir())


@pytest.mark.parametrize("text", ["#include <nowhere>\n", "int sum( {\n"])
def test_errors_are_the_compilers(text: str, builds: tuple[Build, Build]) -> None:
    first, _ = builds
    first.write("cpu/sum.cpp", text)
    assert first.compile() == 1
    assert not list(first.objects.iterdir())
