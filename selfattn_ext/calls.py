"""The operators of attention as autograd calls them: with tensors that may be missing, and torch's errors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import checks, ops
from .arguments import Maybe, Options, keywords_of

__all__ = ["backward", "contiguous", "forward"]


def contiguous(tensor: Maybe) -> Maybe:
    """The same numbers, dense."""
    return None if tensor is None else tensor.contiguous()


def backward(
    grad_out: Tensor,
    grad_weights: Maybe,
    grad_lse: Maybe,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Maybe,
    slopes: Maybe,
    sinks: Maybe,
    seed: Maybe,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    residual: Maybe,
    weights: Maybe,
    scale: float,
    options: Options,
    need_mask_grad: bool,
) -> tuple[Tensor, ...]:
    """The six gradients of the operator; see Note [Gradient of weights and lse] in autograd.py."""
    try:
        keywords = keywords_of(options, mask, slopes, sinks, seed)
        if residual is not None or grad_weights is not None or grad_lse is not None or need_mask_grad:
            keywords = dict(keywords)
            if residual is not None:
                keywords["out_residual"] = residual
            grad_row = None
            if grad_weights is not None:
                if weights is None or query.dtype in ops.SIXTEEN_BITS:
                    shared = keywords_of(options, mask, slopes, sinks, seed)
                    weights = ops.attention_weights(
                        query.float(), key.float(), row_max, row_sum, scale, **shared
                    )
                keywords["grad_weights"] = grad_weights
                grad_row = (weights * grad_weights.to(weights.dtype)).sum(-1)
            if grad_lse is not None:
                grad_row = grad_lse.neg() if grad_row is None else grad_row - grad_lse
            if grad_row is not None:
                keywords["grad_row"] = grad_row
            if need_mask_grad:
                keywords["need_mask_grad"] = True
        return ops.attention_backward(grad_out, query, key, value, out, row_max, row_sum, scale, **keywords)
    except MemoryError as error:
        raise checks.out_of_memory(error, query) from None


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: Any, keywords: Options
) -> tuple[Tensor, Tensor, Tensor, Maybe]:
    """out, row_max, row_sum and, where the dtype has one, out_residual, for a backward to come."""
    if query.dtype in ops.SIXTEEN_BITS:
        return ops.attention_forward(query, key, value, scale, need_residual=True, **keywords)
    return *ops.attention_forward(query, key, value, scale, **keywords)[:3], None
