"""Attention as its formula in plain PyTorch operations, the judge of every kernel.

The functions here hold the whole (L, S) matrix, accept any floating dtype (16-bit inputs are computed in
float32 and rounded once, at the end) and may be differentiated any number of times, in reverse and forward
mode, also under torch.func. Tests, benchmarks, documentation and :mod:`selfattn_ext.autograd.by_formula`, for
third derivatives, use them.

The formula, after Vaswani et al. (2017), with every option of the package in its order::

    s_ij = scale * <q_i, k_j>
    s_ij = softcap * tanh(s_ij / softcap)                  where softcap > 0       (Gemma 2, 2024)
    s_ij = s_ij - slope * |i + query_offset - j|           with ALiBi slopes       (Press et al. 2022)
    s_ij = score_function(s)_ij                            with a function         (Dong et al. 2024)
    s_ij = s_ij + attn_mask_ij                             with a float mask
    s_ij = -inf                                            where i may not see j
    p_ij = exp(s_ij - m_i) / (sum_j exp(s_ij - m_i) + exp(sink - m_i)),  m_i = max(s_i*, sink)
    w_ij = p_ij * kept_ij / (1 - dropout_p)
    out_i = sum_j w_ij v_j,    lse_i = m_i + log(sum_j exp(s_ij - m_i) + exp(sink - m_i))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dropout_pattern import dropout_keep, philox4x32
from .formula_steps import (
    accumulation_dtype,
    both,
    default_scale,
    dropout,
    final_scores,
    mask_of_sequence,
    mix_visible,
    numbers_of_sequence,
    product,
    repeat_heads,
    softmax_with_lse,
    split_mask,
)
from .masks import visible_pairs
from .reference_statistics import score_statistics, varlen_score_statistics

__all__ = [
    "AttentionResult",
    "accumulation_dtype",
    "attention",
    "attention_scores",
    "dropout_keep",
    "masked_softmax",
    "philox4x32",
    "score_statistics",
    "varlen_attention",
    "varlen_score_statistics",
]


class AttentionResult(NamedTuple):
    """The results of :func:`attention`: out (..., L, Ev), weights (..., L, S), lse (..., L).

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> reference.attention(*torch.randn(3, 1, 2, 6, 8).unbind()).weights.shape
        torch.Size([1, 2, 6, 6])
    """

    out: Tensor
    weights: Tensor
    lse: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    query_offset: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    first_batch: int = 0,
    score_function: Callable[[Tensor], Tensor] | None = None,
    visible: Tensor | None = None,
) -> AttentionResult:
    """Exact attention by the formula of this module.

    Args:
        query: (..., H, L, E), any floating dtype; 2-D tensors are a single head.
        key: (..., Hk, S, E), where Hk divides H: query head h reads kv head ``h // (H // Hk)``.
        value: (..., Hk, S, Ev).
        attn_mask: broadcastable to (..., H, L, S), bool (True = attend) or float.
        scale, is_causal, window_size, query_offset, softcap: as
            :func:`selfattn_ext.scaled_dot_product_attention` takes them.
        alibi_slopes, sinks: broadcastable to (..., H).
        dropout_p: probability with which each weight is dropped.
        dropout_seed: int64, one element, or five as :func:`dropout_keep` takes them; needed with dropout_p.
        compute_dtype: replaces the accumulation dtype, to see what a formula written without care for 16-bit
            inputs would give.
        first_batch: the number that dropout counts the first batch element as.
        score_function: is given all scores (..., H, L, S) and returns others.
        visible: bool, broadcastable to (..., H, L, S): hides keys besides attn_mask.

    Returns:
        out and weights in the query's dtype, lse in that of the computation.

    Raises:
        RuntimeError: by torch's own operations, for shapes that do not fit, or without memory for the (L, S)
            matrices. Arguments are not checked otherwise.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference, scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind()
        >>> out, weights, lse = reference.attention(query, key, value, is_causal=True)
        >>> torch.allclose(out, scaled_dot_product_attention(query, key, value, is_causal=True))
        True
    """
    if query.dim() == 2:
        result = attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            query_offset=query_offset,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            compute_dtype=compute_dtype,
            first_batch=first_batch,
            score_function=score_function,
            visible=visible,
        )
        return AttentionResult(*(part.squeeze(0) for part in result))

    dtype = compute_dtype or accumulation_dtype(query.dtype)
    v = repeat_heads(value.to(dtype), query.size(-3))
    scores, apart = final_scores(
        query,
        key,
        attn_mask,
        dtype,
        v,
        scale=scale,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        score_function=score_function,
        visible=visible,
    )
    weights, lse = softmax_with_lse(scores, None if sinks is None else sinks.to(dtype))
    if dropout_p:
        assert dropout_seed is not None, "dropout_p > 0 needs a dropout_seed"
        weights = dropout(weights, dropout_p, dropout_seed, first_batch)
    out = product(weights, v) if apart is None else mix_visible(weights, v, apart)
    return AttentionResult(out.to(query.dtype), weights.to(query.dtype), lse)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | Sequence[Tensor] | None = None,
    *,
    query_offset: int | Tensor = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_function: Callable[[int, Tensor], Tensor] | None = None,
    visible: Callable[[int, int, int], Tensor] | None = None,
    **options: Any,
) -> AttentionResult:
    """:func:`attention` of sequences that are packed end to end, one after the other.

    Args:
        query, key, value: (total_q, H, E), (total_k, Hk, E) and (total_k, Hk, Ev).
        cu_seqlens_q, cu_seqlens_k: (B + 1,): sequence b has the rows from ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``.
        max_seqlen_q, max_seqlen_k: the sizes of weights, at least the longest lengths.
        attn_mask: broadcastable to (B, H, max_seqlen_q, max_seqlen_k), or a mask for each sequence.
        query_offset: an int or (B,).
        alibi_slopes, sinks: (H,) or (B | 1, H).
        score_function: is given the number of a sequence and its scores (H, L, S), and returns others.
        visible: is given the number of a sequence, L and S, and returns a bool mask of it.
        options: the other options of :func:`attention`.

    Returns:
        out (total_q, H, Ev), weights (B, H, max_seqlen_q, max_seqlen_k) and lse (H, total_q); rows of no
        sequence have output 0 and lse -inf.

    Raises:
        RuntimeError: as :func:`attention` does.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> query, key, value = torch.randn(3, 16, 4, 8).unbind()  # (tokens, heads, head dim)
        >>> starts = torch.tensor([0, 5, 16])
        >>> out, weights, lse = reference.varlen_attention(query, key, value, starts, starts, 11, 11)
        >>> out.shape, weights.shape, lse.shape
        (torch.Size([16, 4, 8]), torch.Size([2, 4, 11, 11]), torch.Size([4, 16]))
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch = len(starts_q) - 1
    offsets = query_offset.tolist() if isinstance(query_offset, Tensor) else [query_offset] * batch
    outs, lses, weights = [], [], []
    for b in range(batch):
        q = query[starts_q[b] : starts_q[b + 1]].transpose(0, 1)
        k, v = (part[starts_k[b] : starts_k[b + 1]].transpose(0, 1) for part in (key, value))
        result = attention(
            q,
            k,
            v,
            mask_of_sequence(attn_mask, b, q.size(1), k.size(1)),
            query_offset=offsets[b],
            alibi_slopes=numbers_of_sequence(alibi_slopes, b),
            sinks=numbers_of_sequence(sinks, b),
            first_batch=b,
            score_function=score_function and functools.partial(score_function, b),
            visible=None if visible is None else visible(b, q.size(1), k.size(1)),
            **options,
        )
        outs.append(result.out.transpose(0, 1))
        lses.append(result.lse)
        missing = (0, max_seqlen_k - k.size(1), 0, max_seqlen_q - q.size(1))
        weights.append(torch.nn.functional.pad(result.weights, missing))
    rest = query.size(0) - starts_q[-1]
    lse_dtype = options.get("compute_dtype") or accumulation_dtype(query.dtype)
    outs.append(query.new_zeros(rest, query.size(1), value.size(2)))
    lses.append(query.new_full((query.size(1), rest), -torch.inf, dtype=lse_dtype))
    empty = query.new_zeros(0, query.size(1), max_seqlen_q, max_seqlen_k)
    return AttentionResult(torch.cat(outs), torch.stack(weights) if weights else empty, torch.cat(lses, -1))


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """``scale * query @ key^T``.

    Args:
        query, key: (..., H, L, E) and (..., Hk, S, E), with grouped heads as in :func:`attention`.
        scale: the factor, ``1 / sqrt(E)`` by default.

    Returns:
        The scores (..., H, L, S) in the query's dtype.

    Raises:
        RuntimeError: by torch's own operations, for shapes that do not fit.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> reference.attention_scores(torch.ones(1, 2, 4), torch.ones(1, 3, 4), scale=0.25)
        tensor([[[1., 1., 1.],
                 [1., 1., 1.]]])
    """
    dtype = accumulation_dtype(query.dtype)
    k = key.to(dtype) if query.dim() == 2 else repeat_heads(key.to(dtype), query.size(-3))
    factor = default_scale(query.size(-1)) if scale is None else scale
    return (factor * product(query.to(dtype), k.mT)).to(query.dtype)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
    query_offset: int = 0,
) -> Tensor:
    """Softmax over the last dimension of ``scale * scores + mask``; hidden entries and rows of hidden entries
    are 0.

    Args:
        scores: (..., L, S), any floating dtype.
        mask: broadcastable to scores, bool (True = keep) or float (-inf hides).
        scale: a factor of the scores.
        is_causal, query_offset: as :func:`attention` takes them.

    Returns:
        The weights, in the shape and dtype of scores.

    Raises:
        RuntimeError: by torch's own operations, for shapes that do not fit.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> reference.masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    dtype = accumulation_dtype(scores.dtype)
    seen = visible_pairs(
        scores.size(-2), scores.size(-1), is_causal=is_causal, query_offset=query_offset, device=scores.device
    )
    shown, bias = split_mask(mask, dtype)
    seen = both(seen, shown)
    logits = scores.to(dtype) * scale
    if bias is not None:
        logits = logits + bias
    if seen is not None:
        logits = torch.where(seen, logits, -torch.inf)
    weights, _ = softmax_with_lse(logits, None)
    return weights.to(scores.dtype)
