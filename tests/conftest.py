"""Fixtures of all tests: a fixed seed for each test, and every kernel that this machine can run."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu
import isa_shares
import modules
import pytest
import torch
import warm

from selfattn_ext import backends
from selfattn_ext.arguments import forced_kernel

# Score functions that tests compile are kept for the next run, but not among those of the user.
os.environ.setdefault("SELFATTN_FUNCTION_CACHE", str(modules.TESTS.parent / "build" / "functions"))

if gpu.DEVICE != "cpu":
    # This comes before the test modules, some of which make tensors when they are imported.
    torch.set_default_device(gpu.DEVICE)
    collect_ignore = [
        str(path.relative_to(modules.TESTS))
        for name, path in modules.paths().items()
        if name not in gpu.MODULES
    ]


#: Modules whose tests take up to minutes each. They start first, so that no process ends alone with one.
LONGEST = ("test_kernel_cases.py", "test_jit.py", "test_kernel_engine.py", "test_amx_emulated.py")
#: Modules of many quick tests. Another process runs them right after the first of those, so that a person who
#: waits sees tests pass.
QUICK = ("test_functional.py", "test_edge_cases.py")


@pytest.hookimpl(tryfirst=True)  # before "-m" looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if gpu.DEVICE == "cpu" and len(ISAS) > 1:
        isa_shares.mark(items, [*ISAS[1:], "loops"])
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
    """Tells a person who waits which tests come first, and that few dots are no sign of trouble."""
    if not config.getoption("numprocesses", None) or config.args != config.getini("testpaths"):
        return []
    return [
        "order: one of the longest tests and some quick ones, then all of the longest, so that no process is "
        "left alone with one at the end: few dots in the first minutes, thousands in the last. With two "
        "processes all take about five minutes."
    ]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"cpu_only(reason): left out with {gpu.DEVICE_VARIABLE}=cuda")
    if gpu.DEVICE != "cpu" and (reason := gpu.missing()) is not None:
        pytest.exit(f"{gpu.DEVICE_VARIABLE}={gpu.DEVICE}: this run {reason}", returncode=1)
    # The processes of pytest-xdist share the processors. A thread that spins while it waits for another one
    # holds the processor that the other needs. libgomp reads the variable once, when torch is imported.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for the processes that tests start
        torch.set_num_threads(threads)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, one process runs a test for all kernels, so that their judge computes once
    (remembered() in cases.py). Marks would do the same, but change the names of the tests.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class LoadCaseScheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return OF_KERNEL.sub("", super()._split_scope(nodeid))

    # Scopes keep the order of pytest_collection_modifyitems; by default those with most tests come first.
    config.option.loadscopereorder = False
    return LoadCaseScheduling(config, log)


# Without a GPU, torch.manual_seed records the stack for later, which takes longer than all other fixtures.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    _seed(0)


#: The instruction sets that tests run on, best first.
ISAS = backends.cpu_isas()[: int(os.environ.get("SELFATTN_TEST_ISAS", "0")) or None]
# A process with a forced kernel, such as one of CUDA on the PTX machine, tests only that kernel.
CPU_KERNELS = (
    [forced_kernel.current()] if forced_kernel.current() else [*(f"fused-{isa}" for isa in ISAS), "loops"]
)
#: The kernels of the device that the process tests.
KERNELS = CPU_KERNELS if gpu.DEVICE == "cpu" else gpu.KERNELS


#: The kernels that have forward mode and second derivatives, which "loops" lacks.
TANGENT_KERNELS = [kernel for kernel in KERNELS if kernel != "loops"]


#: The part of a test's name that names the kernel it runs on.
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
    """Forces every kernel of this machine in every instruction set, in turn."""
    with forced(request.param):
        yield request.param


@pytest.fixture(params=TANGENT_KERNELS)
def tangent_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel of this machine with forward mode and second derivatives, forced."""
    with forced(request.param):
        yield request.param


@pytest.fixture(params=ISAS if gpu.DEVICE == "cpu" else gpu.KERNELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces every instruction set of this machine, in turn; on a GPU, every kernel."""
    # use_cpu_isa does not change the kernel that a process may force.
    force = backends.use_cpu_isa if gpu.DEVICE == "cpu" else forced
    with force(request.param):
        yield request.param


@pytest.fixture(params=gpu.KERNELS)
def cuda_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces every way to compute on the GPU, in turn; it is for modules that start with gpu.need()."""
    with forced(request.param):
        yield request.param


# Without a GPU there are no such tests; modules that are only about the GPU say what is missing.
ALSO = gpu.KERNELS if gpu.DEVICE == "cpu" and (gpu.required() or gpu.missing() is None) else ()


@pytest.fixture(params=[*KERNELS, *ALSO])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces every kernel of this machine, in turn; gives the device that it computes on, "cpu" or "cuda"."""
    with forced(request.param):
        yield "cuda" if request.param.startswith("cuda") else "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Starts a test with one thread, and restores the number of threads after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks collect garbage before they time a row: a third of a second among what many tests leave."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a process of its own, with the package under test, and returns what it prints."""

    def run(script: str, **environment: str) -> str:
        variables = warm.variables(**environment)
        if "LD_PRELOAD" in environment:
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        else:
            done = warm.python(script, tmp_path, variables)
        done.check_returncode()
        return done.stdout

    return run


@pytest.fixture
def run_in_forks(run_python: Callable[..., str]) -> Callable[[str, Sequence[str]], list[str]]:
    """Runs scripts in forks of one process, so that they share an import; returns what each prints."""

    def run(before: str, scripts: Sequence[str]) -> list[str]:
        printed = run_python(
            f"{before}\n"
            "import os, sys\n"
            f"for script in {list(scripts)}:\n"
            "    if (child := os.fork()) == 0:\n"
            "        exec(script)\n"
            "        print(end='\\0', flush=True)\n"
            "        os._exit(0)\n"
            "    if os.waitpid(child, 0)[1] != 0:\n"
            "        sys.exit(script)\n"
        )
        return printed.split("\0")[:-1]

    return run
