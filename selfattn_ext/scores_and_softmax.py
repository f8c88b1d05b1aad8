"""The two halves of attention for users: the scores, and the softmax of given scores.

Both functions call the operators and explain refusals as :mod:`selfattn_ext.functional` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import (
    DEFAULT_QUERY_OFFSET,
    REFUSALS,
    Keywords,
    autocast,
    call_checks,
    checks,
    explained,
    forced_kernel,
    overrides,
    shapes,
    split_blocks,
)
from .autograd import attention_scores_with_gradient, masked_softmax_with_gradient
from .formula_steps import default_scale

__all__ = ["attention_scores", "masked_softmax"]

_is_overridden = torch.overrides.has_torch_function_variadic
_hand_over = torch.overrides.handle_torch_function


def attention_scores(
    query: Tensor, key: Tensor, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """The scaled dot products ``scale * query @ key^T``, before any mask or softmax.

    Args:
        query: (..., H, L, E), float64, float32, bfloat16 or float16. (L, E) and (H, L, E) are accepted, too.
        key: (..., H, S, E), same dtype; leading dimensions broadcast.
        scale: ``1 / sqrt(E)`` by default (Vaswani et al. 2017), which brings the variance of the scores of
            independent unit-variance vectors back to 1.
        enable_gqa: allows H query heads against Hk key heads where Hk divides H.

    Returns:
        (..., H, L, S), contiguous, in the query's dtype; differentiable any number of times.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    Example:
        >>> import torch
        >>> from selfattn_ext import attention_scores
        >>> query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 9, 16)
        >>> scores = attention_scores(query, key)
        >>> torch.allclose(scores, query @ key.mT / 4, atol=1e-5)
        True
    """
    split_blocks.refuse("attention_scores")
    if _is_overridden(query, key) and (relevant := overrides.overriding_arguments(query, key)):
        return _hand_over(attention_scores, relevant, query, key, scale, enable_gqa)
    try:
        checks.flags(enable_gqa=enable_gqa)
        q, k = autocast(query, key)
        form = shapes.canonical(q, k, k, enable_gqa)
        factor = default_scale(form.query.size(3)) if scale is None else checks.scale(scale)
        scores = attention_scores_with_gradient(form.query, form.key, factor, forced_kernel.current())
    except REFUSALS as refusal:
        raise explained(refusal, query, call_checks.scores, query, key, scale, enable_gqa) from None
    return shapes.with_lead(scores, form)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
    query_offset: int = DEFAULT_QUERY_OFFSET,
) -> Tensor:
    """Softmax over the last dimension of ``scale * scores + mask``, in one pass over memory.

    The step between the two products of attention (Vaswani et al. 2017, section 3.2.1), on scores that are
    given.

    Args:
        scores: (..., L, S), float64, float32, bfloat16 or float16.
        mask: broadcastable to scores. bool: True = keep. Any floating dtype: added, -inf hides; gets a
            gradient if it requires one.
        scale: factor of the scores.
        is_causal: row i keeps columns ``j <= i + query_offset``.
        query_offset: position of row 0 among the columns.

    Returns:
        Weights of the shape and dtype of scores, contiguous; differentiable any number of times. A hidden
        entry is 0 and has no influence even if it is NaN; a row of hidden entries is 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    Example:
        >>> import torch
        >>> from selfattn_ext import masked_softmax
        >>> masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
        >>> masked_softmax(torch.zeros(1, 2), torch.tensor([False, False]))  # torch.softmax gives NaN
        tensor([[0., 0.]])
    """
    split_blocks.refuse("masked_softmax")
    if _is_overridden(scores, mask) and (relevant := overrides.overriding_arguments(scores, mask)):
        return _hand_over(
            masked_softmax, relevant, scores, mask, scale=scale, is_causal=is_causal,
            query_offset=query_offset,
        )  # fmt: skip
    try:
        if scores.dim() < 2:
            raise ValueError("scores of less than two dimensions")
        lead = tuple(scores.shape[:-3]) or (1,)
        flat = shapes.four_dimensional(scores, lead)
        keywords: Keywords = {}
        checks.flags(is_causal=is_causal)
        if is_causal:
            keywords["is_causal"] = True
        if query_offset is not DEFAULT_QUERY_OFFSET:
            keywords["query_offset"] = checks.integer("query_offset", query_offset)
        if kernel := forced_kernel.current():
            keywords["kernel_name"] = kernel
        form = shapes.Canonical(flat, flat, flat, lead, scores.dim())
        bias = None
        if mask is not None:
            if checks.is_causal_bias(mask):
                raise TypeError(
                    "mask is a CausalBias, which only scaled_dot_product_attention accepts; pass "
                    "is_causal=True instead"
                )
            bias = shapes.mask_four_dimensional(checks.mask("mask", mask), form)
        weights = masked_softmax_with_gradient(flat, bias, checks.scale(scale), keywords)
    except REFUSALS as refusal:
        raise explained(
            refusal, scores, call_checks.softmax, scores, mask, scale, is_causal, query_offset
        ) from None
    return shapes.with_lead(weights, form)
