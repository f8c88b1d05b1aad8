"""Calls of the attention operators for autograd: tensors may be missing, errors are torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops
from ..arguments import Keywords, OptionalTensor, Tensors, keywords_of, refusals
from ..arguments.shapes import dense_rows

__all__ = [
    "Cotangents",
    "Saved",
    "backward",
    "backward_backward",
    "backward_keywords",
    "dense",
    "forward",
    "is_differentiated",
    "jvp",
    "saved_tensors",
]

# Looked up once: an attribute chain costs as much as the call at its end.
_is_grad_enabled = torch.is_grad_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active

_KEPT = (
    "Attention keeps query, key, value and its output for the gradients, as torch's fused kernels do and "
    "torch's formula (the math backend) does not: change a copy, with out = out + 1 instead of out.add_(1)"
)

#: The gradients of out, weights and lse.
Cotangents = tuple[Tensor, OptionalTensor, OptionalTensor]
#: The results that a forward saves for its backward: out, row_max, row_sum, out_residual, weights.
Saved = tuple[Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor]


def dense(tensors: Tensors) -> Tensors:
    """Returns the same numbers in layouts that the operators accept, as torch.func passes on any layout."""
    query, key, value, mask, slopes, sinks, seed = tensors
    return Tensors(
        dense_rows(query),
        dense_rows(key),
        dense_rows(value),
        mask.contiguous() if mask is not None and mask.dim() == 1 else mask,  # masks of sequences
        None if slopes is None else slopes.contiguous(),
        None if sinks is None else sinks.contiguous(),
        seed,
    )


def is_differentiated() -> bool:
    """Tells whether a gradient that is computed now may itself be differentiated, in either mode."""
    return _is_grad_enabled() or _are_transforms_active() or forward_ad._current_level >= 0


def saved_tensors(ctx: Any) -> Any:
    """Returns the tensors that the forward of attention saved.

    Raises:
        RuntimeError: one of them has been changed in place; the message says what to do.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(f"{error}\n{_KEPT}") from None


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, merged: Keywords, want_weights: bool = False
) -> tuple[Tensor, Tensor, Tensor, OptionalTensor]:
    """Returns out, row_max, row_sum and, if the dtype has one, out_residual, for a backward to come."""
    if want_weights:
        merged = {**merged, "need_weights": True}
    if query.dtype in ops.SIXTEEN_BITS:
        return ops.attention_forward(query, key, value, scale, need_residual=True, **merged)
    return *ops.attention_forward(query, key, value, scale, **merged)[:3], None


def backward(
    cotangents: Cotangents,
    tensors: Tensors,
    saved: Saved,
    scale: float,
    keywords: Keywords,
    need_mask_grad: bool,
) -> tuple[Tensor, ...]:
    """Returns the six gradients of the operator.

    Note [Gradient of weights and lse] in attention_function.py has the formula.
    """
    query, key, value = tensors[:3]
    out, row_max, row_sum = saved[:3]
    try:
        merged = backward_keywords(cotangents, tensors, saved, scale, keywords)
        if need_mask_grad:
            merged = {**merged, "need_mask_grad": True}
        return ops.attention_backward(
            cotangents[0], query, key, value, out, row_max, row_sum, scale, **merged
        )
    except MemoryError as error:
        raise refusals.out_of_memory(error, query) from None


def backward_backward(
    cotangents: Cotangents,
    tensors: Tensors,
    saved: Saved,
    tangents: Keywords,
    scale: float,
    keywords: Keywords,
    need_mask_grad: bool,
) -> tuple[Tensor, ...]:
    """Returns the six second derivatives along ``tangents``, tangent_out and tangent_lse."""
    query, key, value = tensors[:3]
    out, row_max, row_sum = saved[:3]
    try:
        merged = backward_keywords(cotangents, tensors, saved, scale, keywords) | tangents
        return ops.attention_backward_backward(
            cotangents[0], query, key, value, out, row_max, row_sum, scale,
            need_mask_grad=need_mask_grad, **merged,
        )  # fmt: skip
    except MemoryError as error:
        raise refusals.out_of_memory(error, query) from None


def jvp(
    tensors: Tensors, tangents: Keywords, scale: float, keywords: Keywords
) -> tuple[Tensor, Tensor, Tensor, OptionalTensor, Tensor, Tensor]:
    """Returns the results of :func:`forward`, tangent_out and tangent_lse."""
    query, key, value = tensors[:3]
    rounds = query.dtype in ops.SIXTEEN_BITS
    merged = keywords_of(tensors, keywords) | tangents
    if rounds:
        merged["need_residual"] = True
    out, row_max, row_sum, residual, *tangents_of = ops.attention_jvp(query, key, value, scale, **merged)
    return out, row_max, row_sum, residual if rounds else None, tangents_of[0], tangents_of[1]


def backward_keywords(
    cotangents: Cotangents, tensors: Tensors, saved: Saved, scale: float, keywords: Keywords
) -> Keywords:
    """Returns the keyword arguments that the operators of the backward share."""
    _, grad_weights, grad_lse = cotangents
    query, key = tensors[:2]
    _, row_max, row_sum, residual, weights = saved
    merged = shared = keywords_of(tensors, keywords)
    if residual is None and grad_weights is None and grad_lse is None:
        return merged
    merged = dict(shared)
    if residual is not None:
        merged["out_residual"] = residual
    grad_row = None
    if grad_weights is not None:
        if weights is None or query.dtype in ops.SIXTEEN_BITS:
            weights = ops.attention_weights(query.float(), key.float(), row_max, row_sum, scale, **shared)
        merged["grad_weights"] = grad_weights
        grad_row = (weights * grad_weights.to(weights.dtype)).sum(-1)
        if "cu_seqlens_q" in keywords:
            grad_row = _packed_rows(grad_row, keywords["cu_seqlens_q"], query.shape[2])
    if grad_lse is not None:
        grad_row = grad_lse.neg() if grad_row is None else grad_row - grad_lse
    if grad_row is not None:
        merged["grad_row"] = grad_row
    return merged


def _packed_rows(padded: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Packs padded numbers (B, H, L) per query to (1, H, rows); rows of no sequence get 0."""
    batch, _, length = padded.shape
    # Rows of no sequence read the zeros that are padded behind the last sequence and the longest length.
    padded = F.pad(padded, (0, 1, 0, 0, 0, 1))
    row = torch.arange(rows, device=starts.device)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, batch)
    within = row - starts[sequence]
    return padded[sequence, :, within.clamp(max=length)].T.unsqueeze(0)
