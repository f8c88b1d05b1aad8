"""Gradients of the kernel for Hopper: its tiles, head dims, options and special numbers."""

from __future__ import annotations

from dataclasses import replace

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import LAYOUTS, MASKS, Case, cotangents_of, gradients, laid_out
from option_pairs import as_case, covering
from torch import Tensor

from . import backward_cases

OPTIONS = {
    **backward_cases.OPTIONS,
    "dtype": [torch.bfloat16, torch.float16],
    # A block owns 128 queries or keys. It loads 64 or 128 rows of the other side at a time, and computes with
    # 32, 64 or 128 of them.
    "length": [
        *((17, 1), (63, 65), (64, 64), (65, 127)),
        *((127, 129), (128, 64), (129, 300), (300, 95), (257, 257)),
    ],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(64, 64), (40, 16), (96, 96), (72, 80), (128, 128), (128, 64), (48, 104), (192, 128)],
    "layout": ["contiguous", "transposed", "columns"],
    "grad_layout": [layout for layout in LAYOUTS if layout != "expanded"],
    "mask": [None, *MASKS, "bool tiles", "float tiles"],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2), (140, 0)],
}


def cases() -> list[Case]:
    """Every pair of values of two options; calls on the bare path; large and low scores; at the end a few
    cases that together run every statement of the kernels, for mutate.py.
    """
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    lengths = [(129, 200), (300, 64), (128, 257), (65, 128)]
    bare = [
        Case(
            *(batch, 2 * kv_heads, kv_heads, *lengths[turn % 4], size, value_size, dtype),
            is_causal=turn % 3 != 0,
            query_offset=(0, 7, -30)[turn % 3],
            lse=True,
        )
        for turn, (size, value_size, dtype, batch, kv_heads) in enumerate(
            (size, value_size, dtype, batch, kv_heads)
            for size, value_size in (*OPTIONS["dims"], (136, 192), (256, 256), (200, 64))
            for dtype in OPTIONS["dtype"]
            for batch, kv_heads in ((1, 1), (2, 2))
        )
    ]
    # exp(-lse) overflows at lse < -88.7, and the zeros that stand for keys beyond the end have scores of 0.
    low = [
        Case(1, 2, 1, keys if causal else 70, keys, size, size, dtype, opposed=30.0, is_causal=causal)
        for dtype in OPTIONS["dtype"]
        for size, keys, causal in ((64, 64, False), (64, 192, True), (128, 200, False))
    ]
    # These combine options with wide head dims, and contain calls that only look like bare ones.
    wide = [
        Case(1, 2, 1, 130, 140, *dims, torch.bfloat16, **options)
        for dims in ((136, 192), (256, 64), (192, 96))
        for options in ({"weights": True}, {"alibi": 1, "sinks": True}, {"mask": "bool tiles"})
        if dims != (256, 64) or options == {"weights": True}
    ]
    every = [*chosen, *bare, *low, *wide, *of_statements()]
    return [replace(case, seed=index) for index, case in enumerate(every)]


def of_statements() -> list[Case]:
    """Many tiles on each side of a block, on the bare path and with options; head dims with one kernel for dK
    and dV, and with two; masks that hide whole tiles; NaN in hidden places. The cases are small, because
    mutate.py runs them often.
    """
    queries = Case(1, 2, 1, 300, 40, 64, 64, torch.bfloat16, is_causal=True, query_offset=-20, lse=True)
    keys = replace(queries, queries=40, keys=300, query_offset=230)
    wide = {"heads": 1, "head_dim": 128, "value_dim": 128}
    return [
        queries,
        keys,
        replace(queries, **wide),
        replace(keys, **wide),
        replace(queries, heads=1, head_dim=192),
        replace(keys, heads=1, head_dim=256, value_dim=256),
        replace(queries, alibi=1),
        replace(keys, alibi=1),
        replace(queries, **wide, alibi=1),
        replace(queries, is_causal=False, mask="bool tiles"),
        replace(keys, **wide, is_causal=False, mask="bool tiles"),
    ]


def check(case: Case) -> dict[str, Tensor]:
    """Asserts that the results are accurate, that NaN in hidden places changes no bit of them, and that NaN
    in a key, or in the gradient of a query's output, reaches exactly the rows that see it. Returns the
    results.
    """
    ours = backward_cases.check(case)
    if not case.is_causal or case.mask is not None or case.layout == "expanded" or case.dropout_p > 0:
        return ours
    key, query = case.keys // 2, case.queries // 2
    left = case.window[0] if case.window[0] >= 0 else case.keys + case.queries
    right = min(case.window[1], 0) if case.window[1] >= 0 else 0
    ahead = torch.arange(case.keys) - torch.arange(case.queries)[:, None] - case.query_offset
    seen = (ahead <= right) & (ahead >= -left)
    spoiled = {
        "query": _with_nan(case, ours, "key", key)["grad of query"],
        "value": _with_nan(case, ours, "out", query)["grad of value"],
    }
    for name, sees in (("query", seen[:, key]), ("value", seen[query])):
        gradient, before = spoiled[name], ours[f"grad of {name}"]
        assert gradient[..., sees, 0].isnan().all(), f"{name}: a row that sees a NaN does not have it"
        assert torch.equal(gradient[..., ~sees, :], before[..., ~sees, :]), f"{name}: a hidden NaN"
    return ours


def _with_nan(case: Case, ours: dict[str, Tensor], where: str, row: int) -> dict[str, Tensor]:
    """The gradients if the first element of one row, of an input or of the output's gradient, is NaN."""
    tensors = case.inputs()
    cotangents = cotangents_of({name: ours[name] for name in ours if "grad" not in name}, case.seed)
    cotangents["out"] = laid_out(cotangents["out"], case.grad_layout)
    (tensors | {"out": cotangents["out"]})[where].detach()[..., row, 0] = torch.nan
    return gradients(case.run(tensors), cotangents, tensors)
