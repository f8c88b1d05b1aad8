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
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import functional

from selfattn_ext import reference, scaled_dot_product_attention

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


def results(
    function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], incoming: Tensor
) -> list[Tensor]:
    """Returns the output, the gradients, and the function's other results."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, *others = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, incoming.to(out.dtype))
    return [result.detach() for result in (out, *gradients, *others)]


@remembered
def judges(
    tensors: list[Tensor], incoming: Tensor, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Computes the formula in float64, and torch's own attention in the dtype of the tensors."""

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = reference.attention(*tensors, **options)
        return found.out, found.lse

    def torchs(*tensors: Tensor) -> tuple[Tensor, ...]:
        return functional.scaled_dot_product_attention(*tensors, **options), formula(*tensors)[1]

    exact = results(formula, [tensor.double() for tensor in tensors], incoming)
    return exact, results(torchs, tensors, incoming)


def check(tensors: list[Tensor], **options: Any) -> None:
    """Checks output, gradients and log-sum-exp against the formula; the peer is torch's own attention."""

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        return scaled_dot_product_attention(*tensors, return_lse=True, **options)

    incoming = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], dtype=torch.float64)
    found = results(ours, tensors, incoming)
    exact, peer = judges(tensors, incoming, options)
    for name, *three in zip(("out", "query", "key", "value", "lse"), found, exact, peer, strict=True):
        terms = {"query": TERMS, "key": TERMS * tensors[0].size(-2) ** 0.5}.get(name, 1.0)
        assert_accurate(name, *three, terms, tensors[0].dtype)


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
    query, key, value = rising(65, 300, [], dtype)
    out, lse = scaled_dot_product_attention(query, key, value, scale=scale, return_lse=True)
    exact = reference.attention(query.double(), key.double(), value.double(), scale=scale)
    peer = reference.attention(query, key, value, scale=scale)
    assert_accurate("out", out, exact.out, peer.out)
    assert_accurate("lse", lse, exact.lse, peer.lse, dtype=dtype)


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
    doubles = [tensor.double() for tensor in tensors]
    everything = torch.ones(65, 300, dtype=torch.bool)
    for options in ({}, {"is_causal": True, "query_offset": 235}, {"attn_mask": everything}):

        def formula(*tensors: Tensor, options: dict[str, Any] = options) -> tuple[Tensor, ...]:
            return (reference.attention(*tensors, scale=scale, **options).out,)

        def ours(*tensors: Tensor, options: dict[str, Any] = options) -> tuple[Tensor, ...]:
            return (scaled_dot_product_attention(*tensors, scale=scale, **options),)

        found, peer = results(ours, tensors, incoming), results(formula, tensors, incoming)
        exact = results(formula, doubles, incoming)
        for name, unit, *three in zip(
            ("out", "query", "key", "value"),
            (1.0, scale, 128.0 * scale, 1.0),
            found,
            exact,
            peer,
            strict=True,
        ):
            in_units = [result.double() / unit for result in three]
            assert_accurate(f"{name}, {list(options)}", *in_units, TERMS, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_of_one_strip(kernel: str, dtype: torch.dtype) -> None:
    """Strips of ordinary queries come before and after one whose scores are above a million."""
    query, key, value = rising(97, 300, [], torch.float32)
    query[:, :, 32:64] *= 1e3 if dtype == torch.float16 else 1e8
    tensors = [tensor.to(dtype) for tensor in (query, key, value)]
    out = scaled_dot_product_attention(*tensors)
    exact = reference.attention(*(tensor.double() for tensor in tensors)).out
    peer = reference.attention(*tensors).out
    # Scores of 1e8 differ only by rounding, so these rows are left out.
    rows = [row for row in range(97) if not 32 <= row < 64]
    assert_accurate("out", out[:, :, rows], exact[:, :, rows], peer[:, :, rows])
