"""Forward mode and second derivatives as data: a case, a direction, and their judge.

The functions compute what the operators return for them, and what the formula returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case, cotangents_of, drawn, dropout_seed, exact_inputs, in_another_order, laid_out
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import ops, reference
from selfattn_ext.formula_steps import default_scale

#: The arguments or the results of operators, by name.
Named = dict[str, Tensor]

#: Inputs that have tangents and second derivatives, as the operators order them.
INPUTS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
TANGENTS = {name: f"tangent_{name.removeprefix('attn_').removeprefix('alibi_')}" for name in INPUTS}


@dataclass(frozen=True)
class TangentCase(Case):
    missing: tuple[str, ...] = ()  # the inputs that have no tangent

    def given(self) -> Named:
        """Returns the inputs in the operators' form."""
        tensors = self.inputs()
        if "attn_mask" in tensors:
            mask = tensors["attn_mask"]
            tensors["attn_mask"] = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        for name in tensors.keys() & {"alibi_slopes", "sinks"}:
            of_heads = tensors[name].reshape(-1, self.heads)
            tensors[name] = of_heads.to(reference.accumulation_dtype(self.dtype))
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def products(self) -> int:
        return 8 * super().products()


def tangents_of(case: Case, given: Named) -> Named:
    """Draws a direction. Tangents of hidden mask elements are NaN, except for the formula."""
    generator = torch.Generator().manual_seed(3000 + case.seed)
    missing = getattr(case, "missing", ())
    tangents = {}
    for name in INPUTS:
        if name in given and given[name].is_floating_point():
            tangent = drawn(given[name].shape, generator).to(given[name].dtype)
            if name == "attn_mask":
                tangent = tangent.masked_fill(given[name] == -torch.inf, torch.nan)
            elif name in INPUTS[:3]:
                tangent = laid_out(tangent, case.grad_layout)
            if name not in missing:
                tangents[name] = tangent
    return tangents


def derivatives(case: Case, given: Named, tangents: Named, cotangents: Named) -> Named:
    """Computes results, their tangents, and gradients of <cotangents, tangents of results> by the formula."""
    names = [name for name in INPUTS if name in given and given[name].is_floating_point()]
    directions = tuple(
        tangents[name].nan_to_num() if name in tangents else torch.zeros_like(given[name]) for name in names
    )

    def results(*points: Tensor) -> tuple[Tensor, Tensor]:
        found = replace(case, lse=True).formula({**given, **dict(zip(names, points, strict=True))})
        seen = found["lse"] > -torch.inf
        return found["out"], torch.where(seen, found["lse"], 0.0)

    def product(*points: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        of_results = torch.func.jvp(results, points, directions)
        tangents = of_results[1]
        total = sum(
            (cotangents[name].to(tangent.dtype) * tangent).sum()
            for name, tangent in zip(("out", "lse"), tangents, strict=True)
        )
        return total, (*of_results[0], *tangents)

    points = tuple(given[name].contiguous() for name in names)
    grads, found = torch.func.grad(product, tuple(range(len(names))), has_aux=True)(*points)
    return {
        **dict(zip(("out", "lse", "tangent of out", "tangent of lse"), found, strict=True)),
        **{f"grad of {name}": grad for name, grad in zip(names, grads, strict=True)},
    }


def operators(
    case: Case, kernel: str, numbers: dict[str, Any], given: Named, tangents: Named, gradients: Named
) -> Named:
    """Returns the results of both operators; keys in pages have no second derivatives."""
    numbers = dict(numbers)
    window = numbers.pop("window_size", (-1, -1))
    options: dict[str, Any] = {**numbers, "window_left": window[0], "window_right": window[1]}
    options |= {"scale": default_scale(case.head_dim), "kernel_name": kernel}
    if case.dropout_p:
        options["dropout_seed"] = dropout_seed(case.seed, case.device).to(given["query"].device)
    options |= {TANGENTS[name]: tangent for name, tangent in tangents.items()} | given
    rounds = case.dtype in ops.SIXTEEN_BITS
    out, row_max, row_sum, residual, *of_results = ops.attention_jvp(**options, need_residual=rounds)
    results = {"out": out, "row_max": row_max, "row_sum": row_sum}
    results |= dict(zip(("tangent of out", "tangent of lse"), of_results, strict=True))
    if "block_table" in given:
        return results
    mask = given.get("attn_mask")
    *grads, of_out, of_lse = ops.attention_backward_backward(
        **options,
        **gradients,
        out=out,
        row_max=row_max,
        row_sum=row_sum,
        out_residual=residual if rounds else None,
        need_mask_grad=mask is not None and mask.is_floating_point(),
    )
    for name, again in (("tangent of out", of_out), ("tangent of lse", of_lse)):
        assert torch.equal(results[name], again), f"{name} of both operators"
    named = zip(INPUTS, grads, strict=True)
    return results | {f"grad of {name}": grad for name, grad in named if grad.numel()}


def judge(case: Case, given: Named, tangents: Named, cotangents: Named, results: Named) -> None:
    """Asserts that results are accurate, as the table of tolerances demands."""
    exact_tangents = {name: tangent.double() for name, tangent in tangents.items()}
    exact = derivatives(case, exact_inputs(given), exact_tangents, cotangents)
    peer = derivatives(case, in_another_order(given), in_another_order(tangents), cotangents)
    peer |= in_another_order({name: peer[name] for name in peer if name.startswith("grad")})
    terms = _largest_terms(case, exact_inputs(given), exact_tangents, cotangents["out"])
    judged = dict(results)
    judged["lse"] = judged.pop("row_max") + judged.pop("row_sum").log()
    judged["lse"] = judged["lse"].masked_fill(judged["lse"] == -torch.inf, 0.0)
    for name, result in judged.items():
        is_grad = name.startswith("grad")
        size = terms if is_grad else 1.0
        if name == "grad of alibi_slopes":
            size *= case.queries + case.keys + abs(case.query_offset)
        expected, of_peer = exact[name].detach(), peer[name].detach()
        assert_accurate(name, result, expected, of_peer, size, case.dtype if is_grad else None)


def _largest_terms(case: Case, given: Named, tangents: Named, grad_out: Tensor) -> float:
    """Returns the size of the terms whose differences are second derivatives of scores.

    They are gradients of weights times tangents of scores, and rounding errors are proportional to both.
    """
    scale = default_scale(case.head_dim)
    of_scores = torch.ones((), dtype=torch.float64)
    for name, other in (("query", "key"), ("key", "query")):
        if name in tangents:
            longest = tangents[name].norm(dim=-1).max() * given[other].norm(dim=-1).max()
            of_scores = of_scores + scale * longest
    if "attn_mask" in tangents:
        of_scores = of_scores + tangents["attn_mask"].nan_to_num().abs().max()
    if "alibi_slopes" in tangents:
        distance = case.queries + case.keys + abs(case.query_offset)
        of_scores = of_scores + tangents["alibi_slopes"].abs().max() * distance
    kept_scale = 1 / (1 - case.dropout_p)
    return float(of_scores) * kept_scale * float(grad_out.double().abs().max())


def gradients_for(case: Case, given: Named) -> Named:
    """Draws what the operators' backward is given: the gradients of out and, in some cases, of lse."""
    zeros = {name: it.detach() for name, it in replace(case, lse=True).formula(given).items()}
    cotangents = cotangents_of(zeros, case.seed)
    gradients = {"grad_out": laid_out(cotangents["out"], case.grad_layout)}
    if case.lse:
        gradients["grad_row"] = -cotangents["lse"].to(reference.accumulation_dtype(case.dtype))
    return gradients


def cotangents_from(case: Case, gradients: Named) -> Named:
    """Returns these gradients in the formula's form."""
    rows = gradients["grad_out"].shape[:-1]
    of_lse = -gradients["grad_row"] if "grad_row" in gradients else torch.zeros(rows, dtype=torch.float64)
    return {"out": gradients["grad_out"], "lse": of_lse}
