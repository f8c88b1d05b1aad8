"""torch's attention operators by this package's kernels: the part that CPU and CUDA share.

Note [One number per row]
    torch keeps one number per query between forward and backward, the log-sum-exp of its scores, where this
    package keeps two, the largest score and the sum. exp(s - lse) is the weight all the same, so that lse
    stands for the row's maximum, with a sum of 1, and either side's backward takes the other side's forward.
    A query that sees no key has lse 0 here, as in torch: exp(-inf - 0) is the right weight, but
    exp(-inf + inf) is NaN. Two things are lost. One is the rounding error of a 16-bit output, which makes
    16-bit gradients a little less exact. The other is log(S) next to scores of -1e38, in rows that a mask
    hides by the lowest finite number: torch's own gradients of such rows are S times too large. On the CPU,
    where reading lse costs nothing, such calls compute both numbers again; on CUDA it would wait for the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..arguments import AttentionOptions, keywords_for
from ..arguments.shapes import dense_rows
from ..formula_steps import default_scale

__all__ = ["backward", "forward", "in_order", "in_order_of", "mask_of"]

_NO_OPTIONS = AttentionOptions()

#: From here on a float32 log-sum-exp is coarser than a thousandth.
_FAR = 2.0**13


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Ev) and lse (B, H, L), float64 for float64 inputs, else float32.

    ``options`` are the operators' keyword arguments; the settings of the process are added.
    """
    options = _with_settings(query, mask, options)
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    factor = default_scale(query.size(3)) if scale is None else scale
    out, row_max, row_sum, _ = ops.direct_forward(query, key, value, factor, **options)
    lse = row_sum.log_().add_(row_max)
    if mask is not None or "query_offset" in options:
        lse = lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and, with ``need_mask_grad``, of the mask (else an empty tensor)."""
    options = _with_settings(query, mask, options)
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    factor = default_scale(query.size(3)) if scale is None else scale
    if mask is not None and lse.device.type == "cpu" and bool((lse.abs() > _FAR).any()):
        keywords = {name: option for name, option in options.items() if name != "need_mask_grad"}
        _, row_max, row_sum, _ = ops.direct_forward(query, key, value, factor, **keywords)
    else:
        row_max = lse.contiguous()
        row_sum = torch.ones_like(row_max)
    grads = ops.direct_backward(grad_out, query, key, value, out, row_max, row_sum, factor, **options)
    return grads[:4]


def _with_settings(query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options, a mask, and the settings of the process: see keywords_for."""
    if mask is not None:
        options["attn_mask"] = mask
    return options | keywords_for(_NO_OPTIONS, query)


def mask_of(attn_mask: Tensor | None) -> Tensor | None:
    """A mask of any rank up to 4 in four dimensions."""
    if attn_mask is None or attn_mask.dim() == 4:
        return attn_mask
    return attn_mask.view(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost to the innermost in memory, as torch.empty_like keeps them."""
    return tuple(sorted(range(4), key=tensor.stride().__getitem__, reverse=True))


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor (B, H, L, E), dense in memory with its dimensions in that order; itself where it is.

    Compiled code relies on the strides that torch's fake kernels promise.
    """
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return tensor
    return permuted.contiguous().permute(tuple(order.index(dim) for dim in range(4)))


def in_order_of(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, dense in memory with its dimensions in the order of another tensor's."""
    if tensor.stride() == other.stride():
        return tensor
    return in_order(tensor, order_of(other))
