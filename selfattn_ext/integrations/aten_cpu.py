"""torch's fused attention operators on the CPU, forward and backward, by this package's kernels.

F.scaled_dot_product_attention sends a call there once it has found that torch's own kernel takes it: four
dimensions, E == Ev, no dropout, no gradient of the mask. Masks are floating-point here (bool ones have been
converted), key and value may have fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import aten

__all__ = ["OPERATORS"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu: (output, logsumexp).

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    if dropout_p:
        raise ValueError("no dropout here")
    options: dict[str, Any] = {"is_causal": True} if is_causal else {}
    out, lse = aten.forward(query, key, value, aten.mask_of(attn_mask), scale, **options)
    # torch computes it as (B, L, H), and compiled code relies on that.
    return aten.in_order_of(out, query), lse.mT.contiguous().mT


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward: the gradients of query, key and value, in
    memory (B, L, H, E).

    Raises:
        ValueError: for calls that the kernels do not take.
    """
    options: dict[str, Any] = {"is_causal": True} if is_causal else {}
    grads = aten.backward(
        grad_out, query, key, value, out, logsumexp, aten.mask_of(attn_mask), scale, **options
    )
    return tuple(aten.in_order(grad, (0, 2, 1, 3)) for grad in grads[:3])


#: name of the operator -> the function in its place
OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
