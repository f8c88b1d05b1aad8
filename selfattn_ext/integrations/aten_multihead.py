"""torch's multi-head attention operator for inference by this package's kernels.

It is the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer. On the CPU it does not call
F.scaled_dot_product_attention: one operator holds the projections and the attention. nn.TransformerEncoder
hands it nested tensors if a padding mask is given, so that padding costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional

__all__ = ["OPERATORS"]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """aten::_native_multi_head_attention: (output (B, L, E), weights or None).

    Args:
        query, key, value: (B, L, E), or one nested tensor (B, *, E) for the three.
        mask: hides where it is not 0; (L, S) with mask_type 0, (B, S) with 1, (B, H, L, S) with 2.

    Raises:
        ValueError: for calls that are left to torch's kernel.
    """
    if query.is_nested:
        if not (query is key and key is value) or need_weights or mask is not None:
            raise ValueError("nested tensors attend to themselves alone, and return no weights")
        return _nested(query, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias)
    if any(tensor.dim() != 3 or tensor.size(2) != embed_dim for tensor in (query, key, value)):
        raise ValueError("query, key and value are (B, L, E)")
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    else:
        weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
        projected = tuple(map(F.linear, (query, key, value), weights, biases))
    query, key, value = (tensor.unflatten(2, (num_head, -1)).transpose(1, 2) for tensor in projected)
    seen = None if mask is None else _visible(mask, mask_type)
    results = functional.scaled_dot_product_attention(query, key, value, seen, return_weights=need_weights)
    out, attention = results if need_weights else (results, None)
    if attention is not None and average_attn_weights:
        attention = attention.mean(1)
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), attention


def _visible(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask as this package takes it: four dimensions, True where a query sees a key."""
    seen = mask.logical_not()
    if mask_type == 1:
        return seen[:, None, None, :]
    return seen if seen.dim() == 4 else seen[(None,) * (4 - seen.dim())]


def _nested(
    tokens: Tensor,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The operator for sequences of different lengths: one product for all, then attention one by one."""
    outs = []
    for sequence in F.linear(tokens, qkv_weight, qkv_bias).unbind():
        query, key, value = sequence.unflatten(1, (3, num_head, -1)).permute(1, 2, 0, 3)[:, None]
        out = functional.scaled_dot_product_attention(query, key, value)
        outs.append(out[0].transpose(0, 1).flatten(1))
    mixed = torch.nested.as_nested_tensor(outs)
    return F.linear(mixed, proj_weight, proj_bias), None


#: name of the operator -> the function in its place
OPERATORS: dict[str, Callable[..., Any]] = {"_native_multi_head_attention": multi_head_attention}
