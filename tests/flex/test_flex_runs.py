"""Score functions whose neighbouring queries read neighbouring elements (flex/straight.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import Functions, flex_attention, mask_of, tensors
from test_flex_functions import judge
from torch import Tensor

from selfattn_ext.flex import kernel_calls, source

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

SIZES = (2, 2, 67, 131)
QUERIES, KEYS = SIZES[2:]
ALL = QUERIES + KEYS - 1

#: The shape of the learned tensor, and the function that reads it.
READS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "distance of each head": ((2, ALL), lambda t, b, h, q, kv: t[h, q - kv + KEYS - 1]),
    "falling": ((ALL,), lambda t, b, h, q, kv: t[kv - q + QUERIES - 1]),
    "by a number minus it": ((ALL,), lambda t, b, h, q, kv: t[(QUERIES - 1 - q) + kv]),
    "from the end": ((ALL,), lambda t, b, h, q, kv: t[q - kv]),
    "falling from the end": ((2, ALL), lambda t, b, h, q, kv: t[h, kv - q]),
    "in 64 bits": ((2, ALL), lambda t, b, h, q, kv: t[b, q.long() - kv + KEYS - 1]),
    "not the last dimension": ((ALL, 2), lambda t, b, h, q, kv: t[q - kv + KEYS - 1, h]),
    "every other one": ((2, 2 * ALL), lambda t, b, h, q, kv: t[h, 2 * (q - kv + KEYS - 1)]),
    "of a view": ((2 * ALL,), lambda t, b, h, q, kv: t[::2][q - kv + KEYS - 1]),
    "transposed": ((2, KEYS, QUERIES), lambda t, b, h, q, kv: t[h, kv, q]),
    "as it is": ((QUERIES, KEYS), lambda t, b, h, q, kv: t[q, kv]),
    "two": ((2, ALL), lambda t, b, h, q, kv: t[0, q - kv + KEYS - 1] * torch.sigmoid(t[1, q - kv]) + t[h, q]),
    "both": ((QUERIES, ALL), lambda t, b, h, q, kv: t[q, q - kv + KEYS - 1]),
}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", READS)
def test_results_and_gradients(name: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    shape, read = READS[name]
    if dtype == torch.float64:
        stored = dtype
    learned = torch.randn(shape).to(stored)
    # torch sums gradients of 16 bits in 16 bits, too inaccurately to judge ours.
    trained = [] if stored == torch.bfloat16 else [learned.requires_grad_()]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + read(learned, b, h, q, kv)

    given = tensors(SIZES, dtype)
    judge(name, flex_attention(*given, score_mod), given, Functions(score_mod, learned=trained))


def test_beside_the_tensor() -> None:
    """One score reads the table's last element, which is then missing."""
    table, given = torch.randn(ALL), tensors(SIZES)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[q - kv + KEYS - 1]

    flex_attention(*given, score_mod)
    table = table[:-1]
    with pytest.raises(IndexError):
        flex_attention(*given, score_mod)
    hidden = Functions(mask_mod=lambda b, h, q, kv: q - kv + KEYS < ALL)
    assert flex_attention(*given, score_mod, mask_of(hidden, SIZES, 16)).isfinite().all()


def test_which_functions_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One index grows or falls by 1 from query to query, and no other index depends on the query."""
    written: list[str] = []

    def source_of(function: Any) -> str:
        written.append(source.source_of(function))
        return written[-1]

    monkeypatch.setattr(kernel_calls, "source_of", source_of)
    for name, (shape, read) in READS.items():
        learned = torch.randn(shape)
        flex_attention(*tensors(SIZES), lambda score, *at, t=learned, read=read: score + read(t, *at))
        assert ("continue;" in written[-1]) == (name not in ("every other one", "both")), name
