#!/usr/bin/env python3
"""The C++ compiler of .ci/run, which compiles sources that several builds share only once.

.ci/run builds the library four times. The sources of csrc/core, csrc/cpu and csrc/peak, which are most of
the work, include nothing of torch and Python, so that all builds can share their object files. Each build
still runs the preprocessor: an object file is copied if it was made of the same text with the same flags.

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
#: The argument after one of these options is a path, which does not change the object file.
OF_PATHS = ("-o", "-MF", "-MT", "-isystem")
#: Options that begin so act on the preprocessor, or on warnings and lists of headers, not on the object file.
WITHOUT_EFFECT = ("-I", "-isystem", "-D", "-W", "-M")
#: If several options begin so, the last one counts; these are the compiler's defaults.
LAST_COUNTS = {"-O": "-O0", "-g": "-g0", "-std=": ""}


def source_of(arguments: list[str]) -> str | None:
    """The source that is to be compiled, if builds can share its object file."""
    if "-c" not in arguments or "-o" not in arguments:
        return None
    found = [it for it in arguments if it.endswith(".cpp") and "csrc" in Path(it).parts]
    return found[0] if len(found) == 1 and {"core", "cpu", "peak"} & {*Path(found[0]).parts} else None


def object_file(arguments: list[str], source: str) -> Path:
    """Where the object file is kept. The preprocessor also writes the list of headers that ninja reads."""
    target = arguments.index("-o") + 1
    text = _output([*arguments[:target], "-", *arguments[target + 1 :], "-E", "-P"])
    paths = {n + shift for n, it in enumerate(arguments) if it in OF_PATHS for shift in (0, 1)}
    rest = [it for n, it in enumerate(arguments) if n not in paths and it != source]
    flags = [it.encode() for it in effective([it for it in rest if not it.startswith(WITHOUT_EFFECT)])]
    digest = hashlib.sha256(b"\0".join([_output(["--version"]), *flags, text])).hexdigest()
    return Path(os.environ["ONCE_OBJECTS"]) / f"{digest}.o"


def effective(flags: list[str]) -> list[str]:
    """The flags in a form that does not depend on their order or repetition."""
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
    # The file gets its name only when it is complete.
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(Path(target).read_bytes())
    os.replace(file.name, kept)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
