"""Forward mode and second derivatives of every option on one kernel, judged by the formula.

NaN in hidden places of inputs and tangents must change nothing, and a batch element or sequence must have the
bits that it has alone.
"""

from __future__ import annotations

import os
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case
from option_pairs import as_case, covering
from tangent_case import (
    INPUTS,
    Named,
    TangentCase,
    cotangents_from,
    gradients_for,
    judge,
    tangents_of,
)
from tangent_case import operators as operators_on
from torch import Tensor

from .backward_cases import fill_hidden
from .digests import bytes_of
from .sequence_case import SequenceCase
from .sequence_cases import numbers_of_call

#: Results with a row for each query, and for each key.
OF_QUERIES = ("out", "row_max", "row_sum", "tangent of out", "tangent of lse", "grad of query")
OF_KEYS = ("grad of key", "grad of value")

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "length": [(1, 1), (64, 64), (65, 65), (7, 13), (5, 130), (130, 40), (66, 129)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (33, 65), (80, 16), (5, 9), (130, 16), (16, 130)],
    "layout": ["contiguous", "transposed", "expanded", "offset"],  # the layouts that the operators take
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
    "mask": [None, "bool", "float", "float heads", "float rows", "float keys"],
    "is_causal": [False, True],
    "offsets": ["end", "each"],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
}


def cases() -> list[Case]:
    """Every pair of values of two options, and the same for sequences."""
    dense = []
    for index, row in enumerate(covering(OPTIONS)):
        missing = row.pop("missing")
        dense.append(TangentCase(**vars(as_case(index, row)), missing=missing))
    sequences = []
    for index, row in enumerate(covering(SEQUENCE_OPTIONS)):
        heads, kv_heads = row.pop("head_counts")
        sequences.append(SequenceCase(heads=heads, kv_heads=kv_heads, lse=True, seed=index, **row).made())
    return [*dense, *sequences]


def operators(case: Case, numbers: dict[str, Any], *tensors: Named) -> Named:
    return operators_on(case, os.environ["SELFATTN_KERNEL"], numbers, *tensors)


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    assert bytes_of(found) == bytes_of(expected), what


@torch.no_grad()
def check(case: Case) -> Named:
    """Asserts that results are accurate, that NaN in hidden places changes no bit of them, and that each
    sequence or batch element has the bits that it has alone. Returns the results.
    """
    return check_sequences(case) if isinstance(case, SequenceCase) else check_dense(case)


def check_dense(case: TangentCase) -> Named:
    given = case.given()
    tangents = tangents_of(case, given)
    gradients = gradients_for(case, given)
    results = operators(case, case.numbers(), given, tangents, gradients)
    judge(case, given, tangents, cotangents_from(case, gradients), results)
    if case.batch == 2 and not case.dropout_p:  # dropout would count it as element 0
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
    if case.form == "packed" and "attn_mask" in given:
        assert_own_masks_are_the_same(case, numbers, of_call, results)
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


def own_masks(case: SequenceCase, mask: Tensor) -> list[Tensor]:
    """The part of a mask, or of its gradient, for each sequence."""
    return [case.pairs(mask, b) for b in range(case.batch)]


def joined_masks(case: SequenceCase, named: Named) -> Named:
    """The tensors with a separate mask for each sequence, in one batch."""
    if "attn_mask" not in named:
        return named
    return named | {"attn_mask": torch.cat([it.reshape(-1) for it in own_masks(case, named["attn_mask"])])}


def assert_own_masks_are_the_same(
    case: SequenceCase, numbers: dict[str, Any], of_call: list[Named], results: Named
) -> None:
    """Checks that a separate mask for each sequence gives the results of the shared mask, or of its parts."""
    mask = of_call[0]["attn_mask"]
    shapes = [size for own in own_masks(case, mask) for size in own.shape[1:]]
    again = operators(case, numbers | {"mask_shapes": shapes}, *(joined_masks(case, it) for it in of_call))
    for name, result in results.items():
        if name == "grad of attn_mask":
            if mask.shape[0] == 1:
                continue  # a sum over the sequences
            result = torch.cat([it.reshape(-1) for it in own_masks(case, result)])
        assert_same(again[name], result, f"{name}, with a mask for each sequence")
