"""Second and third derivatives; first ones with a graph still run the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import Case, exact_inputs
from comparisons import assert_same
from ran import operators
from test_gradients import CASES
from tolerances import assert_accurate

from selfattn_ext import scaled_dot_product_attention

# There are thousands of tiny steps, which several threads only slow down.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_finite_differences(case: Case) -> None:
    assert torch.autograd.gradgradcheck(*case.as_function(), fast_mode=True)


def test_every_pair_of_inputs() -> None:
    """Mixed second derivatives are checked one by one, so that the others hide none."""
    case = Case(
        queries=3, keys=4, head_dim=2, value_dim=2, dtype=torch.float64, mask="float", alibi=1, sinks=True,
        softcap=0.8, weights=True, lse=True, dropout_p=0.3, batch=1,
    )  # fmt: skip
    tensors = case.inputs()
    tensors["attn_mask"] = tensors["attn_mask"].detach().nan_to_num(neginf=-1.0).requires_grad_()
    names = list(tensors)

    def total(function: Any, *points: torch.Tensor) -> torch.Tensor:
        return sum(
            result.double().sin().sum() for result in function(dict(zip(names, points, strict=True))).values()
        )

    points = tuple(tensor.detach().double() for tensor in tensors.values())
    ours = torch.autograd.functional.hessian(lambda *points: total(case.run, *points), points)
    exact = torch.autograd.functional.hessian(lambda *points: total(case.formula, *points), points)
    for row, exact_row in zip(ours, exact, strict=True):
        for block, exact_block in zip(row, exact_row, strict=True):
            torch.testing.assert_close(block, exact_block)
            assert block.any()


def test_third_derivative() -> None:
    case = Case(queries=3, keys=4, head_dim=2, value_dim=2, dtype=torch.float64, is_causal=True, softcap=1.0)

    def third(function: Any) -> list[torch.Tensor]:
        tensors = case.inputs()
        total = function(tensors)["out"].sin().sum()
        for _ in range(2):
            grads = torch.autograd.grad(total, list(tensors.values()), create_graph=True)
            total = sum(grad.square().sum() for grad in grads)
        return list(torch.autograd.grad(total, list(tensors.values())))

    for grad, exact in zip(third(case.run), third(case.formula), strict=True):
        torch.testing.assert_close(grad, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    case = Case(queries=5, keys=6, dtype=dtype, sinks=True)
    tensors = case.inputs()

    def second(run: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (grad,) = torch.autograd.grad(run(tensors)["out"].sum(), tensors["query"], create_graph=True)
        total = grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum()
        return torch.autograd.grad(total, [tensors[name] for name in ("query", "key", "sinks")])

    exact = second(case.formula, exact_inputs(tensors))
    for results in zip(second(case.run, tensors), exact, second(case.formula, tensors), strict=True):
        assert_accurate("second derivative", *results, dtype=dtype)


def test_first_derivative_with_a_graph_runs_the_kernel() -> None:
    case = Case(dtype=torch.float64, mask="float")
    tensors = case.inputs()
    out = case.run(tensors)["out"]
    grads: list[tuple[torch.Tensor, ...]] = []

    def differentiate(option: str) -> None:
        grads.append(torch.autograd.grad(out.sum(), list(tensors.values()), **{option: True}))

    for option in ("retain_graph", "create_graph"):
        ran = operators(partial(differentiate, option))
        assert ran["selfattn::attention_backward"] == 1
        assert not {"aten::bmm", "aten::matmul", "aten::exp"} & ran.keys()
    assert_same(*grads)
    assert all(grad.requires_grad for grad in grads[1])


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"sinks": torch.zeros(2)}], ids=str)
def test_the_second_derivative_alone_runs_its_kernel_alone(options: dict[str, Any]) -> None:
    """The engine would visit the forward's node, too, if the graph of the gradients led back to it."""
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = scaled_dot_product_attention(query, key, value, **options)
    out = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
    total = sum(gradient.sum() for gradient in gradients)
    ran = operators(lambda: torch.autograd.grad(total, (query, key, value)))
    ours = {name: count for name, count in ran.items() if name.startswith("selfattn::")}
    assert ours == {"selfattn::attention_backward_backward": 1}


def test_gradient_penalty_step() -> None:
    """This is the usual purpose: the norm of an input gradient in the loss."""
    tensors = Case(dtype=torch.float64).inputs()
    losses = []
    for function in (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        points = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        # torch's fused kernel has no second derivative.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = function(**points, is_causal=True)
        (grad,) = torch.autograd.grad(out.square().mean(), points["query"], create_graph=True)
        (out.mean() + grad.norm()).backward()
        losses.append([point.grad for point in points.values()])
    for ours, expected in zip(*losses, strict=True):
        torch.testing.assert_close(ours, expected)
