"""Operations of torch as simpler ones, by torch's table and by own rules where it lacks or errs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["decomposition_of"]

aten = torch.ops.aten


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """A function that computes the same by other operations, if there is one."""
    found = _ours().get(op._schema.name.partition("::")[2]) or torch._decomp.decomposition_table.get(op)
    if found is None and op._can_decompose():
        found = op.decompose
    return found


@functools.cache
def _ours() -> dict[str, Callable[..., Any]]:
    ours = (hardshrink_backward, softshrink_backward, logit_backward, smooth_l1_loss_backward)
    return {function.__name__: function for function in ours}


def hardshrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0, grad)


def softshrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0, grad)


# NaN is neither inside nor outside, but torch's decompositions of these two take it for one of them.


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)
    return torch.where((x < low) | (x > 1 - low), outside, grad / (x * (1 - x)))


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = x - target  # the mean of a single number is that number
    inside = (difference / beta if beta else difference) * grad
    return torch.where(difference.abs() >= beta, difference.sign() * grad, inside)
