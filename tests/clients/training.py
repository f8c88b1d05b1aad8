"""A training step of a model, as numbers to compare: what it gives and the gradient of every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tolerances import assert_accurate
from torch import Tensor, nn

Call = Callable[[nn.Module, torch.dtype], Tensor]


def step(model: nn.Module, call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of a copy of the model in that dtype."""
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(0)
    out = call(model, dtype)
    out.square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def check(model: nn.Module, call: Call, switch: Callable[[], Any]) -> None:
    """Asserts that a step is as accurate with the switch as torch's own, and the output in evaluation too."""
    exact, peer = step(model, call, torch.float64), step(model, call, torch.float32)
    with switch():
        ours = step(model, call, torch.float32)
    assert ours.keys() == exact.keys()
    sizes = {name: float(numbers.abs().max().clamp(min=1e-30)) for name, numbers in exact.items()}
    largest = max(size for name, size in sizes.items() if name != "out")
    for name, result in ours.items():
        # Gradients of such losses are small numbers, each a sum of many: the bound is of their own size. One
        # that is 0 but for float64's rounding errors, as that of a number which all keys share, has no size:
        # torch's error in it is one draw of noise, and its terms are as large as those of other gradients.
        size = sizes[name] if sizes[name] > 1e-12 * largest else largest
        assert_accurate(name, result / size, exact[name] / size, peer[name] / size, 8.0)
