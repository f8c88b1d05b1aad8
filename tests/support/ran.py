"""Counts of the operators that ran, which prove whose kernels a call took; torch's switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import profile
from torch.nn import attention


def operators(function: Callable[[], Any]) -> Counter[str]:
    """Counts how often each operator ran, by the profiler's names such as "selfattn::attention_forward"."""
    # Kineto is off, as its first use takes seconds.
    with profile(use_kineto=False) as recorded:
        function()
    return Counter(event.name for event in recorded.function_events)


def ours(function: Callable[[], Any]) -> tuple[int, int]:
    """Counts how often a forward and a backward of this package ran."""
    counted = {name: count for name, count in operators(function).items() if name.startswith("selfattn::")}
    backward = sum(count for name, count in counted.items() if name.endswith("_backward"))
    return sum(counted.values()) - backward, backward


@contextmanager
def activated(yes: bool = True) -> Iterator[None]:
    """Makes torch's switch choose this package's kernels inside the block, or torch's own."""
    if yes:
        attention.activate_flash_attention_impl("selfattn_ext")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)
