"""Memory that the system may hold in huge pages.

A page of a KV cache is a few KB somewhere in memory. Before one is read the processor looks up where it is,
in tables of the system that have an entry per 4096 bytes and fit no cache near the core. With an entry per
2 MB they do. What that gives is measured in docs/performance.md.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["empty"]


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """As torch.empty; on Linux the system is told that a tensor of the CPU is better held in huge pages. It
    follows as it is configured to, when something is first written there."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    # A tensor of another type need not have memory: torch's fake ones have none.
    if type(tensor) is Tensor and tensor.device.type == "cpu" and (advise := _madvise()) is not None:
        begin = tensor.data_ptr()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (begin + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            advise(first, end - first, mmap.MADV_HUGEPAGE)  # advice: that it fails is no error
    return tensor


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
