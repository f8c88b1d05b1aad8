"""Statistics of the softmax as their formulas in plain PyTorch operations, the judge of the kernels.

With s the scores of a row as the softmax takes them, p the weights before dropout, t the sink of the head,
and sums over the keys that a query sees::

    lse        = log(sum_j exp(s_j) + exp(t))
    max_scores = max_j s_j
    mean_score = sum_j p_j s_j
    entropy    = -sum_j p_j log p_j - p_t log p_t = lse - mean_score - p_t t
    key_weights_j = sum_i p_ij                     over the queries i of a head
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formula_steps import accumulation_dtype, final_scores, mask_of_sequence, numbers_of_sequence

__all__ = ["AuxOutput", "score_statistics", "varlen_score_statistics"]


class AuxOutput(NamedTuple):
    """What a call returns for :class:`selfattn_ext.AuxRequest`; None stands for what was not asked for.

    lse, max_scores, entropy and mean_score are (..., H, L), key_weights is (..., H, S); of packed sequences,
    they are (H, total_q) and (H, total_k). All are float32, or float64 for float64 inputs.

    Example:
        >>> import torch
        >>> from selfattn_ext import AuxRequest, scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> _, aux = scaled_dot_product_attention(query, key, value, return_aux=AuxRequest(entropy=True))
        >>> aux.entropy.shape, aux.lse
        (torch.Size([1, 2, 6]), None)
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None
    mean_score: Tensor | None = None
    key_weights: Tensor | None = None


def score_statistics(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    query_offset: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    score_function: Callable[[Tensor], Tensor] | None = None,
    visible: Tensor | None = None,
) -> AuxOutput:
    """All statistics of a call of :func:`selfattn_ext.reference.attention`, by the formulas of this module.

    Args:
        query: (..., H, L, E), any floating dtype; 2-D tensors are a single head.
        key: (..., Hk, S, E), where Hk divides H.
        attn_mask, scale, is_causal, window_size, query_offset, softcap, alibi_slopes, sinks: as that function
            takes them. Dropout comes after what is described here.
        compute_dtype, score_function, visible: likewise.

    Returns:
        Every field of :class:`AuxOutput`, in the dtype of the computation. A query that sees no key has
        entropy and mean_score 0 and max_scores -inf. max_scores has no gradient.

    Raises:
        RuntimeError: by torch's own operations, for shapes that do not fit, or without memory for the (L, S)
            matrices.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> query, key = torch.zeros(1, 4, 8), torch.randn(1, 4, 8)  # all scores are 0
        >>> reference.score_statistics(query, key, is_causal=True).entropy.exp()
        tensor([[1., 2., 3., 4.]])
    """
    if query.dim() == 2:
        result = score_statistics(
            query.unsqueeze(0),
            key.unsqueeze(0),
            attn_mask,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            query_offset=query_offset,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            compute_dtype=compute_dtype,
            score_function=score_function,
            visible=visible,
        )
        return AuxOutput(*(None if part is None else part.squeeze(0) for part in result))
    dtype = compute_dtype or accumulation_dtype(query.dtype)
    scores, _ = final_scores(
        query,
        key,
        attn_mask,
        dtype,
        scale=scale,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        score_function=score_function,
        visible=visible,
    )
    return _of_scores(scores, None if sinks is None else sinks.to(dtype))


def _of_scores(scores: Tensor, sinks: Tensor | None) -> AuxOutput:
    """The statistics of final scores (..., H, L, S), -inf where hidden."""
    fixed = scores.detach()
    largest = fixed.amax(-1) if scores.size(-1) else fixed.sum(-1) - torch.inf
    # Results do not depend on what is subtracted, so derivatives may treat it as a constant.
    top = largest if sinks is None else torch.maximum(largest, sinks.detach().unsqueeze(-1))
    top = torch.where(top == -torch.inf, 0.0, top)
    hidden = fixed == -torch.inf
    finite = torch.where(hidden, 0.0, scores)
    below = torch.where(hidden, 0.0, finite - top.unsqueeze(-1))
    exponentials = torch.where(hidden, 0.0, torch.exp(below))
    total = exponentials.sum(-1)
    sink = below_of_sink = torch.zeros_like(total)
    if sinks is not None:
        has_sink = (sinks.detach() != -torch.inf).unsqueeze(-1)
        below_of_sink = torch.where(has_sink, torch.where(has_sink, sinks.unsqueeze(-1), 0.0) - top, 0.0)
        sink = torch.where(has_sink, torch.exp(below_of_sink), 0.0)
        total = total + sink
    empty = total == 0
    divisor = torch.where(empty, 1.0, total)
    weights = exponentials / divisor.unsqueeze(-1)
    distance = (weights * below).sum(-1) + sink / divisor * below_of_sink
    return AuxOutput(
        lse=torch.where(empty, -torch.inf, top + torch.log(divisor)),
        max_scores=largest,
        entropy=torch.log(divisor) - distance,
        mean_score=(weights * finite).sum(-1),
        key_weights=weights.sum(-2),
    )


def varlen_score_statistics(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    attn_mask: Tensor | Sequence[Tensor] | None = None,
    *,
    query_offset: int | Tensor = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_function: Callable[[int, Tensor], Tensor] | None = None,
    visible: Callable[[int, int, int], Tensor] | None = None,
    **options: Any,
) -> AuxOutput:
    """:func:`score_statistics` of sequences that are packed end to end.

    Args:
        query, key: (total_q, H, E) and (total_k, Hk, E).
        cu_seqlens_q, cu_seqlens_k: (B + 1,): the first rows of the sequences, and the end of the last.
        attn_mask, query_offset, alibi_slopes, sinks, score_function, visible: as
            :func:`selfattn_ext.reference.varlen_attention` takes them.
        options: the other options of :func:`score_statistics`.

    Returns:
        key_weights (H, total_k), and all others (H, total_q). Rows of no sequence have lse and max_scores
        -inf, and 0 otherwise.

    Raises:
        RuntimeError: as :func:`score_statistics` does.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> query, key = torch.randn(2, 16, 4, 8).unbind()
        >>> starts = torch.tensor([0, 5, 16])
        >>> reference.varlen_score_statistics(query, key, starts, starts).key_weights.shape
        torch.Size([4, 16])
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch = len(starts_q) - 1
    offsets = query_offset.tolist() if isinstance(query_offset, Tensor) else [query_offset] * batch
    parts: list[list[Tensor]] = [[] for _ in AuxOutput._fields]
    for b in range(batch):
        q = query[starts_q[b] : starts_q[b + 1]].transpose(0, 1)
        k = key[starts_k[b] : starts_k[b + 1]].transpose(0, 1)
        result = score_statistics(
            q,
            k,
            mask_of_sequence(attn_mask, b, q.size(1), k.size(1)),
            query_offset=offsets[b],
            alibi_slopes=numbers_of_sequence(alibi_slopes, b),
            sinks=numbers_of_sequence(sinks, b),
            score_function=score_function and functools.partial(score_function, b),
            visible=None if visible is None else visible(b, q.size(1), k.size(1)),
            **options,
        )
        for part, found in zip(parts, result, strict=True):
            assert found is not None
            part.append(found)
    dtype = options.get("compute_dtype") or accumulation_dtype(query.dtype)
    heads = query.size(1)
    for name, part in zip(AuxOutput._fields, parts, strict=True):
        rows = key.size(0) - starts_k[-1] if name == "key_weights" else query.size(0) - starts_q[-1]
        nothing = -torch.inf if name in ("lse", "max_scores") else 0.0
        part.append(query.new_full((heads, rows), nothing, dtype=dtype))
    return AuxOutput(*(torch.cat(part, -1) for part in parts))
