"""The steps of the formula in :mod:`.reference`, in plain PyTorch operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .capture import is_capturing
from .dropout_pattern import dropout_keep
from .masks import alibi_bias, visible_pairs

__all__ = [
    "accumulation_dtype",
    "all_finite",
    "both",
    "default_scale",
    "dot_visible",
    "dropout",
    "final_scores",
    "mask_of_sequence",
    "mix_visible",
    "numbers_of_sequence",
    "product",
    "repeat_heads",
    "softmax_with_lse",
    "split_mask",
]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and lse of inputs: float64 for float64, float32 for every other one.

    Args:
        dtype: that of the inputs.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> reference.accumulation_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def usable_softcap(softcap: float, dtype: torch.dtype) -> float:
    """Returns the softcap as a number that arithmetic in ``dtype`` can divide by and multiply with.

    A softcap near the largest number or beyond is off (0), as scores that it would change leave the softmax
    no choice. One below the smallest normal number becomes that number, as both bound all scores to about 0.
    """
    limits = torch.finfo(dtype)
    return 0.0 if softcap == 0.0 or softcap > limits.max / 1e8 else max(softcap, limits.tiny)


def default_scale(head_dim: int) -> float:
    """``1 / sqrt(E)``; 1 for E = 0, where every score is an empty sum and any factor leaves it 0."""
    return head_dim**-0.5 if head_dim else 1.0


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


def final_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    dtype: torch.dtype,
    value: Tensor | None = None,
    *,
    scale: float | None,
    is_causal: bool,
    window_size: Sequence[int],
    query_offset: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    score_function: Callable[[Tensor], Tensor] | None,
    visible: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the scores (..., H, L, S) as the softmax takes them, -inf where hidden, in ``dtype``.

    The second result are the visible pairs if products must leave out the others one by one, as with an input
    that is not finite 0 * NaN can arise; else None. The value (..., H, S, Ev), if it is given, is such an
    input. The other arguments are those of :func:`selfattn_ext.reference.attention`.
    """
    q = query.to(dtype)
    k = repeat_heads(key.to(dtype), query.size(-3))
    length, keys = q.size(-2), k.size(-2)

    # If there is no memory for the matrices of this formula, this fails before anything is computed.
    q.new_empty((*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), length, keys))
    seen = visible_pairs(
        length,
        keys,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        device=q.device,
    )
    shown, bias = split_mask(attn_mask, dtype)
    seen = both(both(seen, shown), visible)
    inputs = (q, k) if value is None else (q, k, value)
    apart = None if seen is None or all_finite(*inputs) else seen

    scores = (product(q, k.mT) if apart is None else dot_visible(q, k, apart)) * (
        default_scale(q.size(-1)) if scale is None else scale
    )
    if softcap := usable_softcap(softcap, dtype):
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(dtype), length, keys, query_offset)
    if score_function is not None:
        scores = score_function(scores)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = torch.where(seen, scores, -torch.inf)
    return scores, apart


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


def mask_of_sequence(
    mask: Tensor | Sequence[Tensor] | None, sequence: int, length: int, keys: int
) -> Tensor | None:
    """The mask of one sequence, (..., length | 1, keys | 1)."""
    if mask is None or not isinstance(mask, Tensor):
        return None if mask is None else mask[sequence]
    if mask.dim() == 4:
        mask = mask[min(sequence, mask.size(0) - 1)]
    if mask.dim() >= 2 and mask.size(-2) > 1:
        mask = mask[..., :length, :]
    return mask[..., :keys] if mask.dim() and mask.size(-1) > 1 else mask


def numbers_of_sequence(numbers: Tensor | None, sequence: int) -> Tensor | None:
    """The numbers per head of one sequence, from (H,) or (B | 1, H)."""
    if numbers is None or numbers.dim() < 2:
        return numbers
    return numbers[min(sequence, numbers.size(0) - 1)]
