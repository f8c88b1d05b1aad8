"""Implements torch's fused attention on CUDA tensors by plain operators. torch's own kernels (flash,
memory-efficient, cuDNN) have no PTX. Dropout is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (query.float() @ _repeated(key, query.shape[1]).float().mT) * scale
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias.float()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(scores - lse[..., None]))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    if dropout:
        raise NotImplementedError("the PTX machine has none of torch's fused attention with dropout")
    scores = _scores(query, key, bias, causal, _scale(query, scale))
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse).to(value.dtype).float()
    out = (weights @ _repeated(value, query.shape[1]).float()).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factor = _scale(query, scale)
    heads, shape = query.shape[1], key.shape
    lse = lse[..., : query.shape[2]].reshape(query.shape[:3])
    weights = _weights(_scores(query, key, bias, causal, factor), lse)
    grad = grad.float()
    delta = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ _repeated(value, heads).float().mT - delta)
    grad_query = (grad_scores @ _repeated(key, heads).float()) * factor
    grad_key, grad_value = (grad_scores.mT @ query.float()) * factor, weights.mT @ grad
    if heads != shape[1]:
        grouped = (shape[0], shape[1], heads // shape[1])
        grad_key, grad_value = (t.view(*grouped, *t.shape[2:]).sum(2) for t in (grad_key, grad_value))
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_scores


def _random_state(query: Tensor) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2)]


# The names of arguments are those of torch's schema, by which torch calls these functions.


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _forward(query, key, value, None, is_causal, scale, dropout_p)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty(0, dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    return _backward(grad, query, key, value, out, logsumexp, None, is_causal, scale)[:3]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    out, lse = _forward(query, key, value, attn_bias, is_causal, scale, dropout_p)
    return out, lse if compute_log_sumexp else lse[..., :0], *_random_state(query)


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    bias = attn_bias
    *grads, grad_scores = _backward(grad, query, key, value, out, logsumexp, bias, is_causal, scale)
    has_bias = bias is not None and grad_input_mask[3]
    grads.append(grad_scores.to(bias.dtype).sum_to_size(bias.shape) if has_bias else None)
    return tuple(one if asked else None for one, asked in zip(grads, grad_input_mask, strict=True))


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _forward(query, key, value, attn_bias, is_causal, scale, dropout_p)
    sizes = (None, None, query.shape[2], key.shape[2])
    return out, lse[..., None], *sizes, *_random_state(query), torch.empty(0, device=query.device)


def _cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    return _backward(grad, query, key, value, out, logsumexp, attn_bias, is_causal, scale)[:3]


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    for (first_query, first_key), (end_query, end_key) in pairwise(starts):
        yield slice(first_query, end_query), slice(first_key, end_key)


def _heads(tensor: Tensor, rows: slice) -> Tensor:
    """Lays (1, heads, rows, dim) of a sequence out in (1, total, heads, dim)."""
    return tensor[:, rows].transpose(1, 2)


def _packed_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    shape = (cu_seqlens_q.numel() - 1, query.shape[2], max_seqlen_q)
    lse = query.new_zeros(shape, dtype=torch.float32)
    for n, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        of_sequence = (_heads(query, rows), _heads(key, keys), _heads(value, keys))
        part, part_lse = _forward(*of_sequence, None, custom_mask_type == 1, scale, dropout_p)
        _heads(out, rows).copy_(part)
        lse[n, :, : part_lse.shape[2]] = part_lse[0]
    return out, lse, *_random_state(query), max_seqlen_q, max_seqlen_k


def _packed_efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    grads = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
    for n, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        places = (rows, keys, keys)
        of_sequence = [_heads(*pair) for pair in zip((query, key, value), places, strict=True)]
        of_result = (_heads(out, rows), logsumexp[n : n + 1], None, custom_mask_type == 1, scale)
        parts = _backward(_heads(grad_out_, rows), *of_sequence, *of_result)
        for grad, place, part in zip(grads, places, parts, strict=False):
            _heads(grad, place).copy_(part)
    return *grads, query.new_empty(0)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "cudnn": (_cudnn, _cudnn_backward),
}
for _name, (_of_forward, _of_backward) in _IMPLEMENTATIONS.items():
    _LIBRARY.impl(f"_scaled_dot_product_{_name}_attention", _of_forward, "CUDA")
    _LIBRARY.impl(f"_scaled_dot_product_{_name}_attention_backward", _of_backward, "CUDA")
# These are for jagged tensors.
_LIBRARY.impl("_efficient_attention_forward", _packed_efficient, "CUDA")
_LIBRARY.impl("_efficient_attention_backward", _packed_efficient_backward, "CUDA")
