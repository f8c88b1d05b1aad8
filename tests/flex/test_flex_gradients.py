"""Gradients of every operation of score functions equal torch's, in every dtype.

Special numbers are among the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from operations import BINARY, FLOATS, UNARY, pairs, special_numbers
from torch import Tensor
from written import Written

from selfattn_ext.flex.tracing import Traced, trace

pytestmark = [pytest.mark.cpu_only, pytest.mark.xdist_group("operations")]


#: Operations with further parameters.
MORE: dict[str, Callable[..., Tensor]] = {
    "softplus(x, 2, 3)": lambda x: F.softplus(x, 2, 3),
    "elu(x, 0.5)": lambda x: F.elu(x, 0.5),
    "celu(x, 2)": lambda x: F.celu(x, 2.0),
    "hardtanh(x, -2.5, 3)": lambda x: F.hardtanh(x, -2.5, 3.0),
    "hardshrink(x, 1)": lambda x: F.hardshrink(x, 1.0),
    "softshrink(x, 1)": lambda x: F.softshrink(x, 1.0),
    "leaky_relu(x, 0.3)": lambda x: F.leaky_relu(x, 0.3),
    "leaky_relu(x, -0.3)": lambda x: F.leaky_relu(x, -0.3),
    "nan_to_num(x, 1, 2, 3)": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
    "logit(x, 0.1)": lambda x: torch.logit(x, 0.1),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "erfc at erf": lambda x: x.erf() * x.erfc(),
    "dropout of none": lambda x: F.dropout(x, 0.5, training=False) * x,
    "in place": lambda x: F.relu_(x * 2) + (x * 1.5).sigmoid_().mul_(x),
    "1 - sigmoid": lambda x: torch.atanh(torch.sigmoid(x)) + torch.lerp(x, x * x, x.sigmoid()),
}


class Case(NamedTuple):
    name: str
    of_torch: Callable[..., Tensor]
    given: tuple[Tensor, ...]
    #: The number of the operand whose gradient this is.
    operand: int
    gradient: Tensor


def gradients(op: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Returns torch's gradients of the sum of all results. Strides keep torch from computing in vectors,
    because these have results of their own.
    """
    leaves = [torch.stack([x, x], -1)[..., 0].requires_grad_() for x in given]
    result = op(*leaves)
    if not result.requires_grad:
        return [None] * len(given)
    return list(torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True))


def recorded(op: Callable[..., Tensor], leaves: list[Tensor]) -> Traced:
    """Records a function that calls an operation with elements of ``leaves``."""
    dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return op(*(leaf[q] for leaf in leaves))

    return trace(score_mod, None, dtype, torch.device("cpu"), False)


@functools.cache
def compiled(dtype: torch.dtype) -> tuple[Written, list[Case]]:
    """Compiles every operation that torch has gradients of, and returns torch's gradients as cases."""
    nodes: list[Any] = []
    cases = []
    named = [(name, op, 1) for name, op in (UNARY | MORE).items()]
    named += [(name, op, 2) for name, op in BINARY.items()]
    for name, op, operands in named:
        given = (special_numbers(dtype),) if operands == 1 else pairs(dtype, dtype, few=True)
        try:
            expected = gradients(op, given)
        except (RuntimeError, TypeError):
            continue
        leaves = [x.clone().requires_grad_() for x in given]
        traced = recorded(op, leaves)
        by_tensor = {id(load.tensor): node for _, load, node in traced.function.grad_loads}
        for operand, gradient in enumerate(expected):
            if gradient is not None:
                nodes.append(
                    (by_tensor[id(leaves[operand])], traced.function.tensors, traced.function.numbers)
                )
                cases.append(Case(name, op, given, operand, gradient))
    sizes = max(len(case.gradient) for case in cases), 1
    return Written(nodes, sizes, torch.float64 if dtype == torch.float64 else torch.float32), cases


def is_right(case: Case, ours: Tensor) -> Tensor:
    """Says where our numbers are torch's, up to some units in the last place."""
    exact, info = case.gradient.double(), torch.finfo(case.gradient.dtype)
    same = (ours.isnan() & exact.isnan()) | (ours == exact)
    allowed = 32 * info.eps * exact.abs() + info.tiny
    if case.name in ("tanh", "gelu by tanh"):
        allowed += 8 * info.eps  # the rounding error of 1 - tanh(x)**2
    if case.name == "hardsigmoid":
        allowed += torch.finfo(torch.float32).eps  # torch's 1 / 6 has float32's digits
    return same | ((ours - exact).abs() <= allowed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    written, cases = compiled(dtype)
    wrong: list[str] = []
    for number, case in enumerate(cases):
        ours = written.compute(number, range(len(case.gradient))).squeeze(1)
        for at in (~is_right(case, ours)).nonzero().flatten().tolist():
            operands = ", ".join(str(x[at].item()) for x in case.given)
            numbers = f"{ours[at].item()}, torch {case.gradient[at].item()}"
            wrong.append(f"{case.name} ({operands}) by {case.operand}: {numbers}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
