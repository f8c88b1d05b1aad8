"""Which operators ran: the proof that a call took this package's kernels, or torch's; and torch's switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import profile
from torch.nn import attention


def operators(function: Callable[[], Any]) -> Counter[str]:
    """How often each operator ran, named as torch's profiler has it: "selfattn::attention_forward"."""
    # Without Kineto, whose first use takes seconds.
    with profile(use_kineto=False) as recorded:
        function()
    return Counter(event.name for event in recorded.function_events)


def ours(function: Callable[[], Any]) -> tuple[int, int]:
    """How often a forward and a backward of this package ran."""
    counted = {name: count for name, count in operators(function).items() if name.startswith("selfattn::")}
    backward = sum(count for name, count in counted.items() if name.endswith("_backward"))
    return sum(counted.values()) - backward, backward


@contextmanager
def activated(yes: bool = True) -> Iterator[None]:
    """A block on this package's kernels by torch's switch, or on torch's own."""
    if yes:
        attention.activate_flash_attention_impl("selfattn_ext")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)
