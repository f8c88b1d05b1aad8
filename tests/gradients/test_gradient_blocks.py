"""Gradients of many strips of queries and blocks of keys at once, as kernels for tiles compute them.

They do so if no option changes the scores. The gradients are compared with the formula and, bit by bit, with
the same kernel block by block, which a mask of zeros makes it use.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import Case, check
from comparisons import assert_same
from torch import Tensor

#: Numbers of queries around a strip of 16 or 32, and around a panel of 128.
QUERIES = (1, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 257)
#: Numbers of keys around groups of 32, blocks of 64, and the 512 that are loaded at a time.
KEYS = (31, 32, 63, 64, 65, 127, 128, 129, 257, 512, 577)
#: Dims of keys and values: one to four panels of 32 columns, long sums, and parts of panels.
DIMS = ((64, 64), (32, 96), (128, 64), (128, 128), (62, 64), (80, 64), (17, 48))
#: Arithmetics in which numbers are one, two or three bfloat16 pieces, with different numbers of products.
ARITHMETICS = (
    (torch.bfloat16, "highest"),
    (torch.float16, "highest"),
    (torch.float32, "high"),
    (torch.float32, "highest"),
)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
WINDOWS: tuple[dict[str, Any], ...] = (
    {"is_causal": True, "query_offset": 37},
    {"window_left": 45, "window_right": 20},
    {"window_left": 0, "window_right": 64, "query_offset": -50},
)


of_arithmetics = pytest.mark.parametrize(("dtype", "precision"), ARITHMETICS, ids=str)


def inputs(
    queries: int, keys: int, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Draws query, key and value of two heads that share a kv head, and the output's gradient."""
    shapes = (2, queries, dims[0]), (1, keys, dims[0]), (1, keys, dims[1]), (2, queries, dims[1])
    return [torch.randn(1, *shape).to(dtype) for shape in shapes]


def check_same(tensors: list[Tensor], scale: float = 0.125, **options: Any) -> None:
    """Asserts equal gradients with and without a mask of zeros, for the same output and row statistics."""
    query, key, value, grad_out = tensors
    out, row_max, row_sum, residual = torch.ops.selfattn.attention_forward(
        query, key, value, scale, need_residual=True, **options
    )
    arguments = (grad_out, query, key, value, out, row_max, row_sum, scale)
    options["out_residual"] = residual if residual.numel() else None
    mask = torch.zeros(1, 1, query.size(2), key.size(2))
    found = torch.ops.selfattn.attention_backward(*arguments, **options)
    plain = torch.ops.selfattn.attention_backward(*arguments, attn_mask=mask, **options)
    assert_same(found[:3], plain[:3])


@pytest.mark.parametrize("is_causal", [False, True])
def test_same_bits_at_all_sizes(isa: str, is_causal: bool) -> None:
    for queries, keys in itertools.product(QUERIES, KEYS):
        check_same(inputs(queries, keys), is_causal=is_causal)


@pytest.mark.parametrize(("dtype", "precision"), [*ARITHMETICS[1:], (torch.float32, "medium")], ids=str)
def test_same_bits_of_other_types(isa: str, dtype: torch.dtype, precision: str) -> None:
    """There are strips of 17 to 32 queries, and one to nine blocks of keys, some with a remainder."""
    for queries, keys in itertools.product((17, 32, 33, 65), (63, 64, 127, 192, 577)):
        tensors = inputs(queries, keys, dtype=dtype)
        check_same(tensors, float32_precision=precision)
        check_same(tensors, is_causal=True, query_offset=40, float32_precision=precision)


@of_arithmetics
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_same_bits_in_windows(isa: str, options: dict[str, Any], dtype: torch.dtype, precision: str) -> None:
    for queries, keys in itertools.product((17, 64, 129, 257), (64, 129, 320)):
        check_same(inputs(queries, keys, dtype=dtype), float32_precision=precision, **options)


@of_arithmetics
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_same_bits_of_all_dims(isa: str, dims: tuple[int, int], dtype: torch.dtype, precision: str) -> None:
    for queries, keys, scale in ((65, 128, 0.125), (160, 192, 0.3), (300, 320, 0.125)):
        tensors = inputs(queries, keys, dims, dtype)
        check_same(tensors, scale, is_causal=True, float32_precision=precision)
        check_same(tensors, scale, float32_precision=precision)


@of_arithmetics
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 3e38, 1e-38], ids=str)
def test_same_bits_around_numbers_that_are_none(
    isa: str, junk: float, dtype: torch.dtype, precision: str
) -> None:
    """The junk is in a query, a key, a value or a row of the output's gradient, visible or hidden."""
    for which, (place, row) in itertools.product(range(4), enumerate((0, 70, 130, -1))):
        tensors = inputs(160, 192, dtype=dtype)
        tensors[which][..., row, 3] = junk
        check_same(tensors, is_causal=(which + place) % 2 == 0, float32_precision=precision)


@of_arithmetics
def test_same_bits_of_all_magnitudes(isa: str, dtype: torch.dtype, precision: str) -> None:
    """There are weights of 0 beside others, maxima that move between blocks, huge and tiny gradients."""
    factors = (3e4, 100.0, 1e-6) if dtype == torch.float16 else (1e30, 100.0, 1e-30)
    for which, factor in itertools.product(range(4), factors):
        tensors = inputs(160, 320, dtype=dtype)
        tensors[which] *= factor
        check_same(tensors, is_causal=True, float32_precision=precision)
    query, key, value, grad_out = inputs(160, 320, dtype=dtype)
    rising = key * torch.linspace(0.0, 20.0, 320)[:, None].to(dtype)
    check_same([query, rising, value, grad_out], float32_precision=precision)


def check_sizes(queries: int, dtype: torch.dtype, turn: int) -> None:
    """Checks every number of keys, some of them causal; another turn has the causal rule for the others."""
    for place, keys in enumerate((64, 128, 129), QUERIES.index(queries) + TYPES.index(dtype) + turn):
        check(Case(1, 2, 1, queries, keys, 64, 32, dtype, is_causal=place % 2 == 1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("queries", QUERIES)
def test_gradients_of_all_sizes(isa: str, queries: int, dtype: torch.dtype) -> None:
    check_sizes(queries, dtype, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("queries", QUERIES)
def test_gradients_with_and_without_the_causal_rule(isa: str, queries: int, dtype: torch.dtype) -> None:
    check_sizes(queries, dtype, 1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gradient_of_slopes_of_full_strips(isa: str, dtype: torch.dtype) -> None:
    """A strip has as many queries as lanes here: 144 is a multiple of every width."""
    check(Case(1, 2, 1, 144, 40, 16, 16, dtype, alibi=1))
