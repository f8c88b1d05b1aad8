"""Gradients in which every rank takes part if one rank wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .agreement import Flags

__all__ = ["anchor", "recorded", "recording", "tied"]


def recorded(*tensors: Tensor | None) -> Flags:
    """The flags that say whether this rank records a gradient of some of these."""
    if not torch.is_grad_enabled():
        return Flags.NO_GRAD
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return Flags.RECORDS if wanted else Flags(0)


def recording(tensor: Tensor, together: Flags) -> Tensor:
    """The tensor, or in its place one that requires a gradient, if any rank records one: a function of it
    then has a backward on all ranks.
    """
    wanted = Flags.RECORDS in together and not tensor.requires_grad
    return tensor.detach().requires_grad_() if wanted else tensor


def anchor(ctx: Any, like: Tensor) -> Tensor:
    """An empty result that a function of autograd returns beside its others, for :func:`tied`."""
    nothing = like.new_empty(0)
    ctx.save_for_backward(nothing)
    return nothing


def tied(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that a function's backward is given; while they are differentiated, copies that depend on
    the function's results. On a rank whose loss is linear the gradients are constants, and a second
    derivative would pass the function by, which it reaches on the others.
    """
    if not torch.is_grad_enabled():
        return list(grads)
    return [_Tied.apply(grad, *ctx.saved_tensors) for grad in grads]


class _Tied(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None
