"""Helpers of tests on a GPU: whether there is one, which modules run there, graphs and streams.

SELFATTN_TEST_DEVICE=cuda makes the tests of MODULES, which name no device, compute on the GPU: it becomes
torch's default device, and the fixtures force its kernels. tests/cuda/test_on_cuda.py runs them so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import modules
import pytest
import torch
from torch import Tensor

#: Set to 1 on a machine with a GPU, this makes it a failure if the GPU cannot be used.
REQUIRE = "SELFATTN_REQUIRE_CUDA"

#: The kernels on a GPU: the one that is chosen automatically, and the one that takes every call.
KERNELS = ("cuda", "cuda-simt")

DEVICE_VARIABLE = "SELFATTN_TEST_DEVICE"
#: The device of tests that name none: "cpu" or "cuda".
DEVICE = os.environ.get(DEVICE_VARIABLE) or "cpu"

#: The reason why modules do not run on a GPU, by the beginnings of their names.
ELSEWHERE = {
    "test_amx": "instructions of a CPU",
    "test_backends": "forces instruction sets of a CPU",
    "test_benchmark": "times calls on the CPU",
    "test_bfloat16": "instructions of a CPU",
    "test_cases": "is about the judges",
    "test_check_references": "is about the sources",
    "test_cli": "is about arguments; what a command computes is in test_demo.py, or uses the GPU by itself",
    "test_compile_once": "is about the build",
    "test_cpp": "is about threads of the CPU",
    "test_cuda": "is about the GPU anyway",
    "test_environment": "is about the documents",
    "test_functions_page": "is about the documents",
    "test_gpu": "is about scripts for the GPU",
    "test_gradient_blocks": "compares two ways that a kernel for the CPU has",
    "test_huge": "is about the memory of a CPU",
    "test_import_circles": "is about the sources",
    "test_install": "is about the build",
    "test_instances": "is about the build",
    "test_isa_shares": "is about the tests",
    "test_jit": "is about the build",
    "test_kernel_": "runs kernels on the machine that runs PTX",
    "test_kv_cache_graphs": "is about graphs, and functions of which a GPU's compile for seconds",
    "test_library": "is about the build",
    "test_list_files": "is about the sources",
    "test_makefile": "is about the build",
    "test_modules": "is about the tests",
    "test_moving": "is about what torch's functions do on the CPU",
    "test_mutants": "is about the sources",
    "test_ninja_build": "is about the build",
    "test_on_cuda": "runs the others",
    "test_peak": "measures the CPU",
    "test_ptx": "is about the machine that runs PTX",
    "test_processes": "forks, which a process that uses CUDA cannot",
    "test_ratio": "is about the documents",
    "test_as_flex": "is about torch's function on the CPU",
    "test_export_gradients": "is about graphs, and functions of which a GPU's compile for seconds",
    "test_flex_compiled": "is about graphs that calls with CUDA tensors end",
    **dict.fromkeys(
        ("test_flex_gradients", "test_flex_integers", "test_flex_long", "test_flex_operations"),
        "is about operations as C++ for the CPU; test_cuda_functions.py has functions on a GPU",
    ),
    **dict.fromkeys(
        ("test_flex_recording", "test_flex_runs", "test_flex_sources"),
        "is about the C++ that is written for the CPU",
    ),
    "test_function_cache": "is about the files of a folder",
    "test_flex_blocks": "is about blocks, which test_cuda_functions.py has on a GPU",
    "test_flex_options": "is about the C++ compiler too; test_cuda_functions.py has options on a GPU",
    "test_score_function": "is about libraries for the CPU; test_cuda_functions.py has a GPU's part",
    "test_split": "runs processes on gloo, which is for the CPU",
    "test_sdpa_mode": "is about torch on the CPU; test_cuda_switches.py has a GPU's part",
    "test_torch_sdpa": "is about torch on the CPU; test_cuda_switches.py has a GPU's part",
    "test_torch_alone": "is about packages that are missing",
    "test_traces": "is about graphs, and functions of which a GPU's compile for seconds",
    "test_troubleshooting": "is about the documents",
    "test_unbacked": "is about graphs, and functions of which a GPU's compile for seconds",
    "test_types": "is about type checkers",
    "test_wide": "is about the order of sums on the CPU",
    "test_wild": "on a GPU the numbers are not checked; the PTX machine shows that kernels limit them",
}
#: The test modules that test the GPU as well as the CPU: all others.
MODULES = tuple(name for name in modules.paths() if not name.startswith(tuple(ELSEWHERE)))


def missing() -> str | None:
    """Returns what is missing for tests on a GPU, or None."""
    # It is imported here, as simulators/ptx_machine/run.py needs MODULES before there is a library to load.
    from selfattn_ext.build import library

    if not library.extension().build_info()["cuda"]:
        return "needs a GPU, and this build of selfattn_ext is for the CPU alone"
    return None if torch.cuda.is_available() else "needs a GPU, and torch finds none"


def required() -> bool:
    """Tells whether a missing GPU is a failure."""
    return os.environ.get(REQUIRE, "") == "1"


def need() -> None:
    """Skips a whole test module without a GPU, or fails if one is required; called at its top."""
    reason = missing()
    if reason is not None and required():
        pytest.fail(f"{REQUIRE}=1: this module {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


@contextmanager
def written_late(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs the block on a stream of its own, which is still writing the copies of tensors that it gets.

    After the block the stream's results are ready. Work that does not wait for the stream reads NaN.
    """
    late = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some ten milliseconds
        for target, tensor in zip(late, tensors, strict=True):
            target.copy_(tensor)
        yield late
    stream.synchronize()


def waits(call: Callable[[], object]) -> bool:
    """Tells whether a call returns only after the GPU has finished its earlier work."""
    call()  # the first call of a process may wait for other reasons
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    reached = torch.cuda.Event()
    reached.record()
    call()
    waited = reached.query()
    torch.cuda.synchronize()
    return waited


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call allocates beyond those in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures a graph of the function, which runs once before; returns the graph and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results
