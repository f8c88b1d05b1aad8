"""Whether a block of selfattn_ext.distributed.context_parallel is open.

Tensors hold a part of a sequence then. What would take the part for the whole, and has no way to be split,
refuses by :func:`refuse`. Functions that can be split are met by the block where they run eagerly; in
torch.compile they are not, so that they leave its graph by :func:`eagerly` while :func:`any_open` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["WHY_EAGER", "any_open", "close", "eagerly", "open_one", "refuse", "whole"]

#: What torch.compile is told about calls that it must not trace.
WHY_EAGER = "attention that is split over processes asks them whether they make the same call"

#: What puts the rows of all ranks together, of each block.
_open: list[Callable[[Tensor, int], Tensor]] = []


def open_one(whole: Callable[[Tensor, int], Tensor]) -> None:
    """A block begins, in which ``whole`` puts together along a dimension what ranks have."""
    if not _kept_out:
        # Here, as it imports torch's compiler.
        _kept_out.append(torch.compiler.disable(_call, reason=WHY_EAGER))
    _open.append(whole)


def close() -> None:
    """The last block ends."""
    _open.pop()


def any_open() -> bool:
    """Whether there is one, in any thread."""
    return bool(_open)


def whole(tensor: Tensor, dim: int) -> Tensor:
    """The rows of all ranks in the order of the sequence; every rank has to call it, in a block."""
    return _open[-1](tensor, dim)


def refuse(what: str) -> None:
    """Raises NotImplementedError while a block is open."""
    if _open:
        raise NotImplementedError(f"{what} cannot be split over processes, as context_parallel asks")


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside of the graphs of torch.compile; while a block is open."""
    return _kept_out[0](function, *args, **kwargs)


_kept_out: list[Callable[..., Any]] = []
