#!/usr/bin/env python3
"""The C++ compiler of .ci/run, which builds the library four times: what is the same is compiled once.

These are the sources of csrc/core, csrc/cpu and csrc/peak, most of the work, as they see nothing of torch
and Python. The second build still reads all their headers: an object file is copied if the text after the
preprocessor and the flags are those that it was made of.

ONCE_CXX is the compiler, ONCE_OBJECTS the folder of the object files.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = os.environ["ONCE_CXX"]
#: Options of which the next argument is a path, and says nothing about the object file.
OF_PATHS = ("-o", "-MF", "-MT", "-isystem")
#: What begins so has done its work when the text is there, or changes what is said about it.
WITHOUT_EFFECT = ("-I", "-isystem", "-D", "-W", "-M")
#: Of what begins so, the last one counts; without any it is this one.
LAST_COUNTS = {"-O": "-O0", "-g": "-g0", "-std=": ""}


def source_of(arguments: list[str]) -> str | None:
    """The source that is to be compiled, if it can be the same in two builds."""
    if "-c" not in arguments or "-o" not in arguments:
        return None
    found = [it for it in arguments if it.endswith(".cpp") and "csrc" in Path(it).parts]
    return found[0] if len(found) == 1 and {"core", "cpu", "peak"} & {*Path(found[0]).parts} else None


def object_file(arguments: list[str], source: str) -> Path:
    """Where the object file is kept. The preprocessor also writes down which headers there are, for ninja."""
    target = arguments.index("-o") + 1
    text = _output([*arguments[:target], "-", *arguments[target + 1 :], "-E", "-P"])
    paths = {n + shift for n, it in enumerate(arguments) if it in OF_PATHS for shift in (0, 1)}
    rest = [it for n, it in enumerate(arguments) if n not in paths and it != source]
    flags = [it.encode() for it in effective([it for it in rest if not it.startswith(WITHOUT_EFFECT)])]
    digest = hashlib.sha256(b"\0".join([_output(["--version"]), *flags, text])).hexdigest()
    return Path(os.environ["ONCE_OBJECTS"]) / f"{digest}.o"


def effective(flags: list[str]) -> list[str]:
    """What the flags say, whatever their order and however often."""
    last = {
        start: next((it for it in reversed(flags) if it.startswith(start)), default)
        for start, default in LAST_COUNTS.items()
    }
    return sorted({*last.values(), *(it for it in flags if not it.startswith(tuple(LAST_COUNTS)))})


def _output(arguments: list[str]) -> bytes:
    return subprocess.run([COMPILER, *arguments], stdout=subprocess.PIPE, check=True).stdout


def main(arguments: list[str]) -> None:
    source = source_of(arguments)
    if source is None:
        os.execvp(COMPILER, [COMPILER, *arguments])
    kept, target = object_file(arguments, source), arguments[arguments.index("-o") + 1]
    if kept.exists():
        shutil.copyfile(kept, target)
        return
    subprocess.run([COMPILER, *arguments], check=True)
    # Under its name only when whole.
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(Path(target).read_bytes())
    os.replace(file.name, kept)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
