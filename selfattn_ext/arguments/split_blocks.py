"""Whether a block of selfattn_ext.distributed.context_parallel is open.

Tensors hold a part of a sequence then. What would take the part for the whole, and has no way to be split,
refuses by :func:`refuse`. Functions that can be split are met by the block where they run eagerly; in
torch.compile they are not, so that they leave its graph by :func:`eagerly` while :func:`any_open` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["WHY_EAGER", "any_open", "close", "eagerly", "open_one", "refuse", "whole"]

#: What torch.compile is told about calls that it must not trace.
WHY_EAGER = "attention that is split over processes asks them whether they make the same call"


class _Block(NamedTuple):
    #: Puts together along a dimension what ranks have.
    whole: Callable[[Tensor, int], Tensor]
    #: A context manager in which an exception is told to the other ranks.
    telling: Callable[[], AbstractContextManager[Any]]
    thread: int


_open: list[_Block] = []


def open_one(
    whole: Callable[[Tensor, int], Tensor], telling: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A block begins, which ``whole`` and ``telling`` belong to."""
    if not _kept_out:
        # Here, as it imports torch's compiler.
        _kept_out.append(torch.compiler.disable(_call, reason=WHY_EAGER))
    _open.append(_Block(whole, telling, threading.get_ident()))


def close() -> None:
    """The last block ends."""
    _open.pop()


def any_open() -> bool:
    """Whether there is one, in any thread."""
    return bool(_open)


def whole(tensor: Tensor, dim: int) -> Tensor:
    """The rows of all ranks in the order of the sequence; every rank has to call it, in a block."""
    return _open[-1].whole(tensor, dim)


def refuse(what: str) -> None:
    """Raises NotImplementedError while a block is open, on this rank and where others wait for it."""
    if not _open:
        return
    refusal = NotImplementedError(f"{what} cannot be split over processes, as context_parallel asks")
    if torch.compiler.is_dynamo_compiling():
        # Dynamo leaves the call to Python, which comes by here once more.
        raise refusal
    block = _open[-1]
    # Another thread is none of those that attend together.
    with block.telling() if block.thread == threading.get_ident() else nullcontext():
        raise refusal


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside of the graphs of torch.compile; while a block is open."""
    return _kept_out[0](function, *args, **kwargs)


_kept_out: list[Callable[..., Any]] = []
