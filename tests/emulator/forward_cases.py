"""Forwards of every option on one kernel in the emulator, judged as tests/tolerances.py demands.

    PYTHONPATH=tests SELFATTN_KERNEL=simt python -m emulator.forward_cases [EVERY [FIRST [MOST]]]

runs each EVERY-th case from FIRST on, without those of more than MOST million products of scores and values,
and prints, for each, a digest of the results: they must be the same bits under every schedule.
tests/test_emulated_kernels.py does so.
"""

from __future__ import annotations

import hashlib
import sys

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, exact_inputs
from test_options_pairwise import as_case, covering
from tolerances import assert_accurate

LENGTHS = (1, 63, 64, 65, 200)
HEAD_DIMS = (16, 64, 80, 128)

OPTIONS = {
    "dtype": list(DTYPES),
    # Squares, and lengths that differ: a few queries are cut along the keys.
    "length": [*((length, length) for length in LENGTHS), (1, 200), (5, 65), (200, 63)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [*((size, size) for size in HEAD_DIMS), (80, 16), (33, 65)],
    "layout": list(LAYOUTS),
    "mask": [None, *MASKS],
    "is_causal": [False, True],
    "query_offset": [0, 5, -3],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [False, True],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
    "lse": [False, True],
    "batch": [1, 2],
}


def cases() -> list[Case]:
    """Every pair of values of two options in some case, and every dtype with every length and head dim."""
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    met = {(case.dtype, case.queries, case.keys, case.head_dim) for case in chosen}
    causal = True
    for dtype in DTYPES:
        for length in LENGTHS:
            for size in HEAD_DIMS:
                if (dtype, length, length, size) not in met:
                    causal = not causal
                    chosen.append(
                        Case(
                            1,
                            2,
                            1,
                            length,
                            length,
                            size,
                            size,
                            dtype,
                            is_causal=causal,
                            seed=len(chosen),
                            lse=True,
                        )
                    )
    return chosen


@torch.no_grad()
def check_forward(case: Case) -> str:
    """Asserts that the results are accurate, and returns a digest of their bits."""
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    ours = case.run(tensors)
    exact = case.formula(exact_inputs(tensors))
    peer = case.formula(tensors)
    digest = hashlib.sha256()
    for name, result in ours.items():
        assert_accurate(name, result, exact[name], peer[name])
        digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main(every: int = 1, first: int = 0, most: int = 10**6) -> None:
    torch.set_num_threads(1)
    failed = 0
    for case in cases()[first::every]:
        if case.products() > most * 10**6:
            continue
        try:
            print(case, check_forward(case), flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{case} FAILED: {error}", flush=True)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
