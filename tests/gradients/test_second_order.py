"""Second derivatives by attention_backward_backward, in every mode that asks for them.

test_forward_mode.py has every pair of options.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from test_forward_mode import no_formula, qkv  # noqa: F401
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from selfattn_ext import reference, scaled_dot_product_attention, varlen_attention

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"is_causal": True, "softcap": 1.3}


def ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    out, lse = scaled_dot_product_attention(query, key, value, mask, return_lse=True, **OPTIONS)
    return out.sin().sum() + lse.cos().sum()


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    out, _, lse = reference.attention(query, key, value, mask, **OPTIONS)
    return out.sin().sum() + lse.cos().sum()


def every(points: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(points)))


#: name -> a derivative of a loss f at points, some along a direction.
COMPOSITIONS: dict[str, Any] = {
    "jvp of grad": lambda f, points, along: jvp(grad(f, every(points)), points, along),
    "grad of jvp": lambda f, points, along: grad(lambda *p: jvp(f, p, along)[1], every(points))(*points),
    "grad of grad": lambda f, points, along: grad(
        lambda *p: sum((g * t).sum() for g, t in zip(grad(f, every(points))(*p), along, strict=True)),
        every(points),
    )(*points),
    "hessian": lambda f, points, along: hessian(f, 3)(*points),
    "jacrev of jacfwd": lambda f, points, along: jacrev(jacfwd(f, 3), 3)(*points),
    "jacrev of jacrev": lambda f, points, along: jacrev(jacrev(f, 3), 3)(*points),
    "vmap of jvp of grad": lambda f, points, along: vmap(lambda *t: jvp(grad(f, every(points)), points, t))(
        *(torch.stack([t, 2 * t]) for t in along)
    ),
    "jvp of vmap of grad": lambda f, points, along: jvp(
        vmap(grad(f, every(points))),
        *(tuple(torch.stack([t, 2 * t]) for t in given) for given in (points, along)),
    ),
}
#: Derivatives of third order, and forward mode in forward mode.
BY_FORMULA: dict[str, Any] = {
    "jvp of jvp": lambda f, points, along: jvp(lambda *p: jvp(f, p, along)[1], points, along),
    "jvp of jvp of grad": lambda f, points, along: jvp(
        lambda *p: jvp(grad(f, every(points)), p, along)[1], points, along
    ),
    "grad of jvp of grad": lambda f, points, along: grad(
        lambda *p: sum(t.sin().sum() for t in jvp(grad(f, every(points)), p, along)[1]), every(points)
    )(*points),
    "jvp of grad of jvp": lambda f, points, along: jvp(
        grad(lambda *p: jvp(f, p, along)[1], every(points)), points, along
    ),
}


def compare(compute: Any) -> None:
    points = (*qkv(2, 3), torch.randn(2, 1, 3, dtype=torch.float64))
    along = tuple(torch.randn_like(point) for point in points)
    torch.testing.assert_close(compute(ours, points, along), compute(exact, points, along))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    formula = "selfattn_ext.autograd.by_formula.formula"
    monkeypatch.setattr(formula, lambda *arguments: calls.append(arguments))
    compare(COMPOSITIONS[name])
    assert not calls


@pytest.mark.parametrize("name", BY_FORMULA)
def test_higher_compositions(name: str) -> None:
    """torch turns forward mode off in a jvp, as Note [Nested forward mode] explains."""
    compare(BY_FORMULA[name])


def test_against_finite_differences(no_formula: None) -> None:  # noqa: F811
    case = Case(
        batch=1, heads=2, kv_heads=1, queries=2, keys=3, head_dim=2, value_dim=2, dtype=torch.float64,
        mask="float rows", sinks=1, softcap=1.2, lse=True,
    )  # fmt: skip
    function, points = case.as_function()
    assert torch.autograd.gradgradcheck(
        function, points, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


def test_packed_sequences(no_formula: None) -> None:  # noqa: F811
    points = tuple(torch.randn(7, 2, 3, dtype=torch.float64) for _ in range(3))
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)

    def packed(*points: Tensor) -> Tensor:
        return varlen_attention(*points, starts, starts, 4, 4, is_causal=True).sin().sum()

    def apart(*points: Tensor) -> Tensor:
        parts = [tuple(point[a:b].transpose(0, 1) for point in points) for a, b in ((0, 3), (3, 7))]
        return sum(reference.attention(*part, is_causal=True).out.sin().sum() for part in parts)

    for compute in (COMPOSITIONS["jvp of grad"], COMPOSITIONS["grad of jvp"]):
        results = [compute(function, points, points) for function in (packed, apart)]
        torch.testing.assert_close(*results)


def test_no_matrices() -> None:
    """With (L, S) matrices this would take several times 160 GB."""
    points = [torch.randn(1, 1, 200_000, 4, requires_grad=True) for _ in range(3)]

    def second(points: Any) -> Any:
        out = scaled_dot_product_attention(*points, window_size=(3, 0))
        grads = torch.autograd.grad(out[:, :, -4:].sin().sum(), points, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), points)

    tail = [point[:, :, -8:].detach().requires_grad_() for point in points]
    for result, expected in zip(second(points), second(tail), strict=True):
        torch.testing.assert_close(result[:, :, -8:], expected)


@pytest.mark.parametrize("name", ["jvp of grad", "grad of grad"])
def test_compiled(name: str) -> None:
    """This checks only the trace; tests/clients/test_inductor.py compiles by inductor."""
    points = tuple(
        point.requires_grad_() for point in (*qkv(2, 3), torch.randn(2, 1, 3, dtype=torch.float64))
    )
    along = tuple(torch.randn_like(point) for point in points)

    def step(*points: Tensor) -> Tensor:
        results = COMPOSITIONS[name](ours, points, along)
        return sum(part.sin().sum() for part in torch.utils._pytree.tree_leaves(results))

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    total, expected = compiled(*points), step(*points)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, points), torch.autograd.grad(expected, points))
