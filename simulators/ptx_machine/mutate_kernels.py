"""Breaks the CUDA kernels in one place at a time, and shows whether the cases notice on the PTX machine.

    PYTHONPATH=simulators:tests/support:. python -m ptx_machine.mutate_kernels KERNEL [--list] [--only TEXT]
        [--every N]

It leaves out each synchronisation statement of a kernel (simt, sm80 or sm90), each bound that keeps sequences
of a packed backward apart, and some terms of second derivatives, in turn. One build of a copy of the sources
holds all mutants: before each statement the kernels ask whether it is the one to leave out. A mutant runs a
few problems in two orders, with the race detector. It is killed when a problem fails, hangs, is reported, or
changes a bit. For a mutant that survives, either a test is missing, or the statement was not needed:
EQUIVALENT in kernel_mutants.py lists the latter with their reasons.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from . import build, host_build
from .few_instances import fitted
from .kernel_mutants import EQUIVALENT, Mutant, mutants, write

#: The kernels, and the compute capability of the device that runs them here.
KERNELS = {"simt": 80, "sm80": 80, "sm90": 90}


class Run(NamedTuple):
    """Cases that judge a kernel's files."""

    every: int
    first: int
    schedule: int
    late: bool


#: The cases that judge a kernel's files.
RUNS = {
    "forward_cases": [Run(3, 0, 0, True), Run(7, 0, 7, True)],
    # The last cases have wide heads, for which there are separate kernels.
    "backward_cases": [Run(5, 0, 0, True), Run(11, 0, 7, True), Run(3, -10, 0, True)],
    "selected_cases": [Run(3, 0, 0, True), Run(5, 1, 7, True)],
    "sequence_cases": [Run(2, 0, 0, True), Run(2, 1, 0, True)],
    # The last cases are sequences.
    "tangent_cases": [Run(7, 0, 0, True), Run(4, -35, 7, True)],
    # These are the cases of of_statements().
    "hopper_cases": [Run(1, -8, 0, True), Run(1, -8, 7, True), Run(1, -8, 3, False)],
    "hopper_backward_cases": [Run(1, -11, 0, True), Run(1, -11, 7, True)],
}
#: Modules that judge bounds of their files, too; sequence_cases judge those of the others.
ALONE = (["tangent_cases"], ["selected_cases"])
#: Millions of products in the largest case.
MOST = 10
LIMIT_SECONDS = 120


def cases_of(file: Path) -> list[str]:
    """The modules of cases that run a file's code; each backward comes after its forward."""
    if file.stem.startswith("tangent"):
        return ["tangent_cases"]
    if file.stem.startswith(("selected", "inverse")):
        return ["selected_cases"]
    if file.parts[1] == "sm90":
        if file.name in ("ring.cuh", "mask_tiles.cuh"):
            return ["hopper_cases", "hopper_backward_cases"]
        return ["hopper_backward_cases" if "backward" in file.parts else "hopper_cases"]
    if "backward" in file.parts or file.parts[1] in ("rows", "mask"):
        return ["backward_cases"]
    return ["backward_cases", "forward_cases"] if file.parts[1] == "simt" else ["forward_cases"]


def kernel_of(file: Path) -> str:
    """The kernel that a file belongs to, by its folder: sm80 stands for mma, and simt for what all share."""
    if "mma" in file.parts:
        return "sm80"
    return next((name for name in KERNELS if name in file.parts), "simt")


def modules_for(mutant: Mutant) -> list[str]:
    """The modules of cases that run a mutant's code."""
    cases = cases_of(mutant.file)
    return ["sequence_cases"] if mutant.instead and cases not in ALONE else cases


def results_of(module: ModuleType, kernel: str) -> list[str]:
    """The digests of all runs of a module's cases; raises what a case raises."""
    from .kernel_cases.digests import digest

    machine, found = ctypes.CDLL(None), []
    name = module.__name__.rpartition(".")[2]
    for run in RUNS[name]:
        machine.ptx_machine_choose_order(ctypes.c_ulonglong(run.schedule), int(run.late))
        for case in module.cases()[run.first :: run.every]:
            if case.products() <= MOST * 10**6:
                found.append(digest(module.check(fitted(case, kernel, name == "forward_cases"))))
    return found


def problem_of(module: ModuleType, kernel: str, number: int, expected: list[str]) -> str:
    """How the first failed case of a mutant ended, or ""; asked in a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(LIMIT_SECONDS)
        ctypes.CDLL(None).ptx_machine_leave_out(number)
        try:
            problem = "" if results_of(module, kernel) == expected else "the results differ"
        except Exception as error:  # whatever it is, somebody has noticed
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        os.write(writing, problem.encode()[:400])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as said:
        problem = said.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "hangs" if os.WTERMSIG(status) == signal.SIGALRM else f"signal {os.WTERMSIG(status)}"
    return problem


def start_again(kernel: str) -> None:
    """Builds the mutants, and starts this process anew on the machine with them."""
    folder = build.ROOT / "build" / "kernel_mutants"
    write(list(mutants()), folder / "csrc")
    library = host_build.build("library", few=True, csrc=folder / "csrc", folder=folder / "objects")
    environment = host_build.environment(
        library,
        SELFATTN_KERNEL=kernel,
        SELFATTN_PTX_CAPABILITY=str(KERNELS[kernel]),
        SELFATTN_PTX_RACES="1",
    )
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=tuple(KERNELS))
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    parser.add_argument("--only", default="", help="mutants that contain this text")
    parser.add_argument("--every", type=int, default=1, help="one of so many")
    arguments = parser.parse_args()
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(mutants(), 1)
        if arguments.only in str(mutant) and arguments.kernel == kernel_of(mutant.file)
    ][:: arguments.every]
    if arguments.list:
        print("\n".join(str(mutant) for _, mutant in chosen))
        return
    if "SELFATTN_LIBRARY" not in os.environ:
        start_again(arguments.kernel)

    wanted = sorted({name for _, mutant in chosen for name in modules_for(mutant)})
    loaded = {name: importlib.import_module(f"ptx_machine.kernel_cases.{name}") for name in wanted}
    expected = {name: results_of(module, arguments.kernel) for name, module in loaded.items()}
    survived = 0
    for count, (number, mutant) in enumerate(chosen, 1):
        started = time.monotonic()
        problem = ""
        for name in modules_for(mutant):
            problem = problem or problem_of(loaded[name], arguments.kernel, number, expected[name])
        known = EQUIVALENT.get(("/".join(mutant.file.parts[-2:]), mutant.text))
        verdict = f"killed: {problem[:160]}" if problem else f"SURVIVED{f' ({known})' if known else ''}"
        survived += not problem and known is None
        print(f"[{count}/{len(chosen)}, {time.monotonic() - started:.0f} s] {mutant}: {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {survived} survived without a known reason")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
