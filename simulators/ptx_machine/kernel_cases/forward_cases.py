"""Forwards of every option on one kernel, judged as tests/support/tolerances.py demands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import option_pairs
import torch
from cases import DTYPES, Case, Judge
from option_pairs import as_case, covering
from torch import Tensor

LENGTHS = (1, 63, 64, 65, 200)
HEAD_DIMS = (16, 64, 80, 128)

OPTIONS = {
    **option_pairs.OPTIONS,
    # Squares, and different lengths: where queries are few, the work is divided along the keys.
    "length": [*((length, length) for length in LENGTHS), (1, 200), (5, 65), (200, 63)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [*((size, size) for size in HEAD_DIMS), (80, 16), (33, 65)],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2)],
    "batch": [1, 2],
}


def cases() -> list[Case]:
    """Every pair of values of two options; every dtype with every length and head dim; wide heads."""
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
    wide = [replace(case, seed=len(chosen) + index) for index, case in enumerate(_wide_cases())]
    return [*chosen, *wide]


def _wide_cases() -> list[Case]:
    """The head dims for which kernels have the fewest registers: on the bare path, with options, and with few
    queries.
    """
    paths: list[dict[str, Any]] = [
        {"is_causal": True, "lse": True},
        {"mask": "float heads", "softcap": 1.5, "dropout_p": 0.3, "weights": True, "lse": True},
        {"queries": 3, "window": (40, -1), "query_offset": 60, "weights": True},
    ]
    return [
        Case(1, 2, 1, **({"queries": 70, "keys": 90} | path), head_dim=size, value_dim=size, dtype=dtype)
        for dtype in DTYPES
        for size in (192, 256)
        for path in paths
    ]


@torch.no_grad()
def check(case: Case) -> dict[str, Tensor]:
    """Asserts that the results are accurate, and returns them."""
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    ours = case.run(tensors)
    Judge(case, tensors).assert_accurate(ours)
    return ours
