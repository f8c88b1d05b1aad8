"""Packed sequences, caches and pages, on one kernel.

The formula of each sequence judges the operators' results, which must have the bits of a call for that
sequence alone. Memory outside of the sequences is NaN, and unused page numbers are those of no page.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, Case, Judge, cotangents_of, dropout_seed
from option_pairs import covering
from torch import Tensor

from selfattn_ext import ops, reference

from .digests import bytes_of
from .sequence_case import Named, SequenceCase

#: Queries and keys of each sequence: none, one, around the edges of tiles and of the kernels for few queries.
LENGTHS = (
    ((5, 5), (0, 3), (70, 70), (1, 130)),
    ((64, 64), (65, 1), (0, 0), (3, 0), (17, 63)),
    ((16, 200), (17, 200)),
    ((1, 1), (1, 65), (1, 128)),
    ((130, 7), (129, 140)),
    # Keys of few queries are cut into three, two or one splits; keys of many queries are not cut.
    ((1, 600), (16, 257), (40, 300), (2, 30)),
)

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "lengths": list(LENGTHS),
    # Packed queries and keys; keys in a cache or in pages; the same with packed queries.
    "form": ["packed", "cache", "pages", "packed cache", "packed pages"],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (64, 64), (80, 16), (33, 65), (128, 128)],
    "page_size": [1, 16, 7, 128],
    "layout": ["contiguous", "transposed", "offset"],
    "mask": [None, "bool", "float", "bool keys", "float heads", "float rows", "float keys"],
    "is_causal": [False, True],
    "offsets": ["one", "end", "each"],
    "query_offset": [0, 5],
    "window": [(-1, -1), (70, -1), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
}


def cases() -> list[SequenceCase]:
    """Every pair of values of two options, calls without options, and keys after the end of sequences."""
    chosen = []
    for index, row in enumerate(covering(OPTIONS)):
        heads, kv_heads = row.pop("head_counts")
        head_dim, value_dim = row.pop("dims")
        case = SequenceCase(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, seed=index, **row
        )
        chosen.append(case.made())
    return [*chosen, *_bare_cases(), *_end_cases()]


def _end_cases() -> list[SequenceCase]:
    """Cases in which only a sequence's end hides the keys after it. The gradient of the slopes would show
    those keys; the gradient of queries would not, because such keys are zeros.
    """
    lengths = ((70, 40), (5, 70), (3, 20))
    cases = [
        SequenceCase(heads=2, kv_heads=1, dtype=dtype, lengths=lengths, alibi=2)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return [case.made() for case in cases]


def _bare_cases() -> list[SequenceCase]:
    """Calls without options, for which kernels for tensor cores have a path of their own, at each of its
    widths.
    """
    widths = (64, 128, 256)
    return [
        SequenceCase(
            heads=2,
            kv_heads=1,
            head_dim=width,
            value_dim=width,
            dtype=dtype,
            lengths=LENGTHS[turn % len(LENGTHS)],
            is_causal=turn % 2 == 0,
            offsets=("end", "one", "each")[turn % 3],
        ).made()
        for turn, (width, dtype) in enumerate(itertools.product(widths, DTYPES[1:]))
    ]


def _call(name: str, **arguments: Any) -> Any:
    """Calls an operator with the kernel of the process, which callers of operators have to name."""
    results = getattr(ops, name)(**arguments, kernel_name=os.environ.get("SELFATTN_KERNEL", ""))
    return (results,) if isinstance(results, Tensor) else results


def operators(given: Named, case: Case, numbers: dict[str, Any], call: Callable[..., Any] = _call) -> Named:
    """Forward, weights unless keys are selected, and, unless keys lie in pages, gradients, as the operators
    return them.
    """
    numbers = dict(numbers)
    window = numbers.pop("window_size", (-1, -1))
    options: dict[str, Any] = {**numbers, "window_left": window[0], "window_right": window[1]}
    options["scale"] = reference.default_scale(case.head_dim)
    if case.dropout_p:
        options["dropout_seed"] = dropout_seed(case.seed)
    gradients = {name: given[name] for name in ("grad_out", "grad_row", "grad_weights") if name in given}
    given = {name: tensor for name, tensor in given.items() if name not in gradients}
    rounds = case.dtype in ops.SIXTEEN_BITS
    out, row_max, row_sum, residual = call("attention_forward", **given, **options, need_residual=rounds)
    statistics = {"row_max": row_max, "row_sum": row_sum}
    value = given.pop("value")
    results = {"out": out, **statistics}
    if "selection" not in given:
        (results["weights"],) = call("attention_weights", **given, **options, **statistics)
    if not gradients:  # keys in pages have none
        return results
    mask = given.get("attn_mask")
    grads = call(
        "attention_backward",
        **gradients,
        **given,
        value=value,
        **options,
        **statistics,
        out=out,
        out_residual=residual if rounds else None,
        need_mask_grad=mask is not None and mask.is_floating_point() and "selection" not in given,
    )
    inputs = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
    named = zip(inputs, grads, strict=True)
    return results | {f"grad of {name}": grad for name, grad in named if grad.numel()}


def given_by(case: SequenceCase, tensors: Named) -> tuple[Named, Judge]:
    """Arguments for the operators, with NaN outside of the sequences, and the judge of their results."""
    asked = replace(case, weights=True, lse=True)
    if case.in_pages:
        return case.filled(tensors), Judge(asked, tensors)
    zeros = {name: it.detach() for name, it in asked.formula(tensors).items()}
    cotangents = cotangents_of(zeros, case.seed)
    if not case.weights:
        cotangents = {name: it if name == "out" else torch.zeros_like(it) for name, it in cotangents.items()}
    judge = Judge(asked, tensors, cotangents)
    given = {**tensors, "grad_out": cotangents["out"]}
    if case.weights:
        # See Note [Gradient of weights and lse] in selfattn_ext/autograd/attention_function.py.
        of_weights = (judge.exact["weights"].detach() * cotangents["weights"].double()).sum(-1)
        parts = [of_weights[b : b + 1, :, : case.lengths[b][0]] for b in range(case.batch)]
        rows = case.joined(parts, 0.0) - cotangents["lse"].double()
        given["grad_row"] = rows.to(reference.accumulation_dtype(case.dtype))
        given["grad_weights"] = cotangents["weights"]
    return case.filled(given), judge


def numbers_of_call(case: SequenceCase) -> dict[str, Any]:
    """The numbers of the call for the whole batch."""
    longest: dict[str, Any] = {}
    if case.packs_queries:
        longest["max_seqlen_q"] = case.queries
    if case.packs_keys:
        longest["max_seqlen_k"] = case.keys
    return {**case.numbers(), **longest}


def assert_accurate(judge: Judge, results: Named) -> None:
    """Asserts that the operators' results are accurate."""
    judged = dict(results)
    judged["lse"] = judged.pop("row_max") + judged.pop("row_sum").log()
    judge.assert_accurate(judged)


def assert_alone(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts that each sequence gets the bits that it gets alone."""
    for b in range(case.batch if not case.dropout_p else 1):  # dropout would count it as element 0
        queries, keys = case.lengths[b]
        alone = operators(case.of_sequence(given, b), case, case.numbers_of(b))
        parts = {name: case.query_rows(results[name], b) for name in ("out", "row_max", "row_sum")}
        if "weights" in results:
            parts["weights"] = results["weights"][b : b + 1, :, :queries, :keys]
        if "grad of query" in results:
            parts["grad of query"] = case.query_rows(results["grad of query"], b)
            for name in ("grad of key", "grad of value"):
                parts[name] = case.key_rows(results, name, b)
        for name, part in parts.items():
            found, expected = (bytes_of(it) for it in (part, alone.get(name, part)))
            assert found == expected, f"{name} of sequence {b} is not what it is alone"


def assert_undisturbed(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts that NaN in one packed sequence changes no bit of the others."""
    spoilt = max(range(case.batch), key=lambda b: case.lengths[b])
    given = {name: tensor.clone() for name, tensor in given.items()}
    for name in given.keys() & {"query", "grad_out", "grad_row"}:
        case.query_rows(given[name], spoilt).fill_(torch.nan)
    for name in ("key", "value"):
        case.key_rows(given, name, spoilt).fill_(torch.nan)
    again = operators(given, case, numbers_of_call(case))
    for b in set(range(case.batch)) - {spoilt}:
        for name in ("out", "grad of query", "grad of key", "grad of value"):
            side = int(name.endswith(("key", "value")))
            parts = (case.rows(of[name], b, side, True) for of in (results, again))
            found, expected = map(bytes_of, parts)
            assert found == expected, f"{name} of sequence {b}, with NaN in another"


def assert_longest_does_not_matter(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts that the bits are the same if the longest sequence is said to be longer than it is."""
    more = replace(case, queries=case.queries + 70, keys=case.keys + 70)
    given = dict(given)
    for name in given.keys() & {"attn_mask", "grad_weights"}:
        grows = [70 if size > 1 or name == "grad_weights" else 0 for size in given[name].shape[2:]]
        given[name] = torch.nn.functional.pad(given[name], (0, grows[1], 0, grows[0]), value=1.0)
    again = operators(given, more, numbers_of_call(more))
    for name, result in results.items():
        other = again[name]
        if name == "grad of attn_mask" and result.shape[0] < case.batch:
            continue  # the order of its sums over the batch follows from the longest sequence
        if result.shape != other.shape:
            other = other[:, :, : result.shape[2], : result.shape[3]]
        assert bytes_of(result) == bytes_of(other), f"{name}, with a longer maximum"


@torch.no_grad()
def check(case: SequenceCase) -> Named:
    """Asserts that results and gradients are accurate and those of each sequence alone. Returns them."""
    with torch.enable_grad():
        given, judge = given_by(case, case.inputs())
    results = operators(given, case, numbers_of_call(case))
    assert_accurate(judge, results)
    assert_alone(case, given, results)
    if _has_others(case):
        assert_undisturbed(case, given, results)
        assert_longest_does_not_matter(case, given, results)
    return results


@torch.no_grad()
def compute(case: SequenceCase) -> Named:
    """Computes the results of `check`, for comparison with accurate ones. It leaves out calls for single
    sequences, which other modules' cases cover, but not that for a longer maximum, which makes another grid.
    """
    with torch.enable_grad():
        given, _ = given_by(case, case.inputs())
    results = operators(given, case, numbers_of_call(case))
    if _has_others(case):
        assert_longest_does_not_matter(case, given, results)
    return results


def _has_others(case: SequenceCase) -> bool:
    """Whether a sequence shares packed tensors with another."""
    return case.form == "packed" and case.batch > 1
