"""Peak memory of a call beyond its inputs and results."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import OURS, Contender, results
from selfattn_ext.bench.elsewhere import in_new_process

T = TypeVar("T")

# With these settings glibc returns freed blocks at once, so that no block is reused without being counted.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESIDENT, _PEAK = "VmRSS", "VmHWM"


@dataclass(frozen=True)
class Memory:
    """Bytes beyond inputs and results; None where they could not be measured."""

    case: Case
    extra: dict[str, int]  # by name of the contender
    doubled: int  # of this package, with twice as many queries and keys

    @property
    def linear(self) -> bool:
        """Tells whether this package's extra memory grows no faster than the length.

        Pages and allocators may add a little; a matrix of weights would grow fourfold.
        """
        return self.doubled <= 2.0 * self.extra[OURS.name] + _SLACK


_SLACK = 4 * 2**20


def available() -> bool:
    """Tells whether the operating system reports a peak that can be reset, as Linux does."""
    return _RESET.exists()


def measure_memory(case: Case, peers: Sequence[Contender], threads: int) -> Memory:
    """Measures one call of each contender, each in a process of its own."""
    if case.keys is not None:
        raise ValueError("case.keys must not be given, as the length is doubled, and the keys with it")
    extra = {contender.name: alone(extra_bytes, contender, case, threads) for contender in (OURS, *peers)}
    longer = replace(case, length=2 * case.length)
    return Memory(case, extra, alone(extra_bytes, OURS, longer, threads))


def alone(measure: Callable[..., int], *arguments: Any) -> int:
    """Calls measure(*arguments) in a new process whose allocator returns freed blocks at once.

    Both must be picklable.
    """
    return in_new_process(ALLOCATOR, measure, *arguments)


def extra_bytes(contender: Contender, case: Case, threads: int) -> int:
    """Returns the peak of this process's memory during one call, above the size of inputs and results.

    A call of a few queries before it loads what is loaded only once.
    """
    torch.set_num_threads(threads)
    small = replace(case, length=64)
    tensors = inputs(small)
    results(contender.prepare(small, tensors), small, tensors)
    tensors = inputs(case)
    call = contender.prepare(case, tensors)
    found, grown = growth(lambda: results(call, case, tensors))
    return max(0, grown - sum(tensor.nbytes for tensor in found))


def growth(call: Callable[[], T]) -> tuple[T, int]:
    """Returns what a call returns, and by how many bytes this process's memory grew during it, at its peak.

    Memory that was freed before is returned to the system first, if the C library can do that, as it would be
    reused without being counted.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _RESET.write_text("5", encoding="ascii")  # 5 sets the peak to the present size
    before = _kilobytes(_RESIDENT)
    result = call()
    return result, (_kilobytes(_PEAK) - before) * 1024


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.M)
    assert found is not None, field
    return int(found[1])
