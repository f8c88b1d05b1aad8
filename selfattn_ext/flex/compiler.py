"""Compiles functions of scores, once for all processes: libraries are kept in a folder, named by what made
them.

The folder is SELFATTN_FUNCTION_CACHE, else selfattn_ext in XDG_CACHE_HOME or ~/.cache; where it cannot be
written, a temporary one serves this process. Processes that compile the same function at once do not wait for
each other: each writes a file of its own and gives it its name when it is complete. Beside the libraries lies
what the compiler says of itself, so that they are found where there is no compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from .. import library, sources, toolchain

__all__ = ["KEY_LENGTH", "CompilerError", "folder", "load"]

_VARIABLE = "SELFATTN_FUNCTION_CACHE"
#: What the compiler says of itself that was the last to make a library of the folder.
_COMPILER = "compiler.txt"
_HEADERS = ("core/score_function.h", "core/score_function_math.h")
#: As many characters as the operators' names of functions have at most.
KEY_LENGTH = 31

_loaded: set[str] = set()


class CompilerError(Exception):
    """There is no compiler, or it refused; the message says what it said."""


def load(source: str) -> str:
    """The name by which the operators know the functions of a source, which is compiled if nobody has.

    Raises:
        CompilerError: it cannot be compiled here.
    """
    key = _key(source)
    if key not in _loaded:
        file = folder() / f"{key}.so"
        if not file.exists():
            _compile(source, file)
        library.extension().load_score_function(key, str(file))
        _loaded.add(key)
    return key


@functools.lru_cache(maxsize=256)
def _key(source: str) -> str:
    digest = hashlib.sha256(_surroundings().encode())
    digest.update(source.encode())
    return digest.hexdigest()[:KEY_LENGTH]


@functools.cache
def _surroundings() -> str:
    """What beside the source decides what a library is: headers, compiler and flags."""
    headers = [(sources.root() / name).read_text(encoding="utf-8") for name in _HEADERS]
    return "\n".join([*headers, shlex.join(_flags()), _compiler_version()])


@functools.cache
def _compiler_version() -> str:
    """Of the compiler; where there is none, of the last that compiled for the folder."""
    try:
        return _asked_version()
    except CompilerError:
        kept = folder() / _COMPILER
        if not kept.exists():
            raise
        return kept.read_text(encoding="utf-8")


def _asked_version() -> str:
    command = _compiler()
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(f"{shlex.join(command)} does not run: {error}") from error
    return done.stdout


def _compiler() -> list[str]:
    command = toolchain.compiler()
    if command is None:
        raise CompilerError(toolchain.compiler_problem() or "there is no C++ compiler")
    return command


@functools.cache
def _flags() -> list[str]:
    """Scores must not depend on where in a vector they are, so products and sums stay apart; nobody looks at
    errno or traps.
    """
    flags = ["-std=c++17", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    features = {name for name, has in library.extension().cpu_features().items() if has}
    if "avx512f" in features:
        return [
            *flags,
            "-mfma",
            "-mavx512f",
            "-mavx512vl",
            "-mavx512bw",
            "-mavx512dq",
            "-mprefer-vector-width=512",
        ]
    return [*flags, "-mavx2", "-mfma"] if {"avx2", "fma"} <= features else flags


@functools.cache
def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = Path(os.environ.get(_VARIABLE) or os.path.join(base, "selfattn_ext"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError:
        return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="selfattn_ext_")


def _compile(source: str, file: Path) -> None:
    command = _compiler()
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="making_") as folder:
        text, made = Path(folder, f"{file.stem}.cpp"), Path(folder, file.name)
        text.write_text(source, encoding="utf-8")
        run = [*command, *_flags(), f"-I{sources.root()}", str(text), "-o", str(made)]
        try:
            done = subprocess.run(run, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{shlex.join(command)} does not run: {error}") from error
        if done.returncode != 0:
            raise CompilerError(f"{shlex.join(run)} failed:\n{done.stderr.strip()}")
        os.replace(made, file)
        text.write_text(_compiler_version(), encoding="utf-8")
        os.replace(text, file.with_name(_COMPILER))
