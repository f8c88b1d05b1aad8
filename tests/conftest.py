"""Fixtures of all tests: a fixed seed for each, and every kernel that this machine can run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu
import modules
import pytest
import torch

import selfattn_ext
from selfattn_ext import backends
from selfattn_ext.arguments import forced_kernel

# Functions of scores that tests compile: not where those of a user are, and kept for the next run.
os.environ.setdefault("SELFATTN_FUNCTION_CACHE", str(modules.TESTS.parent / "build" / "functions"))

if gpu.DEVICE != "cpu":
    # Before the test modules, some of which make tensors as they are imported.
    torch.set_default_device(gpu.DEVICE)
    collect_ignore = [
        str(path.relative_to(modules.TESTS))
        for name, path in modules.paths().items()
        if name not in gpu.MODULES
    ]


#: Modules of tests that take up to minutes each: they start first, so that no process is left alone with one.
LONGEST = ("test_emulated_kernels.py", "test_jit.py", "test_emulated_engine.py", "test_amx_emulated.py")
#: Modules of many quick tests that come right after the first of those, for another process, so that whoever
#: waits sees some pass.
QUICK = ("test_functional.py", "test_edge_cases.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, 0))
    if items and items[0].path.name in LONGEST:
        rank = dict.fromkeys(QUICK, -1)
        items[1:] = sorted(items[1:], key=lambda item: rank.get(item.path.name, 0))
    if gpu.DEVICE != "cpu":
        apart = [item for item in items if item.get_closest_marker("cpu_only")]
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """For whoever waits: which tests come first, and that silence is no sign of trouble."""
    if not config.getoption("numprocesses", None) or config.args != config.getini("testpaths"):
        return []
    return [
        "order: one of the longest tests and some quick ones, then all of the longest, so that no process is "
        "left alone with one at the end: few dots in the first minutes, thousands in the last. With two "
        "processes all take six to ten minutes."
    ]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"cpu_only(reason): left out with {gpu.DEVICE_VARIABLE}=cuda")
    if gpu.DEVICE != "cpu" and (reason := gpu.missing()) is not None:
        pytest.exit(f"{gpu.DEVICE_VARIABLE}={gpu.DEVICE}: this run {reason}", returncode=1)
    # The processes of pytest-xdist share the processors: threads that wait for each other only spin.
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for the processes that tests start
        torch.set_num_threads(threads)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup: a process has a test for all kernels, so that what judges them is computed once
    (remembered() in cases.py). The names of the tests stay what they are, unlike with marks.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class LoadCaseScheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return OF_KERNEL.sub("", super()._split_scope(nodeid))

    # In the order of pytest_collection_modifyitems, not of the numbers of tests.
    config.option.loadscopereorder = False
    return LoadCaseScheduling(config, log)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


#: The instruction sets that tests run on, best first.
ISAS = backends.cpu_isas()[: int(os.environ.get("SELFATTN_TEST_ISAS", "0")) or None]
# A process that runs on one kernel, such as one of the emulator's, tests that one.
CPU_KERNELS = (
    [forced_kernel.current()] if forced_kernel.current() else [*(f"fused-{isa}" for isa in ISAS), "loops"]
)
#: Those of the device that the process tests.
KERNELS = CPU_KERNELS if gpu.DEVICE == "cpu" else gpu.KERNELS


#: Those with forward mode and second derivatives, which "loops" leaves out.
TANGENT_KERNELS = [kernel for kernel in KERNELS if kernel != "loops"]


#: What the name of a test has of the kernel it runs on.
OF_KERNEL = re.compile(r"(?<=[\[-])(?:" + "|".join(map(re.escape, sorted({*KERNELS, *ISAS}))) + r")(?=[\]-])")


@contextmanager
def forced(kernel: str) -> Iterator[None]:
    """Forces one of CPU_KERNELS or gpu.KERNELS: "name-isa", or "cuda" with the name of one after it."""
    name, _, variant = kernel.partition("-")
    if name == "cuda":
        with backends.use(variant):
            yield
    else:
        with backends.use(name), backends.use_cpu_isa(variant):
            yield


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine in every instruction set, forced."""
    with forced(request.param):
        yield request.param


@pytest.fixture(params=TANGENT_KERNELS)
def tangent_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine with forward mode and second derivatives, forced."""
    with forced(request.param):
        yield request.param


@pytest.fixture(params=ISAS if gpu.DEVICE == "cpu" else gpu.KERNELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, forced; on a GPU, every kernel."""
    # The former leaves the kernel that a process forces alone.
    force = backends.use_cpu_isa if gpu.DEVICE == "cpu" else forced
    with force(request.param):
        yield request.param


@pytest.fixture(params=gpu.KERNELS)
def cuda_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way to compute on the GPU, forced; for modules that start with gpu.need()."""
    with forced(request.param):
        yield request.param


# Without a GPU the modules that are about nothing else say what is missing.
ALSO = gpu.KERNELS if gpu.DEVICE == "cpu" and (gpu.required() or gpu.missing() is None) else ()


@pytest.fixture(params=[*KERNELS, *ALSO])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine, forced, and the device that it computes on: "cpu" or "cuda"."""
    with forced(request.param):
        yield "cuda" if request.param.startswith("cuda") else "cpu"


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
