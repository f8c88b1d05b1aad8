"""Scaled dot-product attention and its weights, as users call them.

The functions fill defaults, bring the arguments into the operators' form, call, and explain refusals.

Note [Refusals]
    A dozen checks in Python cost as much as a small attention. The operators check everything themselves, so
    the public functions call first. Only when something has refused the call, they look for the reason in
    :mod:`selfattn_ext.arguments.checks`, which says it in terms of the user's own arguments. Mistakes that
    the operators cannot see are checked beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .arguments import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    REFUSALS,
    AttentionCall,
    AttentionOptions,
    batch_invariance,
    call_checks,
    checks,
    forced_kernel,
    overrides,
    precision,
    prepare,
    rules,
    shapes,
    split_blocks,
)
from .attend import attend, with_gradients
from .autograd import CAUSAL, basic_attention
from .formula_steps import default_scale
from .varlen import jagged

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments.overloads import ForAny, ForAux, ForLse, ForOut, ForWeights, ForWeightsAndLse, Rules
    from .reference_statistics import AuxOutput

__all__ = ["attention_weights", "scaled_dot_product_attention"]

# Looked up once: an attribute chain costs as much as the call at its end.
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_is_overridden = torch.overrides.has_torch_function_variadic
_precision_for = precision.current_for
_FLOAT32 = torch.float32


# The overloads differ in their flags and in what a call returns.
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForOut],
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForWeights],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForLse],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForWeightsAndLse],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForAux],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    **options: Unpack[ForAny],
) -> Any: ...  # fmt: skip


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_weights: bool = False,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """Exact attention, ``softmax(scale * query @ key^T) @ value``, without holding the (L, S) matrix.

    The first eight arguments are those of :func:`torch.nn.functional.scaled_dot_product_attention`, in
    meaning and order. Every option combines with every other, forward and backward; memory beyond inputs and
    outputs is O(L + S) unless the weights are asked for. The definition, step by step, is
    :mod:`selfattn_ext.reference`.

    Args:
        query: (..., H, L, E), float64, float32, bfloat16 or float16. (L, E) and (H, L, E) are accepted, too,
            and jagged tensors of :mod:`torch.nested`, (B, H, j, E) or (B, j, E), if key and value are jagged
            as well: :func:`selfattn_ext.varlen_attention` computes them, and the result is jagged.
        key: (..., H, S, E), same dtype. Leading dimensions broadcast; one kv head serves all query heads.
        value: (..., H, S, Ev), same dtype; Ev may differ from E.
        attn_mask: broadcastable to (..., H, L, S). bool: True = attend. Any floating dtype: added to the
            scores, -inf hides; gets a gradient if it requires one. A
            :class:`torch.nn.attention.bias.CausalBias` is applied as the rule that it stands for. The mask
            combines with ``is_causal`` and the window.
        dropout_p: probability with which each weight is dropped. It applies whenever it is not 0, so pass 0
            in evaluation. The pattern follows from a seed that torch's default generator of the query's
            device draws (:func:`torch.manual_seed` sets all these generators). It does not depend on threads
            or kernels, and a CUDA graph draws a new seed at each replay.
        is_causal: query i sees keys ``j <= i + query_offset``.
        scale: factor of the scores, ``1 / sqrt(E)`` by default.
        enable_gqa: allows H query heads against Hk kv heads where Hk divides H (Ainslie et al. 2023).
        window_size: (left, right), query i sees keys from ``i + query_offset - left`` to
            ``i + query_offset + right``; -1 is unbounded.
        softcap: replaces scores s by ``softcap * tanh(s / softcap)``, before masks (Gemma 2); 0 is off.
        alibi_slopes: (H,) or (B, H), adds ``-slope * |i + query_offset - j|`` to the scores
            (Press et al. 2022); gets a gradient if it requires one.
        sinks: (H,) or (B, H), a logit per head that takes part in the softmax without a value
            (Xiao et al. 2024, as in gpt-oss); gets a gradient if it requires one.
        query_offset: position of query 0 among the keys. 0 is torch's causal alignment, S - L the lower-right
            one.
        return_weights: also return the weights (..., H, L, S), after dropout, in the query's dtype.
        return_lse: also return the log-sum-exp of the scores (..., H, L), sinks included, float64 for float64
            inputs, else float32.
        return_aux: an :class:`selfattn_ext.AuxRequest`, or that of torch's flex_attention: also return an
            :class:`selfattn_ext.AuxOutput` with the statistics that it asks for.

    Returns:
        out (..., H, L, Ev), or (out, weights), (out, lse), (out, weights, lse), with an AuxOutput at the end
        for return_aux. All are differentiable, any
        number of times, and in forward mode; (L, S) matrices are made for third derivatives, and for second
        ones and forward mode of weights. A query that sees no key has output 0, weights 0, lse -inf and
        gradient 0. A key that a query may not see has no influence on it, even if it holds NaN. out is
        contiguous in the query's order of dimensions.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    On CUDA neither a call nor its gradient waits for the GPU, so that a CUDA graph can record a training
    step. Two runs give the same bits on either device, gradients included. Where keys are hidden from
    queries, a third derivative checks whether the inputs are finite; it cannot do so while a graph records,
    and then takes memory for (L, S, E) products instead.

    Products of float32 numbers, those of gradients included, are as exact as
    :func:`torch.set_float32_matmul_precision` asks when the call is made: "highest" (the default) gives the
    accuracy of float32, "high" that of about two bfloat16 pieces per number, and "medium" that of bfloat16
    where this makes the processor faster.

    The definition is that of Vaswani et al. (2017), "Attention Is All You Need"; the computation follows
    Milakov and Gimelshein (2018), "Online normalizer calculation for softmax", and Dao (2023),
    "FlashAttention-2".

    Example:
        >>> import torch
        >>> from selfattn_ext import scaled_dot_product_attention
        >>> query = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> key, value = torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 96)
        >>> options = {"is_causal": True, "enable_gqa": True, "window_size": (32, -1), "softcap": 30.0}
        >>> out = scaled_dot_product_attention(query, key, value, dropout_p=0.1, **options)
        >>> out.shape
        torch.Size([2, 8, 128, 96])
        >>> out.sum().backward()
        >>> out, lse = scaled_dot_product_attention(query, key, value, return_lse=True, **options)
        >>> lse.shape, lse.dtype
        (torch.Size([2, 8, 128]), torch.float32)
    """
    # Dynamo does not see that jagged tensors override functions.
    may_override = _is_compiling() or _is_overridden(query, key, value, attn_mask, alibi_slopes, sinks)
    if not may_override:
        try:
            if (
                (attn_mask is None or not attn_mask.requires_grad)
                and alibi_slopes is None
                and sinks is None
                and dropout_p == 0.0
                and dropout_p is not False
                and return_weights is False
                and return_lse is False
                and return_aux is None
                and (is_causal is False or is_causal is True)
                and (enable_gqa is False or enable_gqa is True)
                and not _is_exporting()
                and query.dim() == 4
                and not _is_any_autocast_enabled()
                and not _are_transforms_active()
                and forward_ad._current_level < 0
            ):
                keywords: dict[str, Any] = {}
                if query_offset is not DEFAULT_QUERY_OFFSET:
                    keywords["query_offset"] = checks.integer("query_offset", query_offset)
                if window_size is not DEFAULT_WINDOW or softcap is not DEFAULT_SOFTCAP:
                    keywords |= rules(window_size, softcap)
                if forced_kernel.forcing and (kernel := forced_kernel.current()):
                    keywords["kernel_name"] = kernel
                if batch_invariance.asked:
                    keywords["batch_invariant"] = True
                factor = None if scale is None else checks.scale(scale)
                if query.dtype is _FLOAT32 and (asked := _precision_for(query)) != "highest":
                    keywords["float32_precision"] = asked
                needs_grad = _is_grad_enabled() and (
                    query.requires_grad or key.requires_grad or value.requires_grad
                )
                if not keywords:
                    if attn_mask is None and factor is None and not enable_gqa:
                        if not needs_grad:
                            compute = ops.causal_attention if is_causal else ops.basic_attention
                            return compute(query, key, value)
                        if is_causal:
                            return basic_attention(query, key, value, CAUSAL)
                        return basic_attention(query, key, value)
                    if needs_grad:
                        rest = (attn_mask, factor, is_causal, enable_gqa)
                        return basic_attention(query, key, value, rest)
                    return ops.masked_attention(query, key, value, attn_mask, factor, is_causal, enable_gqa)
                if attn_mask is None:
                    factor = default_scale(query.size(3)) if factor is None else factor
                    if is_causal:
                        keywords["is_causal"] = True
                    if not enable_gqa and query.size(1) != key.size(1) != 1:
                        raise ValueError("heads that do not go together")
                    if needs_grad:
                        return basic_attention(query, key, value, (None, factor, is_causal), keywords)
                    return ops.direct_forward(query, key, value, factor, **keywords)[0]
        except REFUSALS:
            # Something must be broadcast or made dense, or is a mistake: the general way finds out which.
            pass

    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse, return_aux,
    )  # fmt: skip
    call = AttentionCall(query, key, value, options)
    if may_override:
        if _is_compiling() and split_blocks.any_open():
            return split_blocks.eagerly(scaled_dot_product_attention, query, key, value, **options._asdict())
        relevant = overrides.overriding_arguments(query, key, value, attn_mask, alibi_slopes, sinks)
        if relevant:
            return overrides.call(scaled_dot_product_attention, relevant, call)
        if checks.is_jagged(query) or checks.is_jagged(key) or checks.is_jagged(value):
            return jagged.attention(call)
    return attend(call, _computed, call_checks.attention)


def _computed(call: AttentionCall) -> shapes.Results:
    return with_gradients(prepare(call), call.options)


@overload
def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    return_lse: Literal[False] = ..., **options: Unpack[Rules],
) -> Tensor: ...  # fmt: skip
@overload
def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    return_lse: Literal[True], **options: Unpack[Rules],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, query_offset: int = ...,
    return_lse: bool = ..., **options: Unpack[Rules],
) -> Any: ...  # fmt: skip


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_lse: bool = False,
) -> Any:
    """The softmax weights (..., H, L, S) of :func:`scaled_dot_product_attention`, which needs no value here.

    Args:
        query: (..., H, L, E), float64, float32, bfloat16 or float16. (L, E) and (H, L, E) are accepted, too.
        key: (..., H, S, E), same dtype; its heads are the kv heads.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as in :func:`scaled_dot_product_attention`.
        window_size, softcap, alibi_slopes, sinks, query_offset: as in :func:`scaled_dot_product_attention`.
        return_lse: also return the log-sum-exp of the scores (..., H, L).

    Returns:
        weights in the query's dtype, after dropout; with ``return_lse`` also the log-sum-exp (..., H, L).
        Both are differentiable. A row that sees no key is 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    Example:
        >>> import torch
        >>> from selfattn_ext import attention_weights
        >>> query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
        >>> weights = attention_weights(query, key, is_causal=True)
        >>> weights.shape, bool((weights.triu(1) == 0).all())
        (torch.Size([1, 4, 6, 6]), True)
    """
    split_blocks.refuse("attention_weights")
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, True, return_lse,
    )  # fmt: skip
    call = AttentionCall(query, key, key, options)
    tensors = (query, key, attn_mask, alibi_slopes, sinks)
    if _is_overridden(*tensors) and (relevant := overrides.overriding_arguments(*tensors)):
        return overrides.call(attention_weights, relevant, call)
    if checks.is_jagged(key):
        value = jagged.without_columns(key)
    elif isinstance(key, Tensor) and key.dim() >= 2:
        value = key[..., :0]
    else:
        call_checks.scores(query, key)
        value = key
    call = AttentionCall(query, key, value, options)
    if checks.is_jagged(query) or checks.is_jagged(key):
        results = jagged.attention(call)
    else:
        results = attend(call, _computed, call_checks.attention)
    return results[1:] if return_lse else results[1]
