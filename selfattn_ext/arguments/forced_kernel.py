"""The kernel that :func:`selfattn_ext.backends.use` or SELFATTN_KERNEL asks calls to take."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["current", "use"]

_OF_THE_PROCESS: str = os.environ.get("SELFATTN_KERNEL", "")
_forced: ContextVar[str] = ContextVar("selfattn_ext_kernel", default=_OF_THE_PROCESS)

#: How many parts of the process ask for a kernel; while it is 0, calls need not look which kernel it is.
forcing: int = 1 if _OF_THE_PROCESS else 0
_lock = threading.Lock()


def current() -> str:
    """Returns the kernel that calls are to take, "" for the automatic choice."""
    return _forced.get() if forcing else ""


# torch.compiler.assume_constant_result does the same but imports the compiler, which takes a second.
current._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def use(name: str) -> Iterator[None]:
    """Makes calls of this thread or task take that kernel inside the ``with`` block."""
    global forcing
    token = _forced.set(name)
    with _lock:
        forcing += 1
    try:
        yield
    finally:
        with _lock:
            forcing -= 1
        _forced.reset(token)
