"""How much memory a call takes beyond its inputs and results, at its peak."""

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

# glibc then gives freed blocks back at once, so that none are there to be used again without being counted.
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
        """Whether this package's extra memory grows no faster than the length, up to what pages and
        allocators add. A matrix of weights would grow fourfold."""
        return self.doubled <= 2.0 * self.extra[OURS.name] + _SLACK


_SLACK = 4 * 2**20


def available() -> bool:
    """Whether the operating system tells a peak that can be reset: Linux does."""
    return _RESET.exists()


def measure_memory(case: Case, peers: Sequence[Contender], threads: int) -> Memory:
    """One call of each contender, each in a process of its own."""
    if case.keys is not None:
        raise ValueError("the length is doubled, and with it the keys: leave them out")
    extra = {contender.name: alone(extra_bytes, contender, case, threads) for contender in (OURS, *peers)}
    longer = replace(case, length=2 * case.length)
    return Memory(case, extra, alone(extra_bytes, OURS, longer, threads))


def alone(measure: Callable[..., int], *arguments: Any) -> int:
    """measure(*arguments) in a process of its own, whose allocator gives back what is freed. Both have to be
    picklable.
    """
    return in_new_process(ALLOCATOR, measure, *arguments)


def extra_bytes(contender: Contender, case: Case, threads: int) -> int:
    """The peak of this process's memory during one call, above what inputs and results take.

    The call before it, of a few queries, loads what is loaded once.
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
    """What a call returns, and by how many bytes the memory of this process grew during it, at its peak.

    What was freed before is given back first, where the C library can do that: it would be used again without
    being counted.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _RESET.write_text("5", encoding="ascii")  # 5: the peak becomes the present
    before = _kilobytes(_RESIDENT)
    result = call()
    return result, (_kilobytes(_PEAK) - before) * 1024


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.M)
    assert found is not None, field
    return int(found[1])
