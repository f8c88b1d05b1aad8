"""Gradients in which every rank takes part where one does, whatever it is that it wants itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .agreement import Flags

__all__ = ["anchor", "recorded", "recording", "tied"]


def recorded(*tensors: Tensor | None) -> Flags:
    """Whether a gradient of some of these is recorded here."""
    if not torch.is_grad_enabled():
        return Flags.NO_GRAD
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return Flags.RECORDS if wanted else Flags(0)


def recording(tensor: Tensor, together: Flags) -> Tensor:
    """The tensor, or one that requires a gradient in its place, where any rank records one: what it is an
    argument of has a backward then on all ranks.
    """
    wanted = Flags.RECORDS in together and not tensor.requires_grad
    return tensor.detach().requires_grad_() if wanted else tensor


def anchor(ctx: Any, like: Tensor) -> Tensor:
    """An empty result for a function of autograd to have beside its others, which :func:`tied` wants."""
    nothing = like.new_empty(0)
    ctx.save_for_backward(nothing)
    return nothing


def tied(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that a function's backward is given; where they are differentiated, such that depend on
    its results. They are constants on ranks whose loss is linear, and a second derivative would not come by
    the function there, as it does on the others.
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
