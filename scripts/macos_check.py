"""Compiles and links the library for macOS on arm64, with the cross compiler of the package ziglang.

    python scripts/macos_check.py

Any warning is an error. Nothing is run, so that this finds what does not compile there and nothing else.
Names of torch and of Python stay open, as in every module of macOS: torch's libraries are not needed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "macos"
_COMPILER = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos"]
#: Optimisation changes what is compiled little, and takes most of the time.
_FLAGS = ["-O0", "-Wall", "-Wextra", "-Werror", "-fPIC"]


def compile_source(source: Path, flags: list[str]) -> Path:
    """Compiles a source, and returns the object file.

    Raises:
        SystemExit: it does not compile.
    """
    made = FOLDER / source.relative_to(ROOT).with_suffix(".o")
    made.parent.mkdir(parents=True, exist_ok=True)
    _run([*_COMPILER, *flags, "-c", str(source), "-o", str(made)])
    return made


def python_headers() -> Path:
    """A copy of this Python's headers that any compiler reads: Debian's look for a part of Linux by name."""
    installed, copied = Path(sysconfig.get_path("include")), FOLDER / "python"
    shutil.copytree(installed, copied, dirs_exist_ok=True)
    of_this_machine = (
        installed.parent / str(sysconfig.get_config_var("MULTIARCH")) / installed.name / "pyconfig.h"
    )
    if of_this_machine.exists():
        shutil.copy(of_this_machine, copied)
    return copied


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or done.stderr:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> None:
    sources = runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py"))
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("this needs torch's headers")
    # As system headers: warnings of theirs are not ours.
    headers = [Path(torch.origin).parent / "include", python_headers()]
    flags = [
        *sources["compile_flags"](),
        *_FLAGS,
        *(word for path in headers for word in ("-isystem", str(path))),
    ]
    paths = [Path(path) for path in sources["extension_sources"](False)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda path: compile_source(path, flags), paths))
    library = FOLDER / "_C.so"
    _run([*_COMPILER, "-shared", "-Wl,-undefined,dynamic_lookup", *map(str, objects), "-o", str(library)])
    print(f"{len(objects)} sources compile and link for macOS on arm64: {library.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
