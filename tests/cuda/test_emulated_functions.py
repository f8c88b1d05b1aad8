"""Functions of scores inside the CUDA kernels, in the emulator.

They are compiled with the headers that NVRTC gets, and run in memory of this process.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import pytest
import torch
import turns
from cuda_emulator import build
from functions import ALL, Functions
from test_flex_functions import judge
from torch import Tensor

from selfattn_ext.flex.cuda_source import headers_of, most_dims
from selfattn_ext.flex.tracing import Traced, trace

SIZES = (2, 2, 70, 67)
DIM = 24


class Problem(ctypes.Structure):
    """As in simulators/cuda_emulator/function_kernels.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("is_half", "batch", "heads", "queries", "keys", "dim")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "row_max", "row_sum")),
        *((name, ctypes.c_void_p) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        ("function", ctypes.c_char_p),
        ("tensors", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    ]


def function_arguments(traced: Traced) -> bytes:
    """FunctionArguments: what FunctionKernels::arguments_of makes for a launch."""
    dims, parts = most_dims(traced.function), b""
    for tensor in traced.tensors:
        rest = [0] * (dims - tensor.dim())
        parts += struct.pack(
            f"P{2 * dims}q", tensor.data_ptr(), *tensor.shape, *rest, *tensor.stride(), *rest
        )
    return (parts or bytes(8 + 16 * dims)) + struct.pack(
        f"{len(traced.numbers) or 1}d", *traced.numbers or [0]
    )


@functools.cache
def made(name: str) -> tuple[Functions, Traced]:
    torch.manual_seed(3)
    functions = ALL[name](SIZES, torch.float32)
    traced = trace(functions.score_mod, functions.mask_mod, torch.float32, torch.device("cpu"), True)
    return functions, traced


@functools.cache
def library(name: str, variant: str) -> ctypes.CDLL:
    headers = headers_of(made(name)[1].function)
    files = {"selfattn_function_arguments.h": headers.arguments, "selfattn_function.h": headers.function}
    loaded = ctypes.CDLL(str(build.build_function(name, files, variant)))
    loaded.run_function_kernels.restype = ctypes.c_char_p
    return loaded


def run(name: str, dtype: torch.dtype, variant: str) -> tuple[list[Tensor], list[Tensor]]:
    """Query, key and value, and what the kernels compute of them: out, their gradients, what is learned."""
    traced = made(name)[1]
    torch.manual_seed(5)
    given = [torch.randn(*SIZES[:2], rows, DIM).to(dtype) for rows in (*SIZES[2:], SIZES[3])]
    out, *grads = (torch.full_like(tensor, torch.nan) for tensor in (given[0], *given))
    row_max, row_sum = torch.full((2, *SIZES[:3]), torch.nan).unbind()
    grad_out = (torch.arange(DIM) % 5 - 1).to(dtype).expand(out.shape).contiguous()  # as `gradients` has it
    counts = [
        tensor.numel() if wanted else 0
        for tensor, wanted in zip(traced.tensors, traced.wanted(), strict=True)
    ]
    sizes, sums = torch.tensor(counts), torch.zeros(sum(counts), dtype=torch.float64)
    passed = [*given, out, row_max, row_sum, grad_out, *grads]
    problem = Problem(
        dtype == torch.float16, *SIZES, DIM, *(tensor.data_ptr() for tensor in passed),
        function_arguments(traced), len(counts), sizes.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    report = library(name, variant).run_function_kernels(ctypes.byref(problem))
    assert report is None, report.decode()
    parts = zip(sums.split(counts), traced.tensors, strict=True)
    return given, [out, *grads, *(part.view(tensor.shape) for part, tensor in parts if part.numel() > 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["simt", "sm80"])
@pytest.mark.parametrize("name", turns.chosen(["documents", "graph_distances", "softcap"]))
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    given, results = run(name, dtype, "plain")
    judge(name, results, given, made(name)[0], dtype)


@pytest.mark.sanitizers
@turns.only_in(0, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["simt", "sm80"])
def test_without_races_and_with_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFATTN_EMULATOR_SCHEDULE", "random")  # which is read when the library is first used
    for found, expected in zip(
        *(run("graph_distances", dtype, it)[1] for it in ("race", "plain")), strict=True
    ):
        assert torch.equal(found, expected)
