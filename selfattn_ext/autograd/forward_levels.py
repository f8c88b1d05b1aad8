"""Helpers for a function's ``jvp`` so that levels of forward mode may be nested.

Note [Nested forward mode]
    torch turns forward mode off while a ``jvp`` runs, so that operations on the saved tensors, which have
    tangents of its level, give results without such tangents. But then the outer levels do not see these
    operations, either, and the result's derivatives there would be 0. So a ``jvp`` here turns forward mode
    on again, and removes its level's tangents from the saved tensors instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["make_dual", "nestable", "primals", "pushed", "unpack_dual"]

# The level is always 0: torch has one level, and torch.func wraps tensors to have more. The default level of
# torch.autograd.forward_ad is a number in Python that graphs of torch.compile do not set.
unpack_dual = functools.partial(forward_ad.unpack_dual, level=0)
make_dual = functools.partial(forward_ad.make_dual, level=0)


def nestable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a jvp nestable; it must read what was saved only by :func:`primals`."""

    @functools.wraps(jvp)
    def nested(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(ctx, *tangents)

    return nested


def primals(ctx: Any) -> list[Tensor | None]:
    """Returns what was saved for forward mode, without tangents of this level."""
    return [None if tensor is None else unpack_dual(tensor).primal for tensor in ctx.saved_tensors]


def pushed(
    function: Callable[..., tuple[Tensor, ...]], points: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the tangents of a function's results, computed by gradients alone.

    A gradient is linear in its cotangents, and the gradient of this linear map is forward mode. Forward mode
    itself has only one level outside torch.func; gradients need no level.
    """
    pull: Any
    results, pull = torch.func.vjp(function, *points)  # type: ignore[misc]
    at = tuple(torch.zeros_like(result) for result in results)
    return torch.func.vjp(lambda *cotangents: pull(cotangents), *at)[1](tuple(directions))
