"""Checks of all arguments of a call, made only after an operator has refused it.

See Note [Refusals] in :mod:`selfattn_ext.functional`. Each function raises for the first mistake that it
finds and returns None if it finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import checks, shapes
from .call import AttentionCall, AttentionOptions

__all__ = ["attention", "flags", "options", "scores", "softmax"]


def _mask_of(name: str, value: Any, tensor: Tensor, full: Sequence[int], first: str) -> None:
    if checks.is_causal_bias(value):
        if (value.seq_len_q, value.seq_len_kv) != tuple(full[-2:]):
            raise ValueError(
                f"{name} is a CausalBias for {value.seq_len_q} queries and {value.seq_len_kv} keys, but "
                f"there are {full[-2]} queries and {full[-1]} keys"
            )
        return
    checks.mask(name, value)
    checks.dense_tensor(name, value)
    checks.on_device(name, value, first, tensor.device)
    checks.broadcasts(name, value.shape, full, "the shape of the scores")


def _head_numbers(name: str, value: Any, tensor: Tensor, full: Sequence[int]) -> None:
    if value is None:
        return
    checks.float_dtype(name, checks.dense_tensor(name, value).dtype)
    checks.on_device(name, value, "query", tensor.device)
    checks.broadcasts(name, value.shape, full, "one number per head")


def _form(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> shapes.Canonical:
    """Returns the three in the operators' form, only for looking at their shapes."""
    try:
        return shapes.canonical(query.detach(), key.detach(), value.detach(), enable_gqa, dense=False)
    except RuntimeError:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} broadcast to "
            "more elements than memory can address"
        ) from None


def _result_lead(form: shapes.Canonical) -> tuple[int, ...]:
    """Returns the dimensions of the scores before L and S, as the user counts them."""
    if form.rank == 2:
        return ()
    heads = (form.query.size(1),)
    return heads if form.rank == 3 else (*form.lead, *heads)


def flags(given: AttentionOptions) -> None:
    """Checks that each flag of a call is True or False."""
    checks.flags(
        is_causal=given.is_causal,
        enable_gqa=given.enable_gqa,
        return_weights=given.return_weights,
        return_lse=given.return_lse,
    )


def attention(call: AttentionCall) -> None:
    """Checks every argument of :func:`selfattn_ext.scaled_dot_product_attention`."""
    query, key, value, given = call
    tensors = {"query": query, "key": key, "value": value}
    checks.floats(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, (..., length, head dim), got {tuple(tensor.shape)}"
            )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            f"query and key must have the same last dimension (head dim), but query is {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if key.size(-2) != value.size(-2):
        raise ValueError(
            "key and value must have the same length (second dimension from the end), but key is "
            f"{tuple(key.shape)} and value {tuple(value.shape)}"
        )
    checks.flags(
        enable_gqa=given.enable_gqa, return_weights=given.return_weights, return_lse=given.return_lse
    )
    lead = _result_lead(_form(query, key, value, given.enable_gqa))
    scores = (*lead, query.size(-2), key.size(-2))
    checks.fits("the output", (*scores[:-1], value.size(-1)))
    checks.fits("the scores", scores[-2:])
    if given.return_weights:
        checks.fits("the weights", scores)
    checks.integer("query_offset", given.query_offset)
    options(query, scores, given, lead or (1,))


def options(query: Tensor, scores: Sequence[int], given: AttentionOptions, heads: Sequence[int]) -> None:
    """Checks the options that every attention has, for scores and numbers per head of these shapes."""
    checks.probability("dropout_p", given.dropout_p)
    checks.flags(is_causal=given.is_causal)
    if given.scale is not None:
        checks.scale(given.scale, query.dtype)
    checks.window(given.window_size)
    checks.softcap(given.softcap)
    if given.attn_mask is not None:
        _mask_of("attn_mask", given.attn_mask, query, scores, "query")
    _head_numbers("alibi_slopes", given.alibi_slopes, query, heads)
    _head_numbers("sinks", given.sinks, query, heads)


def scores(query: Any, key: Any, scale: Any = None, enable_gqa: Any = False) -> None:
    """Checks every argument of :func:`selfattn_ext.attention_scores`."""
    checks.floats({"query": query, "key": key})
    attention(AttentionCall(query, key, key, AttentionOptions(scale=scale, enable_gqa=enable_gqa)))
    form = _form(query, key, key, enable_gqa)
    checks.fits("the scores", (*_result_lead(form), query.size(-2), key.size(-2)))


def softmax(scores: Any, mask: Any, scale: Any, is_causal: Any, query_offset: Any) -> None:
    """Checks every argument of :func:`selfattn_ext.masked_softmax`."""
    checks.floats({"scores": scores})
    if scores.dim() < 2:
        raise ValueError(f"scores must have at least 2 dimensions, (..., L, S), got {tuple(scores.shape)}")
    checks.fits("the weights", scores.shape)
    checks.scale(scale, scores.dtype)
    checks.flags(is_causal=is_causal)
    checks.integer("query_offset", query_offset)
    if mask is not None:
        _mask_of("mask", mask, scores, tuple(scores.shape), "scores")
