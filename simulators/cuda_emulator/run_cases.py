"""The command line that the modules of cases share. It prints a digest for each case that passes.

    SELFATTN_KERNEL=simt python -m cuda_emulator.forward_cases [EVERY [FIRST [MOST]]]

runs each EVERY-th case from FIRST on, without those of more than MOST million products of scores and values.
The results of a case must have the same bits under every schedule, so runs are compared by their digests, as
tests/cuda/test_emulated_kernels.py does. Results with the same bits as accurate ones need not be judged
again: --again leaves out the checks for which a module has a shorter function. --schedules fifo:eager
lifo:late runs the cases under each of these orders and times of copies, and writes the schedule's name before
each line.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence

import torch
from cases import Case
from torch import Tensor

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
    parser.add_argument("--schedules", nargs="+", default=[], metavar="ORDER:COPIES")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases[asked.first :: asked.every] if case.products() <= asked.most * 10**6]
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
    """Runs the cases in a copy of this process, because the emulator reads its variables once, and loading
    torch again takes longer than many of the runs.
    """
    process = os.fork()
    if process == 0:
        order, copies = schedule.split(":")
        os.environ.update(SELFATTN_EMULATOR_SCHEDULE=order, SELFATTN_EMULATOR_COPIES=copies)
        sys.exit(not _pass(cases, check, f"{schedule} "))
    return os.waitpid(process, 0)[1] == 0
