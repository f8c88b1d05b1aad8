"""The operators for small calls: with a mask or the causal rule and no other option, and packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fake_results import empty_like, empty_packed, refuse_meta
from ..reference import accumulation_dtype
from .registration import SIXTEEN_BITS, Operator, direct, named, operator

__all__ = [
    "basic_attention",
    "basic_attention_backward",
    "basic_attention_forward",
    "causal_attention",
    "causal_attention_backward",
    "causal_attention_forward",
    "masked_attention",
    "masked_attention_backward",
    "masked_attention_forward",
    "packed_attention",
    "packed_attention_backward",
    "packed_attention_forward",
]


def _basic_operators(fake: Operator) -> tuple[Operator, Operator, Operator]:
    """The operators without options, with the causal rule, and with a mask, that share a fake kernel.

    The first two take tensors alone, which costs a call the least.
    """
    basic, causal, masked = (
        direct(named(kind + fake.__name__, fake)) for kind in ("basic", "causal", "masked")
    )
    return basic, causal, masked


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """out alone, with the default scale for None. The first dimensions of attn_mask may be missing."""
    refuse_meta(query, key, value, attn_mask)
    return empty_like(query, query.shape[2], value.shape[3])


basic_attention, causal_attention, masked_attention = _basic_operators(_attention)


def _attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, statistics (2,B,H,L), which are row_max and row_sum, and out_residual, None if the dtype has none.

    The arguments are those of :func:`basic_attention`.
    """
    refuse_meta(query, key, value, attn_mask)
    out = empty_like(query, query.shape[2], value.shape[3])
    statistics = query.new_empty((2, *query.shape[:3]), dtype=accumulation_dtype(query.dtype))
    return out, statistics, torch.empty_like(out) if query.dtype in SIXTEEN_BITS else None


basic_attention_forward, causal_attention_forward, masked_attention_forward = _basic_operators(
    _attention_forward
)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: Tensor,
    out_residual: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    refuse_meta(grad_out, query, key, value, attn_mask)
    of_query, of_key, of_value = (
        empty_like(tensor, tensor.shape[2], tensor.shape[3]) for tensor in (query, key, value)
    )
    return of_query, of_key, of_value


basic_attention_backward, causal_attention_backward, masked_attention_backward = _basic_operators(
    _attention_backward
)


@direct
@operator
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """query (rows,H,E), key and value (rows,Hk,E|Ev), offsets (B+1,) on the CPU -> out (rows,H,Ev)."""
    refuse_meta(query, key, value)
    return empty_packed(query, value.shape[2])


@direct
@operator
def packed_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """out, statistics (2,1,H,rows), out_residual or None, and a copy of both offsets (2,B+1) in int64."""
    refuse_meta(query, key, value)
    out = empty_packed(query, value.shape[2])
    residual = empty_packed(query, value.shape[2]) if query.dtype in SIXTEEN_BITS else None
    rows, heads, _ = query.shape
    statistics = query.new_empty((2, 1, heads, rows), dtype=accumulation_dtype(query.dtype))
    return out, statistics, residual, cu_seqlens_q.new_empty((2, cu_seqlens_q.shape[0]), dtype=torch.int64)


@direct
@operator
def packed_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    refuse_meta(grad_out, query, key, value)
    of_query, of_key, of_value = (empty_packed(tensor, tensor.shape[2]) for tensor in (query, key, value))
    return of_query, of_key, of_value
