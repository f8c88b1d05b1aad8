"""What forward_cases.py and backward_cases.py have in common: a line with a digest for each case that passes.

    PYTHONPATH=tests SELFATTN_KERNEL=simt python -m emulator.forward_cases [EVERY [FIRST [MOST]]]

runs each EVERY-th case from FIRST on, without those of more than MOST million products of scores and values.
The results of a case must be the same bits under every schedule, so its digest is what runs are compared by.
tests/test_emulated_kernels.py does so.
"""

from __future__ import annotations

import hashlib
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


def main(cases: Sequence[Case], check: Check) -> None:
    """Runs the cases that the command line asks for; exits with 1 where one has failed."""
    every, first, most = [*map(int, sys.argv[1:]), *(1, 0, 10**6)[len(sys.argv) - 1 :]]
    torch.set_num_threads(1)
    failed = 0
    for case in cases[first::every]:
        if case.products() > most * 10**6:
            continue
        try:
            print(case, digest(check(case)), flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{case} FAILED: {error}", flush=True)
    sys.exit(failed != 0)
