"""Forward mode and second derivatives of cases, judged by the formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case, cotangents_of, drawn, exact_inputs, in_another_order, remembered
from option_pairs import OPTIONS, as_case, covering
from tolerances import assert_accurate
from torch import Tensor

Tensors = dict[str, Tensor]

#: Every pair of options, without weights, which are matrices themselves and use the formula.
CASES = [
    as_case(index, row) for index, row in enumerate(covering({**OPTIONS, "weights": [False], "lse": [True]}))
]


def directions(tensors: Tensors, seed: int) -> Tensors:
    """Draws a tangent for each differentiable tensor; those of expanded ones are expanded, as in torch."""
    generator = torch.Generator().manual_seed(3000 + seed)

    def tangent(tensor: Tensor) -> Tensor:
        found = drawn(tensor.shape, generator).to(tensor)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                found = found.narrow(dim, 0, min(1, tensor.size(dim))).expand(tensor.shape)
        return found

    return {name: tangent(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}


def moving(function: Callable[[Tensors], Tensors], tensors: Tensors, tangents: Tensors) -> Tensors:
    """Computes the results and their tangents by torch.func.jvp."""

    def of_points(points: Tensors) -> Tensors:
        return function({**tensors, **points})

    points = {name: tensors[name].detach() for name in tangents}
    results, found = torch.func.jvp(of_points, (points,), (tangents,))
    return results | {f"tangent of {name}": _of_rows(results[name], found[name]) for name in results}


def twice(
    function: Callable[[Tensors], Tensors], tensors: Tensors, cotangents: Tensors, tangents: Tensors
) -> Tensors:
    """Computes the gradients of <gradients, tangents> by the inputs and by the cotangents of the results."""
    points = {name: tensors[name].detach().requires_grad_() for name in tangents}
    incoming = {name: cotangent.detach().requires_grad_() for name, cotangent in cotangents.items()}
    results = function({**tensors, **points})
    grads = torch.autograd.grad(
        [results[name] for name in incoming],
        list(points.values()),
        list(incoming.values()),
        create_graph=True,
        allow_unused=True,
    )
    used = [(grad, tangents[name]) for name, grad in zip(points, grads, strict=True) if grad is not None]
    sources = points | {f"cotangent of {name}": cotangent for name, cotangent in incoming.items()}
    found = torch.autograd.grad(
        [grad for grad, _ in used],
        list(sources.values()),
        [tangent for _, tangent in used],
        allow_unused=True,
    )
    second = {
        f"second derivative by {name}": torch.zeros_like(source) if grad is None else grad
        for (name, source), grad in zip(sources.items(), found, strict=True)
    }
    lse = "second derivative by cotangent of lse"
    return second | ({lse: _of_rows(results["lse"], second[lse])} if lse in second else {})


def _of_rows(result: Tensor, tangent: Tensor) -> Tensor:
    """Returns the tangent with 0 for rows that see nothing, whose log-sum-exp has no derivative."""
    return tangent.masked_fill(result == -torch.inf, 0.0)


@remembered
def judge(case: Case, tensors: Tensors, cotangents: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
    """Returns what :func:`moving` and :func:`twice` should return, and what the formula returns in the
    case's dtype.
    """

    def found(tensors: Tensors, cotangents: Tensors, tangents: Tensors) -> Tensors:
        first = moving(case.formula, tensors, tangents)
        results = first | twice(case.formula, tensors, cotangents, tangents)
        return {name: result.detach() for name, result in results.items()}

    exact = found(*(exact_inputs(given) for given in (tensors, cotangents, tangents)))
    # The elements of tangents are in the order of those of their tensors.
    peer = found(in_another_order(tensors), cotangents, in_another_order(tangents))
    peer |= in_another_order({name: peer[name] for name in peer if name.startswith("second derivative")})
    return exact, peer


def check(case: Case) -> None:
    """Asserts that forward mode and second derivatives are as accurate as the table of tolerances demands."""
    tensors = case.inputs()
    tangents = directions(tensors, case.seed)
    ours = moving(case.run, tensors, tangents)
    cotangents = cotangents_of({name: ours[name] for name in ("out", "lse")}, case.seed)
    ours |= twice(case.run, tensors, cotangents, tangents)
    exact, peer = judge(case, tensors, cotangents, tangents)
    for name, result in ours.items():
        assert_accurate(name, result.detach(), exact[name], peer[name], dtype=case.dtype)
