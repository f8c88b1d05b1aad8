"""The steps of the formula in :mod:`.reference`, in plain PyTorch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .capture import is_capturing
from .dropout_pattern import dropout_keep

__all__ = [
    "all_finite",
    "both",
    "dot_visible",
    "dropout",
    "mix_visible",
    "product",
    "repeat_heads",
    "softmax_with_lse",
    "split_mask",
]


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeats each kv head for its group of query heads, as torch's enable_gqa does."""
    if tensor.size(-3) in (1, heads):
        return tensor
    return tensor.repeat_interleave(heads // tensor.size(-3), dim=-3)


def split_mask(mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Splits a mask into (visible pairs, bias); the bias is 0 for hidden pairs."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    bias = mask.to(dtype)
    shown = bias != -torch.inf
    return shown, torch.where(shown, bias, 0.0)


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def all_finite(*tensors: Tensor) -> bool:
    """Tells whether every element is finite, from the stored data if torch.func has wrapped the tensors.

    While a CUDA graph records, or torch traces, this cannot be known, and the answer must be no.
    """
    if torch.onnx.is_in_onnx_export():
        return True  # Note [ONNX] in autograd/onnx_graphs.py
    if torch._guards.detect_fake_mode(tensors) is not None or get_proxy_mode() is not None:
        return False
    for tensor in tensors:
        if is_capturing(tensor):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if not bool(torch.isfinite(tensor.detach()).all()):
            return False
    return True


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in their own dtype, under autocast too."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def dot_visible(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """``q @ k^T`` in which a hidden pair contributes nothing, forward or backward, even if it is NaN."""
    pairs = seen.unsqueeze(-1)
    return (torch.where(pairs, q.unsqueeze(-2), 0.0) * torch.where(pairs, k.unsqueeze(-3), 0.0)).sum(-1)


def mix_visible(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """``weights @ v`` in which a hidden pair contributes nothing, forward or backward, even if it is NaN."""
    return (weights.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), v.unsqueeze(-3), 0.0)).sum(-2)


def softmax_with_lse(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of (..., H, L, S) and its log-sum-exp (..., H, L); rows of -inf give weights 0 and lse -inf.

    The weights are normalised by the row sum: exp(s - lse) would lose log(n) where |max| is large.
    """
    # Results do not depend on the maximum, so derivatives of any order may treat it as a constant.
    fixed = scores.detach()
    top = fixed.amax(-1) if scores.size(-1) else fixed.sum(-1) - torch.inf
    if sinks is not None:
        top = torch.maximum(top, sinks.detach().unsqueeze(-1))
    top = torch.where(top == -torch.inf, 0.0, top)
    exponentials = torch.exp(scores - top.unsqueeze(-1))
    total = exponentials.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.unsqueeze(-1) - top)
    empty = total == 0
    divisor = torch.where(empty, 1.0, total)
    return exponentials / divisor.unsqueeze(-1), torch.where(empty, -torch.inf, top + torch.log(divisor))


def dropout(weights: Tensor, p: float, seed: Tensor, first_batch: int) -> Tensor:
    """Weights (..., H, L, S) with the package's dropout pattern applied and the survivors scaled by 1 / (1 -
    p).
    """
    heads, length, keys = weights.shape[-3:]
    keep = dropout_keep(seed, p, (math.prod(weights.shape[:-3]), heads, length, keys), first_batch)
    return torch.where(keep.reshape(weights.shape), weights * (1.0 / (1.0 - p) if p < 1 else 0.0), 0.0)
