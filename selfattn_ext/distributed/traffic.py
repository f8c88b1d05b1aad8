"""A count of the bytes that this process has sent to others for attention."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor

__all__ = ["bytes_sent", "note"]

_sent = 0
_lock = threading.Lock()


def bytes_sent() -> int:
    """The bytes of keys, values, heads and gradients that split attention has sent from this process so far.

    Returns:
        An int, which never falls. Tensors that are filled up to a common length count with the filling.

    Example:
        >>> from selfattn_ext.distributed import bytes_sent
        >>> before = bytes_sent()
        >>> bytes_sent() - before  # nothing was computed meanwhile
        0
    """
    return _sent


def note(tensors: Iterable[Tensor], times: int = 1) -> None:
    """Counts tensors that are sent to so many others."""
    global _sent
    sent = times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with _lock:  # autograd may count in a thread of its own
        _sent += sent
