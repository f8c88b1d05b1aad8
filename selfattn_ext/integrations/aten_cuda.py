"""torch's fused attention operators on CUDA, forward and backward, by this package's kernels.

F.scaled_dot_product_attention chooses among three operators, by GPU, dtype and options: flash (16-bit, no
mask), memory-efficient and cuDNN. Their results besides output and logsumexp are for torch's own random
numbers: calls with dropout are left to torch, forward and backward, so that a gradient never meets another
kernel's dropout pattern.

Shapes and strides are those that torch's fake kernels promise to compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import aten

__all__ = ["OPERATORS"]

_BLHE = (0, 2, 1, 3)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError("dropout is left to torch's kernel")


def _lower_right(query: Tensor, key: Tensor, is_causal: bool) -> dict[str, Any]:
    """The options of flash, which aligns the diagonal with the last query and key, as CausalBias needs."""
    if not is_causal:
        return {}
    offset = key.size(2) - query.size(2)
    return {"is_causal": True, "query_offset": offset} if offset else {"is_causal": True}


def _upper_left(is_causal: bool) -> dict[str, Any]:
    return {"is_causal": True} if is_causal else {}


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: (output, logsumexp (B, H, L), None, None, L, S, two numbers
    without meaning, an empty tensor).

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    if return_debug_mask:
        raise ValueError("no weights here")
    out, lse = aten.forward(query, key, value, None, scale, **_lower_right(query, key, is_causal))
    state = query.new_empty(2, dtype=torch.uint64)
    unused = query.new_empty((), dtype=torch.uint64)
    out = aten.in_order_of(out, query)
    return out, lse, None, None, query.size(2), key.size(2), state, unused, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward: the gradients of query, key and value.

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    if cum_seq_q is not None or cum_seq_k is not None:
        raise ValueError("packed sequences are left to torch's kernel")
    options = _lower_right(query, key, is_causal)
    grads = aten.backward(grad_out, query, key, value, out, logsumexp, None, scale, **options)
    return _like_inputs(grads, query, key, value)


def efficient(
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
    """aten::_scaled_dot_product_efficient_attention: (output, log_sumexp (B, H, L up to a multiple of 32),
    two numbers without meaning).

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    mask = aten.mask_of(attn_bias)
    out, lse = aten.forward(query, key, value, mask, scale, **_upper_left(is_causal))
    if compute_log_sumexp:
        # torch's backward gives rows past the last query no weight.
        lse = torch.nn.functional.pad(lse, (0, -query.size(2) % 32), value=torch.inf)
    else:
        lse = lse[..., :0]
    number = query.new_empty((), dtype=torch.int64)
    return aten.in_order(out, _BLHE), lse.contiguous(), number, torch.empty_like(number)


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """aten::_scaled_dot_product_efficient_attention_backward: the gradients of query, key, value and, where
    ``grad_input_mask[3]`` asks for it, of the bias.

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    mask = aten.mask_of(attn_bias)
    options = _upper_left(is_causal)
    if wants_bias := mask is not None and grad_input_mask[3]:
        options["need_mask_grad"] = True
    rows = logsumexp[..., : query.size(2)]
    grads = aten.backward(grad_out, query, key, value, out, rows, mask, scale, **options)
    grad_bias = None
    if attn_bias is not None and wants_bias:
        keys = attn_bias.size(-1)
        padded = attn_bias.new_empty((*attn_bias.shape[:-1], keys + -keys % 16))
        grad_bias = padded[..., :keys].copy_(grads[3].view(attn_bias.shape))
    return *(aten.in_order(grad, _BLHE) for grad in grads[:3]), grad_bias


def cudnn(
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
    """aten::_scaled_dot_product_cudnn_attention: (output, logsumexp (B, H, L, 1), None, None, L, S, two
    numbers without meaning, None).

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    mask = aten.mask_of(attn_bias)
    out, lse = aten.forward(query, key, value, mask, scale, **_upper_left(is_causal))
    number = query.new_empty((), dtype=torch.int64)
    out = aten.in_order_of(out, query)
    unused = torch.empty_like(number)
    return out, lse.unsqueeze(-1), None, None, query.size(2), key.size(2), number, unused, None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_cudnn_attention_backward: the gradients of query, key and value.

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    _refuse_dropout(dropout_p)
    if cum_seq_q is not None or cum_seq_k is not None:
        raise ValueError("packed sequences are left to torch's kernel")
    mask, rows = aten.mask_of(attn_bias), logsumexp.squeeze(-1)
    options = _upper_left(is_causal)
    grads = aten.backward(grad_out, query, key, value, out, rows, mask, scale, **options)
    return _like_inputs(grads, query, key, value)


def _like_inputs(grads: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(aten.in_order_of(grad, tensor) for grad, tensor in zip(grads, inputs, strict=False))


#: name of the operator -> the function in its place
OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
