"""The operators of the compiled library, one typed name per operator, and their fake kernels.

All tensors are four-dimensional here; :mod:`selfattn_ext.functional` brings user input into that form. The
names are the dispatcher's own callables, so that a call costs nothing on top. They know no gradients and no
vmap: those are in :mod:`selfattn_ext.autograd.attention`.

The fake kernels give shapes, dtypes and strides without data, for torch.compile, torch.export and
FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from . import library
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
    "attention_weights",
    "attention_with_cache",
    "masked_softmax",
    "masked_softmax_backward",
    "plain_attention",
    "plain_attention_backward",
    "plain_attention_forward",
]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


class _AttentionForward(Protocol):
    """(query (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev), scale, *, need_residual, options)
    -> (out, row_max, row_sum, out_residual).

    out_residual is what rounding out to 16 bits took away; an empty tensor for other dtypes and where not
    asked for.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class _AttentionRefusals(Protocol):
    """(query, key, value, scale, *, options) -> a line per CUDA kernel: why it does not take this call."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any) -> str: ...


class _AttentionWeights(Protocol):
    """(query, key, row_max, row_sum, scale, *, options) -> weights (B,H,L,S)."""

    def __call__(
        self, query: Tensor, key: Tensor, row_max: Tensor, row_sum: Tensor, scale: float, **options: Any
    ) -> Tensor: ...


class _AppendToCache(Protocol):
    """(key_cache, value_cache, key, value, seqlens, *, cu_seqlens, block_table): writes key and value
    (B,Hk,L,.) behind the seqlens (B,) rows that the caches hold.
    """

    def __call__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        key: Tensor,
        value: Tensor,
        seqlens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> None: ...


class _AttentionWithCache(Protocol):
    """(query, key_cache, value_cache, key, value, scale, *, options) -> (out, row_max, row_sum).

    Appends key and value, then attends to the caches; seqlens_k are their lengths afterwards.
    """

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class _AttentionBackward(Protocol):
    """(grad_out, query, ..., *, out_residual, grad_row, grad_weights, need_mask_grad, options) -> six
    gradients.

    They are those of query, key, value, attn_mask, alibi_slopes and sinks; an empty tensor stands for a
    gradient that was not asked for.
    """

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class _AttentionJvp(Protocol):
    """(query, key, value, scale, *, tangent_query, tangent_key, tangent_value, tangent_mask, tangent_slopes,
    tangent_sinks, need_residual, options) -> (out, row_max, row_sum, out_residual, tangent_out, tangent_lse).

    A tangent that is missing is 0.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class _AttentionBackwardBackward(Protocol):
    """(grad_out, query, ..., *, the same tangents, out_residual, grad_row, need_mask_grad, options) -> (six
    gradients as of attention_backward, tangent_out, tangent_lse).

    The gradients are those of ``(grad_out * tangent_out).sum() - (grad_row * tangent_lse).sum()``; Note
    [Second derivatives] in csrc/core/tangents.h says what they are good for.
    """

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class _AttentionCapturedGradients(Protocol):
    """(grad_out, query, ..., *, captured_sizes, exclusive, out_residual, grad_row, grad_weights, options) ->
    gradients (N,) of the tensors in ``captured``, in float64.

    They lie one behind the other, each with so many elements as captured_sizes says; those with 0 are not
    computed. ``exclusive`` is the sum of 1, 2 and 4 where scores of unlike batch elements, heads and queries
    read unlike elements of each of these tensors.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


class _AttentionScores(Protocol):
    """(query, key, scale) -> scale * query @ key^T (B,H,L,S)."""

    def __call__(self, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor: ...


class _AttentionScoresBackward(Protocol):
    """(grad_scores, query, key, scale) -> (grad_query, grad_key)."""

    def __call__(
        self, grad_scores: Tensor, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = ""
    ) -> tuple[Tensor, Tensor]: ...


class _MaskedSoftmax(Protocol):
    """(scores (B,H,L,S), scale, *, mask, is_causal, query_offset) -> softmax(scale * scores + mask)."""

    def __call__(
        self,
        scores: Tensor,
        scale: float,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        query_offset: int = 0,
        kernel_name: str = "",
    ) -> Tensor: ...


class _MaskedSoftmaxBackward(Protocol):
    """(grad_weights, weights, scale) -> scale * weights * (grad - rowsum(weights * grad))."""

    def __call__(
        self, grad_weights: Tensor, weights: Tensor, scale: float, *, kernel_name: str = ""
    ) -> Tensor: ...


class _PlainAttention(Protocol):
    """(query, key, value, scale, is_causal, enable_gqa) -> out, the default scale for None."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Tensor: ...


class _PlainAttentionForward(Protocol):
    """The same -> (out, statistics (2,B,H,L), out_residual).

    statistics are row_max and row_sum; out_residual is None where the dtype has none.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class _PlainAttentionBackward(Protocol):
    """(grad_out, query, ..., is_causal) -> the gradients of query, key and value."""

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        statistics: Tensor,
        out_residual: Tensor | None,
        scale: float | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


#: The dtypes whose rounding is worth remembering.
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_ops = library.ops()

#: The dispatcher namespace of the operators: torch.ops.<NAMESPACE>.
NAMESPACE: str = _ops.name

attention_forward: _AttentionForward = _ops.attention_forward.default
attention_refusals: _AttentionRefusals = _ops.attention_refusals.default
attention_weights: _AttentionWeights = _ops.attention_weights.default
append_to_cache: _AppendToCache = _ops.append_to_cache.default
attention_with_cache: _AttentionWithCache = _ops.attention_with_cache.default
attention_backward: _AttentionBackward = _ops.attention_backward.default
attention_jvp: _AttentionJvp = _ops.attention_jvp.default
attention_backward_backward: _AttentionBackwardBackward = _ops.attention_backward_backward.default
attention_captured_gradients: _AttentionCapturedGradients = _ops.attention_captured_gradients.default
attention_scores: _AttentionScores = _ops.attention_scores.default
attention_scores_backward: _AttentionScoresBackward = _ops.attention_scores_backward.default
masked_softmax: _MaskedSoftmax = _ops.masked_softmax.default
masked_softmax_backward: _MaskedSoftmaxBackward = _ops.masked_softmax_backward.default


def _direct(overload: Any) -> Any:
    """The callable inside an overload, which costs less. torch.compile traces overloads only."""
    return getattr(overload, "_op", overload)


direct_forward: _AttentionForward = _direct(attention_forward)
direct_with_cache: _AttentionWithCache = _direct(attention_with_cache)
direct_backward: _AttentionBackward = _direct(attention_backward)
plain_attention: _PlainAttention = _direct(_ops.plain_attention.default)
plain_attention_forward: _PlainAttentionForward = _direct(_ops.plain_attention_forward.default)
plain_attention_backward: _PlainAttentionBackward = _direct(_ops.plain_attention_backward.default)


def _refuse_meta(*arguments: Any) -> None:
    """Fake kernels also answer for the meta device, where a caller would get tensors without data for
    results.
    """
    if any(isinstance(argument, Tensor) and argument.device.type == "meta" for argument in arguments):
        raise RuntimeError(
            "selfattn_ext runs on no meta tensors; use torch._subclasses.FakeTensorMode for shapes"
        )


def _fake(name: str) -> Callable[[_Kernel], _Kernel]:
    return torch.library.register_fake(f"{NAMESPACE}::{name}")


def _empty_like(layout: Tensor, length: int, width: int) -> Tensor:
    """An empty (B, H, length, width) in the order of the tensor's head and sequence dimensions, dense."""
    batch, heads, rows, _ = layout.shape
    if heads > 1 and rows > 1 and layout.stride(1) != 0 and layout.stride(1) < layout.stride(2):
        return layout.new_empty((batch, length, heads, width)).transpose(1, 2)
    return layout.new_empty((batch, heads, length, width))


@_fake("attention_forward")
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, need_residual: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    _refuse_meta(query, key, value, *options.values())
    batch, heads, length, _ = query.shape  # of packed queries (1, H, rows, E), as their results are
    statistics = (
        query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype)) for _ in range(2)
    )
    out = _empty_like(query, length, value.shape[3])
    residual = torch.empty_like(out) if need_residual and query.dtype in SIXTEEN_BITS else query.new_empty(0)
    return (out, *statistics, residual)


@_fake("attention_weights")
def _(query: Tensor, key: Tensor, row_max: Tensor, row_sum: Tensor, scale: float, **options: Any) -> Tensor:
    _refuse_meta(query, key, row_max, row_sum, *options.values())
    starts, starts_k, table = (options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    batch, heads, length, _ = query.shape
    if starts is not None:
        batch, length = starts.shape[0] - 1, options["max_seqlen_q"]
    keys = key.shape[2] if table is None else table.shape[1] * key.shape[2]
    return query.new_empty((batch, heads, length, keys if starts_k is None else options["max_seqlen_k"]))


@_fake("append_to_cache")
def _(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any) -> None:
    _refuse_meta(key_cache, value_cache, key, value)


@_fake("attention_with_cache")
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    **options: Any,
) -> tuple[Tensor, ...]:
    _refuse_meta(query, key_cache, value_cache, key, value, *options.values())
    statistics = (query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype)) for _ in range(2))
    return (_empty_like(query, query.shape[2], value_cache.shape[3]), *statistics)


def _rows(query: Tensor) -> Tensor:
    """An empty row statistic."""
    return query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))


@_fake("attention_jvp")
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any) -> tuple[Tensor, ...]:
    _refuse_meta(query, key, value, *options.values())
    out = _empty_like(query, query.shape[2], value.shape[3])
    rounds = options.get("need_residual", False) and query.dtype in SIXTEEN_BITS
    residual = torch.empty_like(out) if rounds else query.new_empty(0)
    return out, _rows(query), _rows(query), residual, torch.empty_like(out), _rows(query)


def _gradients(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Empty gradients of a call."""
    statistics = accumulation_dtype(query.dtype)
    optional = (
        (options.get("attn_mask") if options.get("need_mask_grad", False) else None, query.dtype),
        (options.get("alibi_slopes"), statistics),
        (options.get("sinks"), statistics),
    )
    return (
        *(_empty_like(tensor, tensor.shape[2], tensor.shape[3]) for tensor in (query, key, value)),
        *(
            query.new_empty(0, dtype=dtype) if tensor is None else tensor.new_empty(tensor.shape)
            for tensor, dtype in optional
        ),
    )


@_fake("attention_backward")
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any, **options: Any
) -> tuple[Tensor, ...]:
    _refuse_meta(grad_out, query, key, value, *options.values())
    return _gradients(query, key, value, options)


@_fake("attention_backward_backward")
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any, **options: Any
) -> tuple[Tensor, ...]:
    _refuse_meta(grad_out, query, key, value, *options.values())
    out = _empty_like(query, query.shape[2], value.shape[3])
    return *_gradients(query, key, value, options), out, _rows(query)


@_fake("attention_captured_gradients")
def _(
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
    _refuse_meta(grad_out, query, key, value, *options.values())
    return query.new_empty(sum(captured_sizes), dtype=torch.float64)


@_fake("plain_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    _refuse_meta(query, key, value)
    return _empty_like(query, query.shape[2], value.shape[3])


@_fake("plain_attention_forward")
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    _refuse_meta(query, key, value)
    out = _empty_like(query, query.shape[2], value.shape[3])
    statistics = query.new_empty((2, *query.shape[:3]), dtype=accumulation_dtype(query.dtype))
    return out, statistics, torch.empty_like(out) if query.dtype in SIXTEEN_BITS else None


@_fake("plain_attention_backward")
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    _refuse_meta(grad_out, query, key, value)
    return tuple(_empty_like(tensor, tensor.shape[2], tensor.shape[3]) for tensor in (query, key, value))


@_fake("attention_scores")
def _(query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor:
    _refuse_meta(query, key)
    return query.new_empty((*query.shape[:3], key.shape[2]))


@_fake("attention_scores_backward")
def _(
    grad_scores: Tensor, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = ""
) -> tuple[Tensor, Tensor]:
    _refuse_meta(grad_scores, query, key)
    return _empty_like(query, query.shape[2], query.shape[3]), _empty_like(key, key.shape[2], key.shape[3])


@_fake("masked_softmax")
def _(scores: Tensor, scale: float, **options: Any) -> Tensor:
    _refuse_meta(scores, *options.values())
    return scores.new_empty(scores.shape)


@_fake("masked_softmax_backward")
def _(grad_weights: Tensor, weights: Tensor, scale: float, *, kernel_name: str = "") -> Tensor:
    _refuse_meta(grad_weights, weights)
    return weights.new_empty(weights.shape)
