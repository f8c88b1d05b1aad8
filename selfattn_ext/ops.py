"""The operators of the compiled library, each with its types, its shapes and a fake kernel.

A function here that :func:`_operator` decorates is written as the fake kernel of the operator of its name: it
makes results of the right shapes, dtypes and strides without data, for torch.compile, torch.export and
FakeTensorMode. The name then stands for the dispatcher's own callable, so that a call costs nothing on top.

All tensors are four-dimensional here; :mod:`selfattn_ext.functional` brings user input into that form.
``options`` are those of csrc/ops/attention_options.h. The operators know no gradients and no vmap: those are
in :mod:`selfattn_ext.autograd.attention_function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .build import library
from .fake_results import empty_gradients, empty_like, empty_packed, empty_statistic, refuse_meta
from .reference import accumulation_dtype

__all__ = [
    "NAMESPACE",
    "append_to_cache",
    "attention_backward",
    "attention_backward_backward",
    "attention_captured_gradients",
    "attention_forward",
    "attention_jvp",
    "attention_scores",
    "attention_scores_backward",
    "attention_statistics",
    "attention_weight_sums",
    "attention_weights",
    "attention_with_cache",
    "basic_attention",
    "basic_attention_backward",
    "basic_attention_forward",
    "causal_attention",
    "causal_attention_backward",
    "causal_attention_forward",
    "masked_attention",
    "masked_attention_backward",
    "masked_attention_forward",
    "masked_softmax",
    "masked_softmax_backward",
    "packed_attention",
    "packed_attention_backward",
    "packed_attention_forward",
    "sorted_selection",
    "statistics_with_cache",
]

_Operator = TypeVar("_Operator", bound=Callable[..., Any])

#: The dtypes for which a forward keeps what rounding took away from its output.
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_ops = library.ops()

#: The dispatcher namespace of the operators: torch.ops.<NAMESPACE>.
NAMESPACE: str = _ops.name


def _operator(fake: _Operator) -> _Operator:
    """The operator that a fake kernel, which is registered, is named after."""
    return _named(fake.__name__, fake)


def _named(name: str, fake: _Operator) -> _Operator:
    """The operator of that name, whose fake kernel is registered."""
    torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
    operator: _Operator = getattr(_ops, name).default
    return operator


def _direct(operator: _Operator) -> _Operator:
    """The callable inside an operator, which costs less. torch.compile traces operators only."""
    direct: _Operator = getattr(operator, "_op", operator)
    return direct


@_operator
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


direct_forward = _direct(attention_forward)

#: (query, key, value, scale, *, options) -> a line for each CUDA kernel: why it does not take this call.
attention_refusals: Callable[..., str] = _ops.attention_refusals.default


@_operator
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


@_operator
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


@_operator
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


@_operator
def sorted_selection(indices: Tensor, blocks: int) -> Tensor:
    """Indices (B,H,rows,K), int32 or int64, of the CPU -> the numbers of each row in ascending order, each
    once, with -1 behind them (B,H,rows,K), int32.
    """
    return indices.new_empty(indices.shape, dtype=torch.int32)


@_operator
def append_to_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Writes key and value (B,Hk,L,.) behind the seqlens (B,) rows that the caches hold."""
    refuse_meta(key_cache, value_cache, key, value)


@_operator
def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Appends key and value, then attends to the caches, whose lengths seqlens_k gives as they are then
    -> out, row_max, row_sum.
    """
    refuse_meta(query, key_cache, value_cache, key, value, *options.values())
    return (
        empty_like(query, query.shape[2], value_cache.shape[3]),
        empty_statistic(query),
        empty_statistic(query),
    )


direct_with_cache = _direct(attention_with_cache)


@_operator
def statistics_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of attention_with_cache, row_top and row_mean."""
    refuse_meta(query, key_cache, value_cache, key, value, *options.values())
    out = empty_like(query, query.shape[2], value_cache.shape[3])
    row_max, row_sum, row_top, row_mean = (empty_statistic(query) for _ in range(4))
    return out, row_max, row_sum, row_top, row_mean


@_operator
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


direct_backward = _direct(attention_backward)


@_operator
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


@_operator
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


@_operator
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


def _basic_operators(fake: _Operator) -> tuple[_Operator, _Operator, _Operator]:
    """The operators without options, with the causal rule, and with a mask, that share a fake kernel.

    The first two take tensors alone, which costs a call the least.
    """
    basic, causal, masked = (
        _direct(_named(kind + fake.__name__, fake)) for kind in ("basic", "causal", "masked")
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


@_direct
@_operator
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


@_direct
@_operator
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


@_direct
@_operator
def packed_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    refuse_meta(grad_out, query, key, value)
    of_query, of_key, of_value = (empty_packed(tensor, tensor.shape[2]) for tensor in (query, key, value))
    return of_query, of_key, of_value


@_operator
def attention_scores(query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor:
    """scale * query @ key^T (B,H,L,S)."""
    refuse_meta(query, key)
    return query.new_empty((*query.shape[:3], key.shape[2]))


@_operator
def attention_scores_backward(
    grad_scores: Tensor, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = ""
) -> tuple[Tensor, Tensor]:
    """The gradients of query and key."""
    refuse_meta(grad_scores, query, key)
    return empty_like(query, query.shape[2], query.shape[3]), empty_like(key, key.shape[2], key.shape[3])


@_operator
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


@_operator
def masked_softmax_backward(
    grad_weights: Tensor, weights: Tensor, scale: float, *, kernel_name: str = ""
) -> Tensor:
    """scale * weights * (grad_weights - rowsum(weights * grad_weights))."""
    refuse_meta(grad_weights, weights)
    return weights.new_empty(weights.shape)
