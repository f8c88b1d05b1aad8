"""The command line that the modules of cases share. It prints a digest for each case that passes.

    SELFATTN_KERNEL=simt python -m ptx_machine.kernel_cases.forward_cases [EVERY [FIRST [MOST]]]

runs each EVERY-th case from FIRST on, without those of more than MOST million products of scores and values.
--few runs them with the dtypes and head dims of few_instances.py. The results of a case must have the same
bits under every schedule, so runs are compared by their digests, as tests/cuda/test_kernel_cases.py does.
Results with the same bits as accurate ones need not be judged again: --again leaves out the checks for which
a module has a shorter function. --schedules 0:eager 7:late runs the cases under each of these orders (as
SELFATTN_PTX_SCHEDULE and SELFATTN_PTX_COPIES), and writes the schedule's name before each line.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Sequence

import torch
from cases import Case
from torch import Tensor

from ..few_instances import fitted

#: Asserts that the results of a case are accurate, and returns them.
Check = Callable[[Case], dict[str, Tensor]]


def bytes_of(tensor: Tensor) -> bytes:
    """The bits of a tensor of any layout, in the order of its elements."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def digest(results: dict[str, Tensor]) -> str:
    """A few characters that stand for the bits of all results."""
    return hashlib.sha256(b"".join(map(bytes_of, results.values()))).hexdigest()[:16]


def main(cases: Sequence[Case], check: Check, again: Check | None = None) -> None:
    """Runs the cases that the command line asks for; exits with 1 if one has failed. ``again`` computes what
    ``check`` returns, without its checks, for comparison with another run; by default it is ``check``.
    """
    parser = argparse.ArgumentParser()
    for name, default in (("every", 1), ("first", 0), ("most", 10**6)):
        parser.add_argument(name, type=int, nargs="?", default=default)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--schedules", nargs="+", default=[], metavar="ORDER:COPIES")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases[asked.first :: asked.every] if case.products() <= asked.most * 10**6]
    if asked.few:
        chosen = [fitted(case, os.environ["SELFATTN_KERNEL"]) for case in chosen]
    run = again if asked.again and again is not None else check
    if not asked.schedules:
        sys.exit(not _pass(chosen, run))
    passed = [_pass_under(schedule, chosen, run) for schedule in asked.schedules]
    sys.exit(not all(passed))


def _pass(cases: Sequence[Case], check: Check, prefix: str = "") -> bool:
    failed = 0
    for case in cases:
        try:
            print(f"{prefix}{case}", digest(check(case)), flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{prefix}{case} FAILED: {error}", flush=True)
    return not failed


def _pass_under(schedule: str, cases: Sequence[Case], check: Check) -> bool:
    order, copies = schedule.split(":")
    ctypes.CDLL(None).ptx_machine_choose_order(ctypes.c_ulonglong(int(order)), copies == "late")
    return _pass(cases, check, f"{schedule} ")
