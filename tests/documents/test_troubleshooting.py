"""Every message that docs/troubleshooting.md quotes is provoked and compared."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from functools import partial
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

    def error_of(self, call: Callable[[], Any], kind: type[BaseException] = ValueError) -> str:
        with pytest.raises(kind) as raised:
            call()
        return str(raised.value)

    def replace(self, name: str, value: Any) -> None:
        """Replaces a name of a module of the package, such as "build.jit.load"."""
        self.patch.setattr(f"selfattn_ext.{name}", value)


#: Words that only one message contains -> the function that provokes it.
PROVOKED: dict[str, Callable[[Here], str]] = {}


def says(words: str) -> Callable[[Callable[[Here], str]], Callable[[Here], str]]:
    def add(provoke: Callable[[Here], str]) -> Callable[[Here], str]:
        PROVOKED[words] = provoke
        return provoke

    return add


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


def in_backend(function: str, **changed: Any) -> Callable[[], Any]:
    """Returns a function of .pep517/build_backend.py, which sees other functions changed."""
    names = runpy.run_path(str(ROOT / ".pep517" / "build_backend.py"))
    call = getattr(names[function], "__wrapped__", names[function])
    call.__globals__.update(changed)
    return call  # type: ignore[no-any-return]


@says("and … has none")
def _(here: Here) -> str:
    return here.error_of(in_backend("_find_torch", _ask=lambda python: None), SystemExit)


@says("and … is 2.10.1")
def _(here: Here) -> str:
    found = {"torch": "2.10.1", "folder": "/somewhere/torch"}
    return here.error_of(in_backend("_check", _find_torch=lambda: found), SystemExit)


@says("pip install torch, then")
def _(here: Here) -> str:
    script = (
        "import sys; sys.modules['torch'] = None\ntry: import selfattn_ext\nexcept ImportError as e: print(e)"
    )
    return here.run_python(script).strip()


@says("and this is 2.10.1")
def _(here: Here) -> str:
    here.patch.setattr(torch, "__version__", "2.10.1")
    return here.error_of(library.extension.__wrapped__, ImportError)


def compiler_problem() -> str:
    return toolchain.compiler_problem() or "none"


@says("is on PATH: install one")
def _(here: Here) -> str:
    here.patch.delenv("CXX", raising=False)
    here.patch.setenv("PATH", str(here.folder))
    return compiler_problem()


@says("CXX=…")
def _(here: Here) -> str:
    here.patch.setenv("CXX", "/nowhere/g++")
    return compiler_problem()


@says("compiles no C++17 program")
def _(here: Here) -> str:
    here.replace("build.toolchain._compiles", lambda command, text, *flags: False)
    return compiler_problem()


@says("Python.h")
def _(here: Here) -> str:
    here.replace("build.toolchain._compiles", lambda command, text, *flags: "Python.h" not in text)
    return compiler_problem()


@says("needs ninja")
def _(here: Here) -> str:
    here.replace("build.toolchain.ninja_folder", lambda: None)
    return here.error_of(lambda: jit.compile_and_load("unused", []), ImportError)


def without_library(here: Here, error: Exception) -> str:
    def fail(*arguments: Any, why: str) -> None:
        print(f"selfattn_ext: {why}")
        raise error

    here.replace("build.jit.compile_and_load", fail)
    return here.error_of(library._compile, ImportError)


@says("none can be made")
def _(here: Here) -> str:
    return without_library(here, ImportError("there is no compiler"))


@says("its sources do not compile")
def _(here: Here) -> str:
    return without_library(here, RuntimeError("first line\nsecond line"))


@says("no compiled library for this Python")
def _(here: Here) -> str:
    without_library(here, ImportError("there is no compiler"))
    return here.output.readouterr().out.strip()


@says("does not load under torch")
def _(here: Here) -> str:
    file = here.folder / "_C.so"
    file.write_bytes(b"no library")
    here.patch.setenv("SELFATTN_LIBRARY", str(file))
    return here.error_of(lambda: library._import(str(file)), ImportError)


@says("is of version")
def _(here: Here) -> str:
    here.replace("build.sources.version", lambda: "99.0")
    return here.error_of(library.extension.__wrapped__, ImportError)


@says("another library")
def _(here: Here) -> str:
    here.replace("build.library._is_open", lambda file: False)
    return here.error_of(library.extension.__wrapped__, ImportError)


def with_locks_that_raise(here: Here, errors: Iterator[OSError]) -> str:
    def flock(*arguments: Any) -> None:
        for error in errors:
            raise error

    here.patch.setattr("fcntl.flock", flock)
    here.patch.setattr("torch.utils.cpp_extension.load", lambda *arguments, **keywords: None)
    (here.folder / "lock").touch()
    jit.compile_and_load("unused", [], build_directory=here.folder)
    return here.output.readouterr().err.strip()


@says("waiting for another process")
def _(here: Here) -> str:
    return with_locks_that_raise(here, iter([BlockingIOError()]))


@says("another process is compiling")
def _(here: Here) -> str:
    return with_locks_that_raise(here, iter([OSError("no locks here")]))


@says("has no CUDA kernels")
def _(here: Here) -> str:
    build = {"cuda": False, "cuda_absent": "nvcc"}
    here.replace("build.library.extension", lambda: SimpleNamespace(build_info=lambda: build))
    return here.error_of(lambda: checks._has_kernels("query", torch.device("cuda:0")))


def without_cuda(here: Here, torch_cuda: str | None, nvcc: cuda_build.Nvcc | None, host: str | None) -> str:
    here.patch.setenv("SELFATTN_CUDA", "1")
    here.replace("build.cuda_build.find_nvcc", lambda: nvcc)
    here.replace("build.cuda_build._host_problem", lambda found: host)
    return here.error_of(lambda: cuda_build.plan("2.14.1", torch_cuda, []))


says("is a build without CUDA")(partial(without_cuda, torch_cuda=None, nvcc=None, host=None))
says("there is no nvcc")(partial(without_cuda, torch_cuda="13.0", nvcc=None, host=None))
says("is not of the CUDA of torch")(partial(without_cuda, torch_cuda="13.0", nvcc=NVCC, host=None))
says("compiles nothing here")(
    partial(without_cuda, torch_cuda="12.8", nvcc=NVCC, host="error: gcc is too new")
)


@says("each with +PTX or without")
def _(here: Here) -> str:
    return here.error_of(lambda: cuda_build.architectures_of("6.0;8.0", [], NVCC))


@says('the instruction set "…"')
def _(here: Here) -> str:
    return here.error_of(lambda: backends.use_cpu_isa("sse9").__enter__())


@says("kernel must be")
def _(here: Here) -> str:
    return here.error_of(lambda: backends.use("fast").__enter__())


def call_with(score_mod: Callable[..., Any]) -> torch.Tensor:
    query = torch.zeros(1, 1, 2, 8, device="cpu")
    return flex_attention(query, query, query, score_mod)


@says("does not compile this function")
def _(here: Here) -> str:
    here.replace("flex.kernel_calls._warned", set())
    with pytest.warns(UserWarning, match="does not compile") as warned:
        call_with(lambda score, b, h, q, kv: torch.stack([score, score]).sum())
    return str(warned[0].message)


@says("must not decide by the value")
def _(here: Here) -> str:
    return here.error_of(lambda: call_with(lambda score, b, h, q, kv: score if q < kv else -score))


@says("reads outside a captured tensor")
def _(here: Here) -> str:
    table = torch.zeros(1, device="cpu")
    return here.error_of(lambda: call_with(lambda score, b, h, q, kv: score + table[q]), IndexError)


def in_the_source(path: str, begins: str) -> str:
    """Reads a message that this machine cannot provoke from C++: literals from ``begins`` to a semicolon."""
    text = (ROOT / path).read_text(encoding="utf-8")
    statement = text[text.index(f'"{begins}') :].partition(";")[0]
    parts = re.split(r'"((?:[^"\\]|\\.)*)"', statement)
    # An expression between two literals is filled in at run time.
    gaps = ["" if not gap.strip(" \n+)") else "?" for gap in parts[2::2]]
    return "".join(literal + gap for literal, gap in zip(parts[1::2], gaps, strict=True))


@says("and the GPU has")
def _(here: Here) -> str:
    return in_the_source("csrc/ops/cuda/device_code.cu", "this build of selfattn_ext has CUDA kernels")


def amx_reason(here: Here, begins: str) -> str:
    return in_the_source("csrc/cpu/amx_permission.cpp", begins)


for begin in (
    "the operating system refuses AMX",
    "the operating system does not save",
    "this processor lacks",
):
    says(begin)(partial(amx_reason, begins=begin))


@says("cannot be used")
def _(here: Here) -> str:
    if "amx" not in backends.cpu_isas():
        return here.error_of(lambda: backends.use_cpu_isa("amx").__enter__())
    unknown = here.error_of(lambda: backends.use_cpu_isa("sse9").__enter__())
    begin = unknown.partition("is unknown")[0].replace("sse9", "amx")
    return begin + in_the_source("csrc/cpu/cpu_kernel_table.cpp", "cannot be used: ")
