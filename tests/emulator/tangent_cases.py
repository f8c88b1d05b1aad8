"""Forward mode and second derivatives of every option on one kernel in the emulator, judged by the formula.

    PYTHONPATH=tests SELFATTN_KERNEL=simt python -m emulator.tangent_cases [EVERY [FIRST [MOST]]]

prints a digest of the results of each: see run_cases.py. NaN where something is hidden, in inputs and in
tangents, must change nothing; a batch element, or a sequence, must have the bits that it has alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, cotangents_of, drawn, dropout_seed, exact_inputs, laid_out
from test_options_pairwise import as_case, covering
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import ops, reference

from . import run_cases
from .backward_cases import fill_hidden
from .sequence_case import Named, SequenceCase
from .sequence_cases import numbers_of_call

#: Inputs that have tangents and second derivatives, as the operators order them.
INPUTS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
TANGENTS = {name: f"tangent_{name.removeprefix('attn_').removeprefix('alibi_')}" for name in INPUTS}
#: What has its own part for each query, and for each key.
OF_QUERIES = ("out", "row_max", "row_sum", "tangent of out", "tangent of lse", "grad of query")
OF_KEYS = ("grad of key", "grad of value")

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "length": [(1, 1), (64, 64), (65, 65), (7, 13), (5, 130), (130, 40), (66, 129)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (33, 65), (80, 16), (5, 9), (130, 16), (16, 130)],
    "layout": ["contiguous", "transposed", "expanded", "offset"],  # those that the operators take
    "grad_layout": list(LAYOUTS),
    "mask": [None, *MASKS, "float tiles", "float number"],
    "is_causal": [False, True],
    "query_offset": [0, 5, -20],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
    "lse": [False, True],
    "missing": [(), ("query",), ("key", "value"), ("value", "sinks"), ("query", "key"), INPUTS[3:]],
    "batch": [1, 2],
}

#: Queries and keys of sequences: none, one, around the edges of tiles.
LENGTHS = (((5, 5), (0, 3), (70, 70), (1, 130)), ((64, 64), (65, 1), (3, 0), (17, 63)), ((1, 65), (20, 200)))

SEQUENCE_OPTIONS: dict[str, list[Any]] = {
    "lengths": list(LENGTHS),
    "dtype": list(DTYPES),
    "form": ["packed", "cache", "pages", "packed cache", "packed pages"],
    "head_counts": [(2, 2), (3, 1)],
    "page_size": [16, 7],
    "mask": [None, "bool", "float heads", "float rows", "float keys"],
    "is_causal": [False, True],
    "offsets": ["end", "each"],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
}


@dataclass(frozen=True)
class TangentCase(Case):
    missing: tuple[str, ...] = ()  # inputs whose tangent is

    def given(self) -> Named:
        """The inputs in the operators' form."""
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


def cases() -> list[Case]:
    """Every pair of values of two options in some case, and the same of sequences."""
    dense = []
    for index, row in enumerate(covering(OPTIONS)):
        missing = row.pop("missing")
        dense.append(TangentCase(**vars(as_case(index, row)), missing=missing))
    sequences = []
    for index, row in enumerate(covering(SEQUENCE_OPTIONS)):
        heads, kv_heads = row.pop("head_counts")
        sequences.append(SequenceCase(heads=heads, kv_heads=kv_heads, seed=index, **row).made())
    return [*dense, *sequences]


def tangents_of(case: Case, given: Named) -> Named:
    """A direction: those of hidden elements of the mask are NaN, which the formula is not told."""
    generator = torch.Generator().manual_seed(3000 + case.seed)
    missing = case.missing if isinstance(case, TangentCase) else ()
    tangents = {}
    for name in INPUTS:
        if name in given and given[name].is_floating_point():
            tangent = drawn(given[name].shape, generator).to(given[name].dtype)
            if name == "attn_mask":
                tangent = tangent.masked_fill(given[name] == -torch.inf, torch.nan)
            elif name in INPUTS[:3] and not isinstance(case, SequenceCase):
                tangent = laid_out(tangent, case.grad_layout)
            if name not in missing:
                tangents[name] = tangent
    return tangents


def derivatives(case: Case, given: Named, tangents: Named, cotangents: Named) -> Named:
    """Results, their tangents, and the gradients of <cotangents, tangents of results>, by the formula."""
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


def operators(case: Case, numbers: dict[str, Any], given: Named, tangents: Named, gradients: Named) -> Named:
    """What both operators return; keys in pages have no second derivatives."""
    numbers = dict(numbers)
    window = numbers.pop("window_size", (-1, -1))
    options: dict[str, Any] = {**numbers, "window_left": window[0], "window_right": window[1]}
    options |= {"scale": reference.default_scale(case.head_dim), "kernel_name": os.environ["SELFATTN_KERNEL"]}
    if case.dropout_p:
        options["dropout_seed"] = dropout_seed(case.seed)
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
        assert_same(results[name], again, f"{name} of both operators")
    named = zip(INPUTS, grads, strict=True)
    return results | {f"grad of {name}": grad for name, grad in named if grad.numel()}


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    assert run_cases.bytes_of(found) == run_cases.bytes_of(expected), what


def judge(case: Case, given: Named, tangents: Named, cotangents: Named, results: Named) -> None:
    """Asserts that results are accurate, as the table of tolerances demands."""
    exact_tangents = {name: tangent.double() for name, tangent in tangents.items()}
    exact = derivatives(case, exact_inputs(given), exact_tangents, cotangents)
    peer = derivatives(case, *(_in_another_order(case, it) for it in (given, tangents)), cotangents)
    peer |= _in_another_order(case, {name: peer[name] for name in peer if name.startswith("grad")})
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


def _in_another_order(case: Case, tensors: Named) -> Named:
    """In float64 the head dim backwards, as cases.Judge has it; of gradients, back again."""
    if case.dtype != torch.float64:
        return tensors
    turned = [name for name in tensors if name.endswith(("query", "key"))]
    return tensors | {name: tensors[name].flip(-1) for name in turned}


def _largest_terms(case: Case, given: Named, tangents: Named, grad_out: Tensor) -> float:
    """The size of what second derivatives of scores are differences of: gradients of weights times tangents
    of scores. Rounding errors are in proportion to either.
    """
    scale = reference.default_scale(case.head_dim)
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


@torch.no_grad()
def check(case: Case) -> Named:
    """Asserts that results are accurate, that NaN in what is hidden changes no bit of them, and that they are
    those of each sequence, or batch element, alone. Returns them.
    """
    return check_sequences(case) if isinstance(case, SequenceCase) else check_dense(case)


def check_dense(case: TangentCase) -> Named:
    given = case.given()
    tangents = tangents_of(case, given)
    gradients = gradients_for(case, given)
    results = operators(case, case.numbers(), given, tangents, gradients)
    judge(case, given, tangents, cotangents_from(case, gradients), results)
    if case.batch == 2 and not case.dropout_p:  # which would count it as the first
        parts = [{name: it[1:] if it.shape[0] == 2 else it for name, it in named.items()}
                 for named in (given, tangents, gradients)]  # fmt: skip
        alone = operators(case, case.numbers(), *parts)
        for name in (*OF_QUERIES, *OF_KEYS):
            assert_same(results[name][1:], alone[name], f"{name} alone")
    unused = {name: torch.zeros_like(given[name]) for name in ("query", "key", "value")}
    hidden = fill_hidden(case, given | {"out": gradients["grad_out"]})
    if hidden:
        fill_hidden(case, {**unused, **tangents, "out": gradients["grad_out"]})
        again = operators(case, case.numbers(), given, tangents, gradients)
        for name, result in results.items():
            assert_same(again[name], result, f"{name}, with NaN in what is hidden")
    return results


def check_sequences(case: SequenceCase) -> Named:
    given = {name: tensor.detach() for name, tensor in case.inputs().items()}
    tangents = tangents_of(case, given)
    gradients = gradients_for(case, given)
    numbers = numbers_of_call(case)
    filled, filled_gradients = case.filled(given), case.filled({**given, **gradients})
    filled_tangents = case.filled({**given, **tangents})
    of_call = [
        filled,
        {name: filled_tangents[name] for name in tangents},
        {name: filled_gradients[name] for name in gradients},
    ]
    results = operators(case, numbers, *of_call)
    judge(case, given, tangents, cotangents_from(case, gradients), results)
    for b in range(case.batch if not case.dropout_p else 1):
        alone = [case.of_sequence({**given, **named}, b) for named in (given, tangents, gradients)]
        alone[1] = {name: alone[1][name] for name in tangents}
        alone[2] = {name: alone[2][name] for name in gradients}
        found = operators(case, case.numbers_of(b), *alone)
        for name in results.keys() & {*OF_QUERIES, *OF_KEYS}:
            of_queries = name in OF_QUERIES
            part = case.query_rows(results[name], b) if of_queries else case.key_rows(results, name, b)
            assert_same(part, found.get(name, part), f"{name} of sequence {b}, alone")
    return results


def gradients_for(case: Case, given: Named) -> Named:
    """What the backward of the operators is given: the gradients of out and, in some cases, of lse."""
    zeros = {name: it.detach() for name, it in replace(case, lse=True).formula(given).items()}
    cotangents = cotangents_of(zeros, case.seed)
    gradients = {"grad_out": laid_out(cotangents["out"], case.grad_layout)}
    if case.lse or isinstance(case, SequenceCase):
        gradients["grad_row"] = -cotangents["lse"].to(reference.accumulation_dtype(case.dtype))
    return gradients


def cotangents_from(case: Case, gradients: Named) -> Named:
    """The same as the formula takes them."""
    rows = gradients["grad_out"].shape[:-1]
    of_lse = -gradients["grad_row"] if "grad_row" in gradients else torch.zeros(rows, dtype=torch.float64)
    return {"out": gradients["grad_out"], "lse": of_lse}


if __name__ == "__main__":
    run_cases.main(cases(), check)
