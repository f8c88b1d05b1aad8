"""Gradients of every option on one kernel, judged as tests/support/tolerances.py demands."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, LAYOUTS, MASKS, MORE_MASKS, Case, cotangents_of, gradients, laid_out
from cases import check as check_accuracy
from option_pairs import as_case, covering
from torch import Tensor

from .digests import bytes_of

OPTIONS = {
    "dtype": list(DTYPES),
    # Squares, less than a tile, few queries with many keys, many queries with few keys, and an odd number of
    # half tiles. With these, test_options_pairwise.py need not run on the machine as well.
    "length": [
        *((length, length) for length in (1, 63, 64, 65)),
        *((7, 13), (129, 140), (5, 200), (200, 7), (65, 192)),
    ],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (64, 64), (80, 80), (128, 128), (80, 16), (33, 65), (5, 9), (33, 1)],
    "layout": list(LAYOUTS),
    "grad_layout": list(LAYOUTS),
    "mask": [None, *MASKS, "bool tiles", "float tiles"],
    "is_causal": [False, True],
    "query_offset": [0, 5, -70],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [False, True],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
    "lse": [False, True],
    "statistics": [False, True],
    "batch": [1, 2],
}

#: Options that cut a mask in different ways, and lengths with long reductions over rows and over columns.
_POSITIONS = [{}, {"is_causal": True, "query_offset": 30}, {"window": (40, 20), "softcap": 1.5}]
_LENGTHS = [(65, 200), (300, 40), (130, 130), (5, 333), (1, 64)]
_BROADCASTS = [name for name in MORE_MASKS if name.endswith(("number", *"bhqk"))]


def cases() -> list[Case]:
    """Every pair of values of two options, in an order that spreads similar values; then the other cases."""
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    more = [*_mask_cases(), *_bare_cases(), *wide_cases()]
    return [replace(case, seed=index) for index, case in enumerate([*chosen, *more])]


def _mask_cases() -> list[Case]:
    """Float masks of every broadcast, for their gradient; lengths, dtypes and groups take turns."""
    return [
        Case(
            2,
            *((4, 2), (3, 3), (2, 1))[turn % 3],
            *_LENGTHS[turn % len(_LENGTHS)],
            head_dim=(16, 40)[turn % 2],
            value_dim=16,
            dtype=DTYPES[turn % len(DTYPES)],
            mask=mask,
            **_POSITIONS[turn // 2 % len(_POSITIONS)],
        )
        for turn, mask in enumerate(itertools.chain(_BROADCASTS, reversed(_BROADCASTS), _BROADCASTS))
    ]


def _bare_cases() -> list[Case]:
    """Calls without options: every head dim with whole and partial tiles, and exponentials beyond float32."""
    lengths = itertools.cycle([(65, 65), (128, 128), (130, 63), (64, 192)])
    causal = itertools.cycle([False, True, True, False, True])
    sized = [
        Case(1, 2, 1, *next(lengths), size, size, dtype, is_causal=next(causal), lse=True)
        for dtype in DTYPES
        for size in (32, 64, 96, 128, 192, 256)
    ]
    # exp(-lse) overflows at lse < -88.7, and the zeros that stand for keys beyond the end have scores of 0.
    low = [
        Case(1, 2, 1, keys if causal else 70, keys, 64, 64, dtype, opposed=30.0, is_causal=causal)
        for dtype in DTYPES
        for keys, causal in ((64, False), (192, True), (200, False))
    ]
    masked = [Case(1, 2, 1, 70, keys, 64, 64, dtype, mask="low") for dtype in DTYPES for keys in (64, 192)]
    # There are queries that see nothing and keys that nobody sees: check() fills them with NaN.
    hidden = [
        Case(1, 2, 1, *lengths, size, size, dtype, is_causal=True, query_offset=-20, lse=True)
        for dtype in DTYPES
        for size, lengths in ((32, (70, 150)), (64, (130, 140)), (128, (70, 90)), (256, (50, 90)))
    ]
    return [*sized, *low, *masked, *hidden]


def wide_cases() -> list[Case]:
    """Heads so wide that dK and dV have kernels of their own: every option, over several tiles."""
    options: list[dict[str, Any]] = [
        {"keys": 90},
        {"mask": "float", "is_causal": True, "query_offset": -10},
        {"window": (20, 6), "softcap": 1.5, "alibi": 1, "sinks": True, "weights": True, "lse": True},
        {"mask": "bool tiles", "dropout_p": 0.3, "layout": "columns"},
        {"mask": "float tiles", "head_dim": 160, "grad_layout": "offset", "is_causal": True},
    ]
    wide = {"heads": 2, "kv_heads": 1, "queries": 70, "keys": 70, "head_dim": 256, "value_dim": 256}
    dtypes = (torch.bfloat16, torch.float16)
    return [Case(1, **(wide | more), dtype=dtype) for dtype in dtypes for more in options]


def fill_hidden(case: Case, tensors: dict[str, Tensor]) -> bool:
    """Writes NaN to queries that see nothing, to the gradients of their output, and to keys and values that
    nobody sees by their positions. Returns whether there are any.
    """
    position = torch.arange(case.queries)[:, None] + case.query_offset
    key, (left, right) = torch.arange(case.keys), case.window
    seen = torch.ones(case.queries, case.keys, dtype=torch.bool)
    if case.is_causal:
        seen &= key <= position
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    blind, unseen = ~seen.any(1), ~seen.any(0)
    hidden = {"query": blind, "key": unseen, "value": unseen}
    if not case.sinks:  # a sink takes part even in rows that see no key
        hidden["out"] = blind
    for name, rows in hidden.items():
        tensor = tensors[name].detach()
        entries = tensor[:1] if tensor.stride(0) == 0 else tensor
        entries[:, :, rows] = torch.nan
    return bool(blind.any() or unseen.any())


def check(case: Case) -> dict[str, Tensor]:
    """Asserts that results and gradients are accurate, and that NaN in hidden places changes no bit of them.
    Returns them.
    """
    results = check_accuracy(case)
    tensors = case.inputs()
    cotangents = cotangents_of(results, case.seed)
    cotangents["out"] = laid_out(cotangents["out"], case.grad_layout)
    if fill_hidden(case, tensors | {"out": cotangents["out"]}):
        again = case.run(tensors)
        again |= gradients(again, cotangents, tensors)
        for name, result in again.items():
            same = bytes_of(result) == bytes_of(results[name])
            assert same, f"{name}, with NaN in what is hidden"
    return results
