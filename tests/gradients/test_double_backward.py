"""Second and third derivatives; first ones with a graph still run the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, exact_inputs
from test_gradients import CASES
from tolerances import assert_accurate
from torch.utils._python_dispatch import TorchDispatchMode

from selfattn_ext import attention_scores, masked_softmax, scaled_dot_product_attention

# There are thousands of tiny steps, which several threads only slow down.
pytestmark = pytest.mark.usefixtures("one_thread")


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
    with Operators() as plain:
        grads = torch.autograd.grad(out.sum(), list(tensors.values()), retain_graph=True)
    with Operators() as graph:
        with_graph = torch.autograd.grad(out.sum(), list(tensors.values()), create_graph=True)
    for names in (plain.names, graph.names):
        assert names.count("attention_backward") == 1
        assert not {"bmm", "matmul", "exp"} & set(names)
    assert all(torch.equal(*pair) for pair in zip(grads, with_graph, strict=True))
    assert all(grad.requires_grad for grad in with_graph)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"sinks": torch.zeros(2)}], ids=str)
def test_the_second_derivative_alone_runs_its_kernel_alone(options: dict[str, Any]) -> None:
    """The engine would visit the forward's node, too, if the graph of the gradients led back to it."""
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = scaled_dot_product_attention(query, key, value, **options)
    out = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
    with Operators() as operators:
        torch.autograd.grad(sum(gradient.sum() for gradient in gradients), (query, key, value))
    ours = [name for name in operators.names if "attention" in name]
    assert ours == ["attention_backward_backward"]


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


def test_masked_softmax_and_scores() -> None:
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 1, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda scores, mask: masked_softmax(scores, mask, scale=0.7, is_causal=True, query_offset=1),
        (scores, mask),
        fast_mode=True,
    )
    query = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 2, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda q, k: attention_scores(q, k, 0.3, enable_gqa=True), (query, key), fast_mode=True
    )


def test_hidden_nan_stays_hidden() -> None:
    query, key, value = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[:, 1] = False
    seconds = []
    for junk in (0.0, torch.nan):
        points = [tensor.clone() for tensor in (query, key, value)]
        points[1][:, :, 1] = junk
        points[2][:, :, 1] = junk
        points = [point.requires_grad_() for point in points]
        out = scaled_dot_product_attention(*points, seen)
        grads = torch.autograd.grad(out.sin().sum(), points, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), points))
    for clean, dirty in zip(*seconds, strict=True):
        torch.testing.assert_close(clean, dirty)
