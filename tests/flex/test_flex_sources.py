"""The remembered sources of recorded functions: none may get another function's source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import ALL

from selfattn_ext.flex import source
from selfattn_ext.flex.tracing import trace

SIZES = (2, 3, 40, 50)
TABLE = torch.randn(60, 60)
OTHER = TABLE.clone()
CPU = torch.device("cpu")


def of_constant(value: Any) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: torch.where(
        q * value > kv, score.sigmoid() ** value, score * TABLE[q, kv]
    )


def of_table(table: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: score + table[q, kv]


VARIANTS: dict[str, Callable[..., Any]] = {
    **{f"constant {value!r}": of_constant(value) for value in (1, 2, 3, True, 2.0, 0.5, 5, 2**20, 2**40, -1)},
    "tensor constant": of_constant(torch.tensor(2)),
    "floats": of_table(TABLE),
    "doubles": of_table(TABLE.double()),
    "learned": of_table(TABLE.clone().requires_grad_()),
    "wide": of_table(torch.zeros(1, 1).expand(1 << 17, 1 << 17)),
    "turned": lambda score, b, h, q, kv: score + TABLE[kv, q],
    "twice": lambda score, b, h, q, kv: score + TABLE[q, kv] + TABLE[q, kv],
    "of two": lambda score, b, h, q, kv: score + TABLE[q, kv] + OTHER[q, kv],
    "first and last": lambda score, b, h, q, kv: score + TABLE[q, kv] + OTHER[q, kv] - TABLE[q, kv],
    "last and last": lambda score, b, h, q, kv: score + TABLE[q, kv] + OTHER[q, kv] - OTHER[q, kv],
    "sine": lambda score, b, h, q, kv: score.sin(),
    "cosine": lambda score, b, h, q, kv: score.cos(),
    "less its sine": lambda score, b, h, q, kv: score - score.sin(),
    "sine less it": lambda score, b, h, q, kv: score.sin() - score,
    "minus": lambda score, b, h, q, kv: score - TABLE[q, kv],
    "with alpha": lambda score, b, h, q, kv: torch.add(score, TABLE[q, kv], alpha=2),
    "with another alpha": lambda score, b, h, q, kv: torch.add(score, TABLE[q, kv], alpha=3),
    "down": lambda score, b, h, q, kv: torch.div(q, kv + 1, rounding_mode="floor") * score,
    "to zero": lambda score, b, h, q, kv: torch.div(q, kv + 1, rounding_mode="trunc") * score,
}


@pytest.mark.parametrize("remembered", [False, True])
def test_functions_are_told_apart(remembered: bool) -> None:
    recorded = []
    for sizes in (SIZES, (2, 3, 1 << 20, 1 << 20)):
        for dtype in (torch.float32, torch.float64):
            for function in VARIANTS.values():
                for grad in (False, True):
                    recorded.append(trace(function, None, dtype, CPU, grad, sizes))
            for make in ALL.values():
                functions = make(SIZES, dtype)
                recorded.append(trace(functions.score_mod, functions.mask_mod, dtype, CPU, True, sizes))
    if not remembered:
        source._known.clear()
    found = [source.source_of(each.function) for each in recorded]
    assert found == [source._written(each.function) for each in recorded]
    assert len(set(found)) > 60


def test_no_more_are_kept_than_a_few() -> None:
    source._known.clear()
    for number in range(source._MOST_KNOWN + 5):
        source.source_of(trace(of_constant(float(number)), None, torch.float32, CPU, False, SIZES).function)
    assert len(source._known) == 5
