"""Which operators ran: the proof that a call took this package's kernels, or torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile


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
