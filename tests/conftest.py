"""Fixtures of all tests: a fixed seed for each, and every kernel that this machine can run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu
import pytest
import torch

import selfattn_ext
from selfattn_ext import backends


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=backends.cpu_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, forced."""
    with backends.use_cpu_isa(request.param):
        yield request.param


# A process that runs on one kernel, such as one of the emulator's, tests that one.
KERNELS = (
    [backends.forced_kernel()]
    if backends.forced_kernel()
    else [*(f"fused-{isa}" for isa in backends.cpu_isas()), "loops"]
)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine in every instruction set, forced."""
    name, _, isa = request.param.partition("-")
    with backends.use(name), backends.use_cpu_isa(isa):
        yield request.param


@pytest.fixture(params=gpu.KERNELS)
def cuda_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way to compute on the GPU, forced; for modules that start with gpu.need()."""
    with backends.use(request.param.partition("-")[2]):
        yield request.param


# Without a GPU the modules that are about nothing else say what is missing.
@pytest.fixture(params=[*KERNELS, *(gpu.KERNELS if gpu.required() or gpu.missing() is None else ())])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine, forced, and the device that it computes on: "cpu" or "cuda"."""
    name, _, variant = request.param.partition("-")
    if name == "cuda":
        with backends.use(variant):
            yield "cuda"
    else:
        with backends.use(name), backends.use_cpu_isa(variant):
            yield "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Restores the number of threads after a test that changes it, and starts with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a process of its own, with the package under test, and returns what it prints."""

    def run(script: str, **environment: str) -> str:
        # Away from a checkout whose package may be another one than the installed.
        package = str(Path(selfattn_ext.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    return run
