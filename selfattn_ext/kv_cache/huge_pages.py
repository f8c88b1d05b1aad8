"""Memory that the system may hold in huge pages.

A page of a KV cache is a few KB somewhere in memory. To read one the processor looks up its address in tables
of the system. With an entry per 4096 bytes they fit no cache near the core; with one per 2 MB they do.
docs/performance.md has the measured gain.
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
    """Does what torch.empty does. On Linux it also advises the system to hold a tensor of the CPU in huge
    pages, which the system may follow at the first write.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    # A tensor of another class may have no memory, as torch's fake tensors.
    if type(tensor) is Tensor and tensor.device.type == "cpu" and (advise := _madvise()) is not None:
        begin = tensor.data_ptr()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (begin + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            advise(first, end - first, mmap.MADV_HUGEPAGE)  # advice alone: a failure is no error
    return tensor


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
