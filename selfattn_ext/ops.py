"""The operators of the compiled library, one typed name per operator, and their fake kernels.

All tensors are four-dimensional here; :mod:`selfattn_ext.functional` brings user input into that form. The
names are the dispatcher's own callables, so that a call costs nothing on top. They know no gradients and no
vmap: those are in :mod:`selfattn_ext.autograd.attention`.

The fake kernels give shapes, dtypes and strides without data, for torch.compile, torch.export and
FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import library, signatures
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
    "basic_attention",
    "basic_attention_backward",
    "basic_attention_forward",
    "masked_softmax",
    "masked_softmax_backward",
]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

#: The dtypes whose rounding is worth remembering.
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_ops = library.ops()

#: The dispatcher namespace of the operators: torch.ops.<NAMESPACE>.
NAMESPACE: str = _ops.name

attention_forward: signatures.AttentionForward = _ops.attention_forward.default
attention_refusals: signatures.AttentionRefusals = _ops.attention_refusals.default
attention_weights: signatures.AttentionWeights = _ops.attention_weights.default
append_to_cache: signatures.AppendToCache = _ops.append_to_cache.default
attention_with_cache: signatures.AttentionWithCache = _ops.attention_with_cache.default
attention_backward: signatures.AttentionBackward = _ops.attention_backward.default
attention_jvp: signatures.AttentionJvp = _ops.attention_jvp.default
attention_backward_backward: signatures.AttentionBackwardBackward = _ops.attention_backward_backward.default
attention_captured_gradients: signatures.AttentionCapturedGradients = (
    _ops.attention_captured_gradients.default
)
attention_scores: signatures.AttentionScores = _ops.attention_scores.default
attention_scores_backward: signatures.AttentionScoresBackward = _ops.attention_scores_backward.default
masked_softmax: signatures.MaskedSoftmax = _ops.masked_softmax.default
masked_softmax_backward: signatures.MaskedSoftmaxBackward = _ops.masked_softmax_backward.default


def _direct(overload: Any) -> Any:
    """The callable inside an overload, which costs less. torch.compile traces overloads only."""
    return getattr(overload, "_op", overload)


direct_forward: signatures.AttentionForward = _direct(attention_forward)
direct_with_cache: signatures.AttentionWithCache = _direct(attention_with_cache)
direct_backward: signatures.AttentionBackward = _direct(attention_backward)
basic_attention: signatures.BasicAttention = _direct(_ops.basic_attention.default)
basic_attention_forward: signatures.BasicAttentionForward = _direct(_ops.basic_attention_forward.default)
basic_attention_backward: signatures.BasicAttentionBackward = _direct(_ops.basic_attention_backward.default)


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
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    batch, heads, rows, _ = layout.shape
    # Where sizes depend on data, an answer that is wrong for one head or one row changes no place in memory.
    several = guard_or_true(heads > 1) and guard_or_true(rows > 1) and guard_or_true(layout.stride(1) != 0)
    if several and guard_or_false(layout.stride(1) < layout.stride(2)):
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


@_fake("basic_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    _refuse_meta(query, key, value)
    return _empty_like(query, query.shape[2], value.shape[3])


@_fake("basic_attention_forward")
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    _refuse_meta(query, key, value)
    out = _empty_like(query, query.shape[2], value.shape[3])
    statistics = query.new_empty((2, *query.shape[:3]), dtype=accumulation_dtype(query.dtype))
    return out, statistics, torch.empty_like(out) if query.dtype in SIXTEEN_BITS else None


@_fake("basic_attention_backward")
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
