"""varlen_attention refuses wrong arguments before anything reads by wrong offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn.attention.bias import causal_upper_left
from varlen_cases import ARGUMENTS, HEADS, KEY, MASKS, OFFSETS, QUERY, VALUE, index

from selfattn_ext import ops, varlen_attention
from selfattn_ext.arguments import sequence_checks

pytestmark = pytest.mark.usefixtures("one_thread")

#: name -> (changed arguments, exception, words in the message).
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "rank": ({"query": QUERY[None]}, ValueError, ["query", "3 dimensions", "(1, 9, 4, 8)"]),
    "rank of key": ({"key": KEY[:, 0], "value": VALUE[:, 0]}, ValueError, ["key", "3 dimensions", "(9, 8)"]),
    "head dims": ({"key": KEY[..., :5]}, ValueError, ["head dim", "(9, 4, 5)"]),
    "rows": ({"value": VALUE[:8]}, ValueError, ["key", "value", "rows", "(8, 4, 8)"]),
    "heads": (
        {"key": KEY[:, :2], "value": VALUE[:, :2]},
        ValueError,
        ["4 heads", "2", "enable_gqa", "query (9, 4, 8)"],
    ),
    "heads that do not divide": (
        {"key": KEY[:, :3], "value": VALUE[:, :3], "enable_gqa": True},
        ValueError,
        ["divide", "4", "3"],
    ),
    "dtypes": ({"key": KEY.double()}, TypeError, ["key", "float64", "float32"]),
    "integers": ({"query": QUERY.int()}, TypeError, ["query", "float32", "int32"]),
    "list": ({"value": [1.0]}, TypeError, ["value", "Tensor", "list"]),
    "nested": ({"query": torch.nested.nested_tensor([QUERY])}, TypeError, ["query", "nested"]),
    "meta": ({"query": QUERY.to("meta")}, ValueError, ["query", "meta"]),
    "offsets of floats": ({"cu_seqlens_q": OFFSETS.float()}, TypeError, ["cu_seqlens_q", "int32", "float32"]),
    "offsets of bytes": ({"cu_seqlens_k": OFFSETS.byte()}, TypeError, ["cu_seqlens_k", "int64", "uint8"]),
    "offsets in a list": ({"cu_seqlens_q": [0, 2, 9]}, TypeError, ["cu_seqlens_q", "tensor", "list"]),
    "no offsets": ({"cu_seqlens_k": None}, TypeError, ["cu_seqlens_k", "NoneType"]),
    "sparse offsets": ({"cu_seqlens_q": OFFSETS.to_sparse()}, TypeError, ["cu_seqlens_q", "dense", "sparse"]),
    "offsets in two dimensions": ({"cu_seqlens_q": OFFSETS[None]}, ValueError, ["one dimension", "(1, 4)"]),
    "empty offsets": ({"cu_seqlens_q": index()}, ValueError, ["cu_seqlens_q", "more than", "empty"]),
    "start": ({"cu_seqlens_q": index(1, 2, 2, 9)}, ValueError, ["cu_seqlens_q", "start with 0", "got 1"]),
    "decreasing": (
        {"cu_seqlens_k": index(0, 5, 4, 9)},
        ValueError,
        ["cu_seqlens_k", "not decrease", "5 at 1", "4"],
    ),
    "past the tensor": (
        {"cu_seqlens_q": index(0, 2, 3, 10)},
        ValueError,
        ["cu_seqlens_q", "query", "9", "10"],
    ),
    "past the keys": ({"cu_seqlens_k": index(0, 2, 3, 10)}, ValueError, ["cu_seqlens_k", "key", "9", "10"]),
    "far past": ({"cu_seqlens_k": index(0, 2, 3, 2**62)}, ValueError, ["cu_seqlens_k", str(2**62)]),
    "longest of another packing": ({"cu_seqlens_k": index(0, 9)}, ValueError, ["same number", "4", "2"]),
    "numbers of sequences": ({"cu_seqlens_k": index(0, 2, 9)}, ValueError, ["same number", "4", "3"]),
    "longest query": ({"max_seqlen_q": 6}, ValueError, ["max_seqlen_q", "7", "sequence 2", "got 6"]),
    "longest key": ({"max_seqlen_k": 1}, ValueError, ["max_seqlen_k", "7", "got 1"]),
    "negative longest": ({"max_seqlen_k": -1}, ValueError, ["max_seqlen_k", "-1"]),
    "longest of floats": ({"max_seqlen_q": 7.0}, TypeError, ["max_seqlen_q", "int", "7.0"]),
    "positions": ({"query_offset": index(1, 2)}, ValueError, ["query_offset", "3 sequences", "(2,)"]),
    "positions of floats": ({"query_offset": torch.ones(3)}, TypeError, ["query_offset", "int64", "float32"]),
    "positions in a list": ({"query_offset": [0, 1, 2]}, TypeError, ["query_offset", "tensor", "list"]),
    "positions far away": ({"query_offset": index(0, 0, 2**60)}, ValueError, ["query_offset", str(2**60)]),
    "longest nested": ({"max_seqlen_q": torch.nested.nested_tensor([QUERY])}, TypeError, ["int", "a nested"]),
    "position": ({"query_offset": 0.5}, TypeError, ["query_offset", "int", "0.5"]),
    "mask shape": (
        {"attn_mask": torch.ones(3, HEADS, 7, 6)},
        ValueError,
        ["attn_mask", "(3, 4, 7, 6)", "(3, 4, 7, 7)"],
    ),
    "mask batch": ({"attn_mask": torch.ones(2, 1, 7, 7)}, ValueError, ["attn_mask", "(2, 1, 7, 7)"]),
    "integer mask": ({"attn_mask": torch.ones(7, 7).int()}, TypeError, ["attn_mask", "bool", "int32"]),
    "CausalBias": ({"attn_mask": causal_upper_left(7, 7)}, TypeError, ["CausalBias", "is_causal"]),
    "too few masks": ({"attn_mask": MASKS[:2]}, ValueError, ["attn_mask", "got 2", "3 sequences"]),
    "mask of a sequence": (
        {"attn_mask": [MASKS[0], MASKS[1], torch.ones(7, 6)]},
        ValueError,
        ["attn_mask[2]", "(7, 6)", "(4, 7, 7)"],
    ),
    "masks of two dtypes": (
        {"attn_mask": [MASKS[0], MASKS[1] > 0, MASKS[2]]},
        TypeError,
        ["attn_mask[1]", "bool", "float32"],
    ),
    "masks that are none": ({"attn_mask": [None] * 3}, TypeError, ["attn_mask[0]", "NoneType"]),
    "CausalBias in a list": (
        {"attn_mask": [causal_upper_left(2, 2), *MASKS[1:]]},
        TypeError,
        ["attn_mask[0]", "CausalBias"],
    ),
    "slopes": ({"alibi_slopes": torch.ones(2, HEADS)}, ValueError, ["alibi_slopes", "(2, 4)", "(3, 4)"]),
    "sinks": ({"sinks": torch.ones(HEADS).int()}, TypeError, ["sinks", "int32"]),
    "window": ({"window_size": (-2, 0)}, ValueError, ["window_size", "-2"]),
    "softcap": ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
    "causal": ({"is_causal": index(1, 0, 1)}, TypeError, ["is_causal", "bool", "(3,)"]),
    "dropout": ({"dropout_p": 2.0}, ValueError, ["dropout_p", "2.0"]),
    "scale": ({"scale": float("inf")}, ValueError, ["scale", "finite"]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_arguments(name: str) -> None:
    changed, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        varlen_attention(**{**ARGUMENTS, **changed})
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), f"{word!r} in {caught.value}"


def test_nothing_reads_by_offsets_that_were_refused() -> None:
    """The operators themselves refuse offsets outside of tensors, whoever calls them."""
    four = QUERY.transpose(0, 1).unsqueeze(0)
    for bad in (index(0, 2, 2**40), index(0, -(2**50), 9), index(-8, 2, 9), index(0, 9, 2)):
        for given in ({"cu_seqlens_q": bad, "cu_seqlens_k": bad}, {"cu_seqlens_q": bad}):
            keys = four if "cu_seqlens_k" in given else four.expand(2, -1, -1, -1)
            # On a GPU the operators do not read offsets; the sizes given with them are refused there.
            with pytest.raises((ValueError, RuntimeError), match=r"cu_seqlens|larger than memory"):
                ops.attention_forward(four, keys, keys, 1.0, max_seqlen_q=2**41, max_seqlen_k=2**41, **given)


def test_values_are_looked_at_once_for_as_long_as_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading values on a GPU would wait for it, so known values are not read again."""
    looks: list[int] = []
    monkeypatch.setattr(sequence_checks, "_on_host", lambda tensor: False)
    monkeypatch.setattr(sequence_checks, "_numbers", lambda t: looks.append(1) or tuple(t.tolist()))
    offsets = index(0, 3, 5)
    for _ in range(3):
        assert sequence_checks.values("cu_seqlens_q", offsets) == (0, 3, 5)
    assert len(looks) == 1

    def transformed(x: Tensor, wrapped: Tensor) -> Tensor:
        assert sequence_checks.values("cu_seqlens_q", wrapped) == (0, 3, 5)
        return x.sum()

    grad(transformed)(torch.ones(3), offsets)
    assert len(looks) == 1
    offsets[1] = 4
    assert sequence_checks.values("cu_seqlens_q", offsets) == (0, 4, 5)
    assert sequence_checks.values("cu_seqlens_q", offsets.clone()) == (0, 4, 5)
    assert len(looks) == 3
    with torch.inference_mode():
        made_there = index(0, 1)
    for _ in range(2):
        sequence_checks.values("cu_seqlens_q", made_there)
    assert len(looks) == 5
