"""Runs modules of cases on one kernel, and prints a digest for each case that passes.

    SELFATTN_KERNEL=simt python -m ptx_machine.kernel_cases.run_cases forward_cases backward_cases:10:3

A module's name alone stands for all its cases, and NAME:EVERY:FIRST for each EVERY-th from FIRST on; with
--most N without those of more than N million products of scores and values. --few runs them with the dtypes
and head dims of few_instances.py. The results of a case must have the same bits under every schedule, so runs
are compared by their digests, as tests/cuda/test_kernel_cases.py does. Results with the same bits as accurate
ones need not be judged again: --again leaves out the checks for which a module has a shorter function.
--schedules 0:eager 7:late runs the cases under each of these orders (as SELFATTN_PTX_SCHEDULE and
SELFATTN_PTX_COPIES), and writes the schedule's name before each line.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import Case
from torch import Tensor

from ..few_instances import fitted
from .digests import digest

#: Asserts that the results of a case are accurate, and returns them.
Check = Callable[[Case], dict[str, Tensor]]


def main() -> None:
    """Runs the cases that the command line asks for; exits with 1 if one has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="+", metavar="NAME[:EVERY[:FIRST]]")
    parser.add_argument("--most", type=int, default=10**6)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--schedules", nargs="+", default=[], metavar="ORDER:COPIES")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    passed = True
    for words in asked.modules:
        name, every, first = (*words.split(":"), "1", "0")[:3]
        module = importlib.import_module(f"{__package__}.{name}")
        chosen = [
            it for it in module.cases()[int(first) :: int(every)] if it.products() <= asked.most * 10**6
        ]
        if asked.few:
            forward = name == "forward_cases"
            chosen = [fitted(case, os.environ["SELFATTN_KERNEL"], forward) for case in chosen]
        # A module's compute() returns what its check() returns, without the checks.
        run = getattr(module, "compute", module.check) if asked.again else module.check
        for schedule in asked.schedules or [""]:
            if schedule:
                order, copies = schedule.split(":")
                ctypes.CDLL(None).ptx_machine_choose_order(ctypes.c_ulonglong(int(order)), copies == "late")
            passed &= _pass(chosen, run, " ".join(filter(None, [schedule, name])))
    sys.exit(not passed)


def _pass(cases: Sequence[Case], check: Check, prefix: str) -> bool:
    failed = 0
    for case in cases:
        try:
            print(f"{prefix} {case}", digest(check(case)), flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{prefix} {case} FAILED: {error}", flush=True)
    return not failed


if __name__ == "__main__":
    main()
