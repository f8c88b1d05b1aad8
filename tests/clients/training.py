"""Training steps of a model with one of the switches: output, gradients, and whose kernels ran."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ran
import torch
from tolerances import assert_accurate
from torch import Tensor, nn

from selfattn_ext import as_sdpa

#: The two switches of torch_sdpa and sdpa_mode, for parametrized tests.
SWITCHES = [pytest.param(ran.activated, id="activated"), pytest.param(as_sdpa, id="as_sdpa")]
Call = Callable[[nn.Module, torch.dtype], Tensor]


def step(model: nn.Module, call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the output and gradients of a copy of the model in that dtype."""
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(0)
    out = call(model, dtype)
    out.square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def check(model: nn.Module, call: Call, switch: Callable[[], Any], layers: int) -> None:
    """Asserts that a step with the switch is as accurate as torch's own, in output and gradients, and that
    each of the layers of attention runs on our kernels inside of the switch and nowhere else.
    """
    exact, peer = step(model, call, torch.float64), step(model, call, torch.float32)
    with switch():
        ours = step(model, call, torch.float32)
    assert ours.keys() == exact.keys()
    sizes = {name: float(numbers.abs().max().clamp(min=1e-30)) for name, numbers in exact.items()}
    largest = max(size for name, size in sizes.items() if name != "out")
    for name, result in ours.items():
        # Gradients of such losses are small sums of many numbers, so the bound is relative to their own size.
        # A gradient that is 0 except for float64's rounding errors, like that of a bias that all keys share,
        # has no such size: torch's error in it is noise, and its terms are as large as those of others.
        size = sizes[name] if sizes[name] > 1e-12 * largest else largest
        assert_accurate(name, result / size, exact[name] / size, peer[name] / size, 8.0)

    def trained() -> None:
        call(model, torch.float32).sum().backward()

    with switch():
        assert ran.ours(trained) == (layers, layers)
        with torch.no_grad():
            assert ran.ours(lambda: call(model.eval(), torch.float32)) == (layers, 0)
    assert ran.ours(trained) == (0, 0)
