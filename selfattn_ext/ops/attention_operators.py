"""The operators of attention with all options, its derivatives, and its halves: scores, and their softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..build import library
from ..fake_results import empty_gradients, empty_like, empty_statistic, refuse_meta
from ..reference import accumulation_dtype
from .registration import SIXTEEN_BITS, direct, operator

__all__ = [
    "attention_backward",
    "attention_backward_backward",
    "attention_captured_gradients",
    "attention_forward",
    "attention_jvp",
    "attention_refusals",
    "attention_scores",
    "attention_scores_backward",
    "attention_statistics",
    "attention_weight_sums",
    "attention_weights",
    "direct_backward",
    "direct_forward",
    "masked_softmax",
    "masked_softmax_backward",
    "sorted_selection",
]


@operator
def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, need_residual: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev) -> out (B,H,L,Ev), row_max and row_sum (B,H,L),
    out_residual.

    out_residual is what rounding out to 16 bits took away; an empty tensor for other dtypes and where it is
    not asked for.
    """
    refuse_meta(query, key, value, *options.values())
    out = empty_like(query, query.shape[2], value.shape[3])
    residual = torch.empty_like(out) if need_residual and query.dtype in SIXTEEN_BITS else query.new_empty(0)
    return out, empty_statistic(query), empty_statistic(query), residual


direct_forward = direct(attention_forward)

#: (query, key, value, scale, *, options) -> a line for each CUDA kernel: why it does not take this call.
attention_refusals: Callable[..., str] = library.ops().attention_refusals.default


@operator
def attention_weights(
    query: Tensor, key: Tensor, row_max: Tensor, row_sum: Tensor, scale: float, **options: Any
) -> Tensor:
    """The row statistics of a forward -> weights (B,H,L,S)."""
    refuse_meta(query, key, row_max, row_sum, *options.values())
    starts, starts_k, table = (options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    batch, heads, length, _ = query.shape
    if starts is not None:
        batch, length = starts.shape[0] - 1, options["max_seqlen_q"]
    keys = key.shape[2] if table is None else table.shape[1] * key.shape[2]
    return query.new_empty((batch, heads, length, keys if starts_k is None else options["max_seqlen_k"]))


@operator
def attention_statistics(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, need_residual: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of attention_forward, row_top and row_mean (B,H,L): the largest score, and the sum of
    weights times scores less row_max.
    """
    refuse_meta(query, key, value, *options.values())
    out = empty_like(query, query.shape[2], value.shape[3])
    residual = torch.empty_like(out) if need_residual and query.dtype in SIXTEEN_BITS else query.new_empty(0)
    row_max, row_sum, row_top, row_mean = (empty_statistic(query) for _ in range(4))
    return out, row_max, row_sum, residual, row_top, row_mean


@operator
def attention_weight_sums(
    query: Tensor,
    key: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    *,
    per_key: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The row statistics of a forward -> the sums of each key's weights before dropout (B,H,S).

    With numbers per_key (B,H,S), they are the sums of each query's weights times these numbers (B,H,L). The
    numbers of packed keys are (1,H,rows).
    """
    refuse_meta(query, key, row_max, row_sum, *options.values())
    if per_key is not None:
        return empty_statistic(query)
    table, (_, heads, _) = options.get("block_table"), query.shape[:3]
    keys = key.shape[2] if table is None else table.shape[1] * key.shape[2]
    batch = key.shape[0] if table is None else table.shape[0]
    return query.new_empty((batch, heads, keys), dtype=accumulation_dtype(query.dtype))


@operator
def sorted_selection(indices: Tensor, blocks: int) -> Tensor:
    """Indices (B,H,rows,K), int32 or int64, of the CPU -> the numbers of each row in ascending order, each
    once, with -1 behind them (B,H,rows,K), int32.
    """
    return indices.new_empty(indices.shape, dtype=torch.int32)


@operator
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    *,
    need_mask_grad: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, attn_mask, alibi_slopes and sinks; an empty tensor stands for a
    gradient that was not asked for. Among the options are out_residual, grad_row and grad_weights.
    """
    refuse_meta(grad_out, query, key, value, *options.values())
    return empty_gradients(query, key, value, options, need_mask_grad)


direct_backward = direct(attention_backward)


@operator
def attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, need_residual: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of attention_forward, tangent_out and tangent_lse.

    Among the options are tangent_query, tangent_key, tangent_value, tangent_mask, tangent_slopes and
    tangent_sinks; one that is missing is 0.
    """
    refuse_meta(query, key, value, *options.values())
    out = empty_like(query, query.shape[2], value.shape[3])
    rounds = need_residual and query.dtype in SIXTEEN_BITS
    residual = torch.empty_like(out) if rounds else query.new_empty(0)
    return (
        out,
        empty_statistic(query),
        empty_statistic(query),
        residual,
        torch.empty_like(out),
        empty_statistic(query),
    )


@operator
def attention_backward_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    *,
    need_mask_grad: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Six gradients as of attention_backward, tangent_out and tangent_lse. Among the options are the tangents
    of attention_jvp, out_residual and grad_row.

    The gradients are those of ``(grad_out * tangent_out).sum() - (grad_row * tangent_lse).sum()``; Note
    [Second derivatives] in csrc/core/tangents.h says what they are good for.
    """
    refuse_meta(grad_out, query, key, value, *options.values())
    tangent_out = empty_like(query, query.shape[2], value.shape[3])
    return (*empty_gradients(query, key, value, options, need_mask_grad), tangent_out, empty_statistic(query))


@operator
def attention_captured_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    *,
    captured_sizes: Sequence[int],
    exclusive: int = 0,
    **options: Any,
) -> Tensor:
    """The gradients of the tensors in ``captured``, end to end in one tensor (N,) of float64.

    Each has as many elements as captured_sizes says; those with 0 are not computed. ``exclusive`` is the sum
    of 1, 2 and 4 where scores of different batch elements, heads and queries read different elements of each
    of these tensors. Among the options are out_residual, grad_row and grad_weights.
    """
    refuse_meta(grad_out, query, key, value, *options.values())
    return query.new_empty(sum(captured_sizes), dtype=torch.float64)


@operator
def attention_scores(query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor:
    """scale * query @ key^T (B,H,L,S)."""
    refuse_meta(query, key)
    return query.new_empty((*query.shape[:3], key.shape[2]))


@operator
def attention_scores_backward(
    grad_scores: Tensor, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = ""
) -> tuple[Tensor, Tensor]:
    """The gradients of query and key."""
    refuse_meta(grad_scores, query, key)
    return empty_like(query, query.shape[2], query.shape[3]), empty_like(key, key.shape[2], key.shape[3])


@operator
def masked_softmax(
    scores: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    kernel_name: str = "",
) -> Tensor:
    """softmax(scale * scores + mask) (B,H,L,S)."""
    refuse_meta(scores, mask)
    return scores.new_empty(scores.shape)


@operator
def masked_softmax_backward(
    grad_weights: Tensor, weights: Tensor, scale: float, *, kernel_name: str = ""
) -> Tensor:
    """scale * weights * (grad_weights - rowsum(weights * grad_weights))."""
    refuse_meta(grad_weights, weights)
    return weights.new_empty(weights.shape)
