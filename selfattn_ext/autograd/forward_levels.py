"""Tensors with tangents, and what a function's ``jvp`` needs so that levels of forward mode may be nested.

Note [Nested forward mode]
    torch turns forward mode off while a ``jvp`` runs, so that tensors of its level, which have tangents, give
    no results that have some. That also loses what the operations in it mean to the levels outside: the
    result's derivatives there would be 0. So a ``jvp`` here turns it on again, and takes its level's tangents
    off the tensors that were saved instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["make_dual", "nestable", "primals", "pushed", "unpack_dual"]

# torch has one level, and torch.func wraps tensors to have more. What else torch.autograd.forward_ad knows of
# it is a number in Python, which the graphs of torch.compile do not set.
unpack_dual = functools.partial(forward_ad.unpack_dual, level=0)
make_dual = functools.partial(forward_ad.make_dual, level=0)


def nestable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """A jvp that looks at what was saved by :func:`primals` alone."""

    @functools.wraps(jvp)
    def nested(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(ctx, *tangents)

    return nested


def primals(ctx: Any) -> list[Tensor | None]:
    """What was saved for forward mode, without tangents of this level."""
    return [None if tensor is None else unpack_dual(tensor).primal for tensor in ctx.saved_tensors]


def pushed(
    function: Callable[..., tuple[Tensor, ...]], points: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The tangents of a function's results, by gradients alone: outside of torch.func, which they do not need
    to be in, forward mode has one level.

    A gradient is linear in its cotangents, and the gradient of that is forward mode.
    """
    pull: Any
    results, pull = torch.func.vjp(function, *points)  # type: ignore[misc]
    at = tuple(torch.zeros_like(result) for result in results)
    return torch.func.vjp(lambda *cotangents: pull(cotangents), *at)[1](tuple(directions))
