"""How many floating-point operations the operators take, for torch.utils.flop_counter.

As torch counts its own attention: the products of matrices, two operations for each multiplication with its
addition, whole matrices whatever is hidden, and the softmax not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import ops

__all__: list[str] = []

Shape = Sequence[int]
_operators = getattr(torch.ops, ops.NAMESPACE)


def _product(query: Shape, keys: int, width: int) -> int:
    """One product of (B, H, L, S) with a matrix of that width, or with that result."""
    batch, heads, length, _ = query
    return 2 * batch * heads * length * keys * width


@register_flop_formula(
    [_operators.attention_forward, _operators.plain_attention, _operators.plain_attention_forward]
)
def _forward(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return _product(query, key[2], query[3] + value[3])


@register_flop_formula(_operators.attention_with_cache)
def _with_cache(query: Shape, key_cache: Shape, value_cache: Shape, *args: Any, **kwargs: Any) -> int:
    table = kwargs.get("block_table")
    keys = key_cache[2] if table is None else table[1] * key_cache[2]
    return _product(query, keys, query[3] + value_cache[3])


@register_flop_formula([_operators.attention_backward, _operators.plain_attention_backward])
def _backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    # The scores again, the gradients of query and key; those of the weights and of value.
    return _product(query, key[2], 3 * query[3] + 2 * value[3])


@register_flop_formula([_operators.attention_weights, _operators.attention_scores])
def _scores(query: Shape, key: Shape, *args: Any, **kwargs: Any) -> int:
    return _product(query, key[2], query[3])


@register_flop_formula(_operators.attention_scores_backward)
def _scores_backward(grad_scores: Shape, query: Shape, key: Shape, *args: Any, **kwargs: Any) -> int:
    return _product(query, key[2], 2 * query[3])
