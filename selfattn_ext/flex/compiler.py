"""Compiles functions of scores for the CPU, once for all processes.

Libraries are kept in the folder of :mod:`.function_cache`, under a digest of all that they depend on.
Processes that compile the same function at once do not wait for each other. The compiler's version is kept
beside the libraries, so that they are found without a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
import subprocess
import tempfile
from pathlib import Path

from ..build import library, sources, toolchain
from ..terminal import waiting
from . import function_cache

__all__ = ["KEY_LENGTH", "CompilerError", "load"]

#: The file with the version of the compiler that was the last to make a library of the folder.
_COMPILER = "compiler.txt"
_HEADERS = ("core/score_function.h", "core/score_function_math.h")
#: The most characters that the operators' names of functions have.
KEY_LENGTH = 31

_loaded: set[str] = set()


class CompilerError(Exception):
    """There is no compiler, or it refused; the message has its output."""


def load(source: str) -> str:
    """The name by which the operators know the functions of a source, which is compiled if it was not yet.

    Raises:
        CompilerError: it cannot be compiled here.
    """
    key = _key(source)
    if key not in _loaded:
        file = function_cache.find(f"{key}.so")
        # A library of another machine may need what this one lacks, and the folder may be gone by now.
        if file is None or _refusal(key, file):
            _load_new(key, source)
        _loaded.add(key)
    return key


def _load_new(key: str, source: str) -> None:
    made = _compiled(source)
    try:
        file = function_cache.write(f"{key}.so", made)
        function_cache.write(_COMPILER, _compiler_version().encode())
    except OSError as error:
        raise CompilerError(f"a compiled function cannot be kept: {error}") from error
    refusal = _refusal(key, file)
    if refusal is not None:
        raise CompilerError(str(refusal))


def _refusal(key: str, file: Path) -> ValueError | None:
    try:
        library.extension().load_score_function(key, str(file))
    except ValueError as error:
        return error
    return None


@functools.lru_cache(maxsize=256)
def _key(source: str) -> str:
    digest = hashlib.sha256(_surroundings().encode())
    digest.update(source.encode())
    return digest.hexdigest()[:KEY_LENGTH]


@functools.cache
def _surroundings() -> str:
    """All that a library depends on besides its source: headers, compiler and flags."""
    headers = [(sources.root() / name).read_text(encoding="utf-8") for name in _HEADERS]
    return "\n".join([*headers, shlex.join(_flags()), _compiler_version()])


@functools.cache
def _compiler_version() -> str:
    """The version of the compiler; if there is none, of the last one that compiled for the folder."""
    try:
        return _asked_version()
    except CompilerError:
        kept = function_cache.read(_COMPILER)
        if kept is None:
            raise
        return kept.decode()


def _asked_version() -> str:
    return _run([*_compiler(), "--version"]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A finished command of the compiler.

    Raises:
        CompilerError: it failed; the message has its output.
    """
    try:
        # Compilers speak in the language and the encoding of their user.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        raise CompilerError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return done


def _compiler() -> list[str]:
    command = toolchain.compiler()
    if command is None:
        raise CompilerError(toolchain.compiler_problem() or "there is no C++ compiler")
    return command


@functools.cache
def _flags() -> list[str]:
    """The flags of the compiler. Products and sums stay apart, because scores must not depend on their place
    in a vector; errno and traps are not looked at.
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


def _compiled(source: str) -> bytes:
    try:
        # A folder of its own, as anybody may delete the one where libraries are kept.
        with tempfile.TemporaryDirectory(prefix="selfattn_ext_") as folder:
            text, made = Path(folder, "function.cpp"), Path(folder, "function.so")
            text.write_text(source, encoding="utf-8")
            command = [*_compiler(), *_flags(), f"-I{sources.root()}", str(text), "-o", str(made)]
            with waiting("selfattn_ext: compiling a function of scores, once for all processes"):
                _run(command)
            if not made.exists():
                raise CompilerError(f"{shlex.join(command)} made no library")
            return made.read_bytes()
    except OSError as error:
        raise CompilerError(f"a function cannot be compiled: {error}") from error
