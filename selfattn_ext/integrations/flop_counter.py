"""Counts the floating-point operations of the operators, for torch.utils.flop_counter.

It counts as torch does for its own attention: the products of whole matrices, whatever is hidden, with two
operations for each multiplication and its addition, and not the softmax.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import ops
from ..arguments import sequence_checks

__all__: list[str] = []

_operators = getattr(torch.ops, ops.NAMESPACE)
#: How the names of the basic operators begin.
_BASIC = ("basic", "causal", "masked")


def _products(query: Tensor, key: Tensor, width: int, options: dict[str, Any]) -> int:
    """The operations of products of (B, H, L, S) with a matrix of that width, or with that result."""
    pairs = zip(_lengths(query, "q", options), _lengths(key, "k", options), strict=True)
    return 2 * query.shape[1] * width * sum(queries * keys for queries, keys in pairs)


def _lengths(tensor: Tensor, side: str, options: dict[str, Any]) -> list[int]:
    """The number of queries or keys of each batch element; if it cannot be read, the most that it may be."""
    starts, used = options.get(f"cu_seqlens_{side}"), options.get(f"seqlens_{side}")
    table = options.get("block_table") if side == "k" else None
    lengths = [tensor.shape[2]] * tensor.shape[0]
    if table is not None:
        lengths = [table.shape[1] * tensor.shape[2]] * table.shape[0]
    elif starts is not None:
        values = sequence_checks.values("cu_seqlens", starts)
        if values is None:
            return [options[f"max_seqlen_{side}"]] * (starts.shape[0] - 1)
        lengths = [after - before for before, after in itertools.pairwise(values)]
    if used is not None and (values := sequence_checks.values("seqlens", used)) is not None:
        lengths = list(values)
    return lengths


@register_flop_formula(
    [
        _operators.attention_forward,
        *(getattr(_operators, f"{kind}_attention") for kind in _BASIC),
        *(getattr(_operators, f"{kind}_attention_forward") for kind in _BASIC),
    ],
    get_raw=True,
)
def _forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return _products(query, key, query.shape[3] + value.shape[3], kwargs)


@register_flop_formula(
    [
        _operators.attention_backward,
        *(getattr(_operators, f"{kind}_attention_backward") for kind in _BASIC),
    ],
    get_raw=True,
)
def _backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    # It computes the scores again, the gradients of query and key, and those of the weights and of value.
    return _products(query, key, 3 * query.shape[3] + 2 * value.shape[3], kwargs)


@register_flop_formula([_operators.attention_weights, _operators.attention_scores], get_raw=True)
def _scores(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> int:
    return _products(query, key, query.shape[3], kwargs)


@register_flop_formula(_operators.attention_scores_backward, get_raw=True)
def _scores_backward(grad_scores: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> int:
    return _products(query, key, 2 * query.shape[3], kwargs)


def _packing(queries: Tensor, keys: Tensor, longest: Any) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (queries, keys, *longest[:2]), strict=True))


@register_flop_formula([_operators.packed_attention, _operators.packed_attention_forward], get_raw=True)
def _packed(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *rest: Any, **_: Any
) -> int:
    return _products(query, key, query.shape[2] + value.shape[2], _packing(queries, keys, rest))


@register_flop_formula(_operators.packed_attention_backward, get_raw=True)
def _packed_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any, **_: Any
) -> int:
    packing = _packing(saved[3][0], saved[3][1], saved[4:])
    return _products(query, key, 3 * query.shape[2] + 2 * value.shape[2], packing)
