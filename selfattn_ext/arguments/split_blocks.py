"""Tells whether a block of selfattn_ext.distributed.context_parallel is open.

Inside a block, tensors hold a part of a sequence. A function that cannot be split would mistake the part for
the whole, so it refuses by :func:`refuse`. The block intercepts functions that can be split only where they
run eagerly, so while :func:`any_open` is True, they leave a graph of torch.compile by :func:`eagerly`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["WHY_EAGER", "any_open", "close", "eagerly", "open_one", "refuse", "whole"]

#: The reason that torch.compile shows for calls that it must not trace.
WHY_EAGER = "attention that is split over processes asks them whether they make the same call"


class _Block(NamedTuple):
    #: Joins the parts of all ranks along a dimension.
    whole: Callable[[Tensor, int], Tensor]
    #: Returns a context manager that tells the other ranks of an exception inside it.
    telling: Callable[[], AbstractContextManager[Any]]
    thread: int


_open: list[_Block] = []


def open_one(
    whole: Callable[[Tensor, int], Tensor], telling: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Notes that a block begins, with its functions ``whole`` and ``telling``."""
    if not _kept_out:
        # This is not done at import, as it imports torch's compiler.
        _kept_out.append(torch.compiler.disable(_call, reason=WHY_EAGER))
    _open.append(_Block(whole, telling, threading.get_ident()))


def close() -> None:
    """Notes that the last block ends."""
    _open.pop()


def any_open() -> bool:
    """Tells whether a block is open in any thread."""
    return bool(_open)


def whole(tensor: Tensor, dim: int) -> Tensor:
    """Returns all ranks' rows in the order of the sequence; every rank has to call it, inside a block."""
    return _open[-1].whole(tensor, dim)


def refuse(what: str) -> None:
    """Raises NotImplementedError while a block is open, on this rank and where others wait for it."""
    if not _open:
        return
    refusal = NotImplementedError(f"{what} cannot be split over processes, as context_parallel asks")
    if torch.compiler.is_dynamo_compiling():
        # Dynamo then leaves the call to Python, which runs this function once more.
        raise refusal
    for block in _open[-1:]:  # none, if another thread has just closed it
        # Other ranks do not wait for a thread that did not open the block.
        with block.telling() if block.thread == threading.get_ident() else nullcontext():
            raise refusal
    raise refusal


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function outside the graphs of torch.compile; a block must be open."""
    return _kept_out[0](function, *args, **kwargs)


_kept_out: list[Callable[..., Any]] = []
