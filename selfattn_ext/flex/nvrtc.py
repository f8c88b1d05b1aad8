"""NVRTC, the compiler of CUDA for running programs, which comes with torch."""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Code", "NvrtcError", "compile_kernel", "version"]


class NvrtcError(Exception):
    """There is no NVRTC, or it refused; the message says what it said."""


class Code(NamedTuple):
    """The code of one kernel."""

    #: Machine code for the device; empty if this NVRTC does not know the device.
    cubin: bytes
    #: The assembly language from which CUDA's driver makes machine code.
    ptx: bytes


def version() -> str:
    """The version of NVRTC.

    Raises:
        NvrtcError: there is none.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def compile_kernel(
    text: str, kernel: str, capability: int, headers: Mapping[str, str], options: Sequence[str]
) -> Code:
    """The code of one kernel of a text.

    Args:
        text: the source in CUDA C++.
        kernel: the kernel's name in the text, with its template's arguments.
        capability: the device's compute capability, major * 10 + minor.
        headers: texts by the names under which they are included.
        options: the options of NVRTC, without the architecture.

    Raises:
        NvrtcError: NVRTC refused, with what it said.
    """
    library = _library()
    known = [arch for arch in _architectures() if arch <= capability]
    if not known:
        raise NvrtcError(f"NVRTC {version()} does not know devices of compute capability {capability / 10}")
    best = max(known)
    kind = "sm" if best == capability else "compute"
    names = _strings(headers.keys())
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            b"kernel.cu",
            len(headers),
            _strings(headers.values()),
            names,
        )
    )
    try:
        _check(library.nvrtcAddNameExpression(program, kernel.encode()))
        given = _strings([*options, f"--gpu-architecture={kind}_{best}"])
        status = library.nvrtcCompileProgram(program, len(given), given)
        if status != 0:
            raise NvrtcError(f"{_text_of(status)}:\n{_result(program, 'ProgramLog').decode()}")
        return Code(_result(program, "CUBIN") if kind == "sm" else b"", _result(program, "PTX"))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _result(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{name}")(program, buffer))
    return buffer.raw


def _text_of(status: int) -> str:
    _library().nvrtcGetErrorString.restype = ctypes.c_char_p
    return _library().nvrtcGetErrorString(status).decode()


def _check(status: int) -> None:
    if status != 0:
        raise NvrtcError(_text_of(status))


@functools.cache
def _architectures() -> list[int]:
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    found = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(found))
    return list(found)


@functools.cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise NvrtcError("this torch has no CUDA, and so no NVRTC")
    major = torch.version.cuda.split(".")[0]
    name = f"libnvrtc.so.{major}"
    for folder in _folders(major):
        file = folder / name
        if file.is_file():
            # NVRTC opens this library by its name alone, so it must be loaded already.
            for more in glob.glob(str(folder / f"libnvrtc-builtins.so.{major}*")):
                ctypes.CDLL(more)
            return ctypes.CDLL(str(file))
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise NvrtcError(f"{name} is not found: {error}") from error


def _folders(major: str) -> list[Path]:
    """The folders in which wheels and toolkits have NVRTC."""
    spec = find_spec("nvidia")
    wheels = [] if spec is None else list(spec.submodule_search_locations or [])
    folders = [Path(at, name, "lib") for at in wheels for name in (f"cu{major}", "cuda_nvrtc")]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [*folders, *(Path(toolkit, "lib64") for toolkit in toolkits if toolkit)]
