"""Looks for the tools that a build needs besides torch: a C++17 compiler, Python's headers, ninja.

setup.py and the PEP 517 backend load this file by its path before torch is found, so it imports neither torch
nor the rest of the package.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_PROBE = "#include <optional>\n#if __cplusplus < 201703L\n#error\n#endif\nint main() { return 0; }\n"


def compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX where it is set, else the first of c++, g++, clang++ on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def _compiles(command: list[str], text: str, *flags: str) -> bool:
    run = [*command, "-std=c++17", "-fsyntax-only", *flags, "-x", "c++", "-"]
    try:
        return subprocess.run(run, input=text, text=True, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def compiler_problem() -> str | None:
    """One sentence on why nothing can be compiled here and what to install, or None if all is well."""
    need = "selfattn_ext needs a C++17 compiler"
    install = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)."
    command = compiler()
    if command is None and os.environ.get("CXX"):
        return f"{need}, and CXX={os.environ['CXX']} is not a program that can be run."
    if command is None:
        return f"{need}, and none of c++, g++, clang++ is on PATH: {install}"
    if len(command) > 1:
        return (
            f"{need} that is one program, and CXX={os.environ['CXX']} is several words, which torch takes "
            'for the name of one: write a script of one line (exec ccache g++ "$@"), and set CXX to its path.'
        )
    if not _compiles(command, _PROBE):
        return f"{need}, and {shlex.join(command)} compiles no C++17 program: {install}"
    include = sysconfig.get_path("include")
    if not _compiles(command, "#include <Python.h>\n" + _PROBE, f"-I{include}"):
        return (
            f"selfattn_ext needs the headers of Python, and {include} has no usable Python.h: install them "
            "(Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
        )
    return None


def ninja_folder() -> str | None:
    """The folder of the ninja program: on PATH, beside this interpreter or in the ninja package; else None.

    PATH alone is not enough, because ``.venv/bin/python`` may be called without activating its environment.
    """
    places = [
        os.environ.get("PATH", os.defpath),
        str(Path(sys.executable).parent),
        sysconfig.get_path("scripts"),
    ]
    spec = find_spec("ninja")
    if spec is not None and spec.origin is not None:
        places.append(str(Path(spec.origin).parent / "data" / "bin"))
    found = shutil.which("ninja", path=os.pathsep.join(places))
    return None if found is None else str(Path(found).parent)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Make torch's build code find the same compiler and ninja as this module, also for linking."""
    saved = {name: os.environ.get(name) for name in ("CXX", "NVCC_CCBIN", "PATH")}
    command, folder = compiler(), ninja_folder()
    if command is not None:
        os.environ["CXX"] = command[0]
        # Otherwise nvcc would take gcc, which may be of a version that it does not accept.
        os.environ.setdefault("NVCC_CCBIN", command[0])
    if folder is not None:
        os.environ["PATH"] = os.pathsep.join([saved["PATH"] or os.defpath, folder])
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
