"""Scores that rise along the keys, so that the running maximum of a softmax has to follow.

They rise at the first block of keys, the last, or one in between, for every other query of a tile or only for
some strips of queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import turns
from cases import remembered
from comparisons import (
    GRADIENTS,
    Results,
    assert_results,
    attend,
    by_formula,
    check_call,
    exact_and_peer,
    results_of,
)
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import functional

#: Numbers of keys around blocks of 64 and of 128, and around those that are loaded together.
KEYS = (63, 65, 127, 128, 129, 192, 257, 320, 515)
#: The size of a gradient's terms: the scale of 1/8 times a query of 8 times a product of the output's
#: gradient and a value. Nearly all of it cancels if a single key has all the weight. That of a key is a sum
#: over queries.
TERMS = 8.0
#: Numbers of queries: one strip, full or not; several strips, the last of which is short.
QUERIES = (32, 31, 97)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Functions of the number of keys that return where scores rise.
STEPS: tuple[Callable[[int], list[int]], ...] = (
    lambda keys: [],
    lambda keys: [1],
    lambda keys: [keys // 2],
    lambda keys: [keys - 1],
    lambda keys: [*range(64, keys, 64)],
    lambda keys: [130, 200],
)


def rising(queries: int, keys: int, steps: list[int], dtype: torch.dtype, head_dim: int = 64) -> list[Tensor]:
    """Draws query, key and value; from each of the steps on, scores of every other query are 14 higher."""
    query, key, value = (torch.randn(1, 2, length, head_dim) for length in (queries, keys, keys))
    query[..., 0] = 8.0
    query[:, :, ::2, 0] = 0.0
    key[..., 0] = 0.0
    for step in steps:
        key[:, :, step:, 0] += 14.0 * head_dim**0.5 / 8.0
    key[..., 0] -= key[..., -1:, 0]  # the largest scores are of middling size
    return [query.to(dtype), key.to(dtype), value.to(dtype)]


@remembered
def judges(tensors: list[Tensor], incoming: Tensor, options: dict[str, Any]) -> tuple[Results, Results]:
    """Computes the formula in float64, and torch's own attention in the dtype of the tensors."""
    exact = by_formula([tensor.double() for tensor in tensors], incoming, options)
    peer = results_of(functional.scaled_dot_product_attention, tensors, incoming, **options)
    return exact, by_formula(tensors, None, options) | peer


def check(tensors: list[Tensor], **options: Any) -> None:
    """Checks output, gradients and log-sum-exp against the formula; the peer is torch's own attention."""
    incoming = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], dtype=torch.float64)
    terms = {"grad of query": TERMS, "grad of key": TERMS * tensors[0].size(-2) ** 0.5}
    found = results_of(attend, tensors, incoming, **options)
    assert_results(found, judges(tensors, incoming, options), terms=terms, dtype=tensors[0].dtype)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_every_block(kernel: str, dtype: torch.dtype, keys: int) -> None:
    """Every number of queries meets every number of keys and each of the steps."""
    for number, steps in enumerate(STEPS, KEYS.index(keys)):
        check(rising(QUERIES[number % len(QUERIES)], keys, steps(keys), dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_every_block_with_any_number_of_queries(kernel: str, dtype: torch.dtype, keys: int) -> None:
    for queries, steps in itertools.product(turns.chosen(QUERIES), STEPS):
        check(rising(queries, keys, steps(keys), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_some_strips(kernel: str, dtype: torch.dtype) -> None:
    """Queries see different numbers of keys, most of every block or none."""
    for queries, keys in ((160, 160), (257, 320), (97, 515)):
        check(rising(queries, keys, [keys // 3, keys // 2], dtype), is_causal=True)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9, 1e20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_any_magnitude(kernel: str, dtype: torch.dtype, scale: float) -> None:
    """A rounding error of the largest score may exceed the range of exponents of a float."""
    check_call(rising(65, 300, [], dtype), None, {"scale": scale}, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((dtype, sign * 40.0) for dtype in DTYPES for sign in (1, -1)),
        # The scale is a factor of gradients and would overflow float16.
        *((dtype, scale) for dtype in DTYPES[:2] for scale in (1e5, -1e5, 1e8, 1e20)),
    ],
)
def test_gradients_of_any_magnitude(kernel: str, dtype: torch.dtype, scale: float) -> None:
    """In every other query all scores are equal, so that the weights are known for any magnitude; in the
    others one score is above the rest.
    """
    query, key, value = (torch.zeros(1, 2, rows, 64) for rows in (65, 300, 300))
    query[..., 0], key[..., 0] = 128.0, 1.0
    query[:, :, ::2, 1], key[:, :, 70, 1] = 1.0, scale / abs(scale)
    for tensor in (key[..., 2:], value):
        tensor.copy_(torch.randn(tensor.shape))
    incoming = torch.randn(1, 2, 65, 64).to(dtype)
    tensors = [tensor.to(dtype) for tensor in (query, key, value)]

    def unit(name: str, _: Tensor) -> float:
        return {"grad of query": scale, "grad of key": 128.0 * scale}.get(name, 1.0)

    terms = dict.fromkeys(("out", *GRADIENTS), TERMS)
    everything = torch.ones(65, 300, dtype=torch.bool)
    for options in ({}, {"is_causal": True, "query_offset": 235}, {"attn_mask": everything}):
        check_call(tensors, incoming, options | {"scale": scale}, unit=unit, terms=terms, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_of_one_strip(kernel: str, dtype: torch.dtype) -> None:
    """Strips of ordinary queries come before and after one whose scores are above a million."""
    query, key, value = rising(97, 300, [], torch.float32)
    query[:, :, 32:64] *= 1e3 if dtype == torch.float16 else 1e8
    tensors = [tensor.to(dtype) for tensor in (query, key, value)]
    # Scores of 1e8 differ only by rounding, so these rows are left out.
    rows = [row for row in range(97) if not 32 <= row < 64]
    found = results_of(attend, tensors)
    assert_accurate("out", *(results["out"][:, :, rows] for results in (found, *exact_and_peer(tensors))))
