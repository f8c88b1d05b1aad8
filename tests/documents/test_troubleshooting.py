"""Every message that docs/troubleshooting.md quotes is provoked and compared."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pages import ROOT, text_of

from selfattn_ext import backends, flex_attention
from selfattn_ext.arguments import checks
from selfattn_ext.build import cuda_build, jit, library, toolchain

QUOTES = re.findall(r"^> (.+)$", text_of("docs/troubleshooting.md"), re.M)
NVCC = cuda_build.Nvcc("nvcc", "/opt/cuda-12.8", (12, 8), ("7.5", "8.0", "9.0"))


class Here(NamedTuple):
    """The fixtures with which the functions below provoke messages."""

    patch: pytest.MonkeyPatch
    output: pytest.CaptureFixture[str]
    folder: Path
    run_python: Callable[..., str]

    def replace(self, name: str, value: Any) -> None:
        """Replaces a name of a module of the package, such as "build.jit.load"."""
        self.patch.setattr(f"selfattn_ext.{name}", value)


def error_of(call: Callable[..., Any], *arguments: Any, kind: type[BaseException] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        call(*arguments)
    return str(raised.value)


def in_backend(function: str, **changed: Any) -> str:
    """Returns the error of a function of .pep517/build_backend.py, which sees other functions changed."""
    names = runpy.run_path(str(ROOT / ".pep517" / "build_backend.py"))
    call = getattr(names[function], "__wrapped__", names[function])
    call.__globals__.update(changed)
    return error_of(call, kind=SystemExit)


def without_torch(here: Here) -> str:
    script = (
        "import sys; sys.modules['torch'] = None\ntry: import selfattn_ext\nexcept ImportError as e: print(e)"
    )
    return here.run_python(script).strip()


def loading(here: Here, name: str, value: Any) -> str:
    """Loads the library with a name of the package replaced."""
    here.replace(name, value)
    return error_of(library.extension.__wrapped__, kind=ImportError)


def with_compiler(here: Here, compiles: Callable[..., bool] | None = None, **variables: str) -> str:
    if compiles is not None:
        here.replace("build.toolchain._compiles", compiles)
    here.patch.delenv("CXX", raising=False)
    for name, value in variables.items():
        here.patch.setenv(name, value)
    return toolchain.compiler_problem() or "none"


def without_ninja(here: Here) -> str:
    here.replace("build.toolchain.ninja_folder", lambda: None)
    return error_of(jit.compile_and_load, "unused", [], kind=ImportError)


def without_library(here: Here, error: Exception) -> str:
    def fail(*arguments: Any, why: str) -> None:
        print(f"selfattn_ext: {why}")
        raise error

    here.replace("build.jit.compile_and_load", fail)
    return error_of(library._compile, kind=ImportError)


def why_it_compiles(here: Here) -> str:
    without_library(here, ImportError("there is no compiler"))
    return here.output.readouterr().out.strip()


def with_library(here: Here, content: bytes) -> str:
    file = here.folder / "_C.so"
    file.write_bytes(content)
    here.patch.setenv("SELFATTN_LIBRARY", str(file))
    return error_of(library._import, str(file), kind=ImportError)


def with_lock_that_raises(here: Here, *errors: OSError) -> str:
    raised = iter(errors)

    def flock(*arguments: Any) -> None:
        for error in raised:
            raise error

    here.patch.setattr("fcntl.flock", flock)
    here.patch.setattr("torch.utils.cpp_extension.load", lambda *arguments, **keywords: None)
    (here.folder / "lock").touch()
    jit.compile_and_load("unused", [], build_directory=here.folder)
    return here.output.readouterr().err.strip()


def without_kernels(here: Here) -> str:
    build = {"cuda": False, "cuda_absent": "nvcc"}
    here.replace("build.library.extension", lambda: SimpleNamespace(build_info=lambda: build))
    return error_of(checks._has_kernels, "query", torch.device("cuda:0"))


def without_cuda(
    here: Here, torch_cuda: str | None, nvcc: cuda_build.Nvcc | None = None, host: str | None = None
) -> str:
    here.patch.setenv("SELFATTN_CUDA", "1")
    here.replace("build.cuda_build.find_nvcc", lambda: nvcc)
    here.replace("build.cuda_build._host_problem", lambda found: host)
    return error_of(cuda_build.plan, "2.14.1", torch_cuda, [])


def call_with(score_mod: Callable[..., Any]) -> torch.Tensor:
    query = torch.zeros(1, 1, 2, 8, device="cpu")
    return flex_attention(query, query, query, score_mod)


def warning_of_a_function(here: Here) -> str:
    here.replace("flex.kernel_calls._warned", set())
    with pytest.warns(UserWarning, match="does not compile") as warned:
        call_with(lambda score, b, h, q, kv: torch.stack([score, score]).sum())
    return str(warned[0].message)


def outside_a_tensor(here: Here) -> str:
    table = torch.zeros(1, device="cpu")
    return error_of(call_with, lambda score, b, h, q, kv: score + table[q], kind=IndexError)


def in_the_source(path: str, begins: str) -> str:
    """Reads a message that this machine cannot provoke from C++: literals from ``begins`` to a semicolon."""
    text = (ROOT / "csrc" / path).read_text(encoding="utf-8")
    statement = text[text.index(f'"{begins}') :].partition(";")[0]
    parts = re.split(r'"((?:[^"\\]|\\.)*)"', statement)
    # An expression between two literals is filled in at run time.
    gaps = ["" if not gap.strip(" \n+)") else "?" for gap in parts[2::2]]
    return "".join(literal + gap for literal, gap in zip(parts[1::2], gaps, strict=True))


def forced(isa: str) -> str:
    return error_of(lambda: backends.use_cpu_isa(isa).__enter__())


def without_amx(here: Here) -> str:
    if "amx" not in backends.cpu_isas():
        return forced("amx")
    begin = forced("sse9").partition("is unknown")[0].replace("sse9", "amx")
    return begin + in_the_source("cpu/cpu_kernel_table.cpp", "cannot be used: ")


#: Words that only one message contains -> the function that provokes it.
PROVOKED: dict[str, Callable[[Here], str]] = {
    "and … has none": lambda here: in_backend("_find_torch", _ask=lambda python: None),
    "and … is 2.10.1": lambda here: in_backend(
        "_check", _find_torch=lambda: {"torch": "2.10.1", "folder": "/somewhere/torch"}
    ),
    "pip install torch, then": without_torch,
    "and this is 2.10.1": lambda here: loading(here, "build.library.torch.__version__", "2.10.1"),
    "is on PATH: install one": lambda here: with_compiler(here, PATH=str(here.folder)),
    "is not a program that can be run": lambda here: with_compiler(here, CXX="/nowhere/g++"),
    "that is one program": lambda here: with_compiler(here, CXX="env c++"),
    "compiles no C++17 program": lambda here: with_compiler(here, lambda command, text, *flags: False),
    "Python.h": lambda here: with_compiler(here, lambda command, text, *flags: "Python.h" not in text),
    "needs ninja": without_ninja,
    "none can be made": lambda here: without_library(here, ImportError("there is no compiler")),
    "its sources do not compile": lambda here: without_library(here, RuntimeError("first line\nsecond line")),
    "no compiled library for this Python": why_it_compiles,
    "does not load under torch": lambda here: with_library(here, b"no library"),
    "is of version": lambda here: loading(here, "build.sources.version", lambda: "99.0"),
    "another library": lambda here: loading(here, "build.library._is_open", lambda file: False),
    "waiting for another process": lambda here: with_lock_that_raises(here, BlockingIOError()),
    "another process is compiling": lambda here: with_lock_that_raises(here, OSError("no locks here")),
    "has no CUDA kernels": without_kernels,
    "is a build without CUDA": lambda here: without_cuda(here, None),
    "there is no nvcc": lambda here: without_cuda(here, "13.0"),
    "is not of the CUDA of torch": lambda here: without_cuda(here, "13.0", NVCC),
    "compiles nothing here": lambda here: without_cuda(here, "12.8", NVCC, "error: gcc is too new"),
    "each with +PTX or without": lambda here: error_of(cuda_build.architectures_of, "6.0;8.0", [], NVCC),
    "is unknown; this library has": lambda here: forced("sse9"),
    "kernel must be": lambda here: error_of(lambda: backends.use("fast").__enter__()),
    "does not compile this function": warning_of_a_function,
    "must not decide by the value": lambda here: error_of(
        call_with, lambda score, b, h, q, kv: score if q < kv else -score
    ),
    "reads outside a captured tensor": outside_a_tensor,
    "and the GPU has": lambda here: in_the_source(
        "ops/cuda/device_code.cu", "this build of selfattn_ext has CUDA kernels"
    ),
    **{
        begins: lambda here, begins=begins: in_the_source("cpu/amx_permission.cpp", begins)
        for begins in (
            "the operating system refuses AMX",
            "the operating system does not save",
            "this processor lacks",
        )
    },
    "cannot be used": without_amx,
}


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:60])
def test_quote(
    quote: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    run_python: Callable[..., str],
) -> None:
    (provoke,) = [PROVOKED[words] for words in PROVOKED if words in quote]
    message = provoke(Here(monkeypatch, capsys, tmp_path, run_python))
    # … stands for text that differs from machine to machine.
    pattern = ".+?".join(map(re.escape, quote.split("…")))
    assert re.fullmatch(pattern, message, re.S), message


def test_everything_provoked_is_quoted() -> None:
    assert [words for words in PROVOKED if not any(words in quote for quote in QUOTES)] == []
