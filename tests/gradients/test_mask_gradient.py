"""The gradient of a float mask: every broadcast, any number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import turns
from cases import remembered
from comparisons import assert_same, attend
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import reference, scaled_dot_product_attention

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 70, 1030, 8  # strips of queries and chunks of keys with a rest

#: Shapes of the mask: each of batch, heads, queries and keys has its size or 1.
SHAPES: list[tuple[int, ...]] = list(itertools.product((BATCH, 1), (HEADS, 1), (QUERIES, 1), (KEYS, 1)))

#: (dtype, dtype of the mask, kv heads); the last two masks differ in dtype from the sums.
KINDS = [
    (torch.float32, torch.float32, 4),
    (torch.float32, torch.float32, 1),
    (torch.float64, torch.float64, 2),
    (torch.bfloat16, torch.float32, 2),
    (torch.bfloat16, torch.bfloat16, 2),
    (torch.float32, torch.float64, 1),
]

#: Positions that hide whole strips, whole chunks, or nothing.
POSITIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "query_offset": 490},
    {"window_size": (40, 20), "query_offset": 530, "softcap": 3.0},
    {"window_size": (5, 5), "query_offset": -60},
]


def named(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def hidden_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draws a mask that hides whole blocks or, if it is the same for all keys, whole rows."""
    mask = torch.randn(shape, dtype=torch.float64)
    if shape[3] > 1:
        mask[..., 128:256] = -torch.inf
        mask[:, :, : shape[2] // 2, 500:700] = -torch.inf
    elif shape[2] > 1:
        mask[:, :, 3:50] = -torch.inf
    return mask.to(dtype)


def run(
    tensors: dict[str, Tensor], cotangent: Tensor, attention: Callable[..., Any], **options: Any
) -> list[Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = attention(**leaves, **options)
    out = out.out if isinstance(out, reference.AttentionResult) else out
    return list(torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype)))


@remembered
def judges(
    tensors: dict[str, Tensor], cotangent: Tensor, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], float]:
    """Returns the gradients in float64, those in the tensors' dtype, and the size of the terms that a
    gradient of the mask is a sum of.
    """
    exact_tensors = {name: tensor.double() for name, tensor in tensors.items()}
    exact_tensors["attn_mask"] = exact_tensors["attn_mask"].expand(BATCH, HEADS, QUERIES, KEYS)
    exact = run(exact_tensors, cotangent, reference.attention, **options)
    peer = run(tensors, cotangent, reference.attention, **options)
    # A sum over many elements of both signs is smaller than the sum of their magnitudes.
    terms = float(exact[3].abs().sum_to_size(shape).max())
    exact[3] = exact[3].sum_to_size(shape)
    return exact, peer, terms


def check(
    shape: tuple[int, ...], kind: tuple[torch.dtype, torch.dtype, int], options: dict[str, Any]
) -> None:
    dtype, mask_dtype, kv_heads = kind
    shapes = (HEADS, QUERIES), (kv_heads, KEYS), (kv_heads, KEYS), (HEADS, QUERIES)
    *points, cotangent = (torch.randn(BATCH, *of, DIM).to(dtype) for of in shapes)
    tensors = dict(zip(("query", "key", "value"), points, strict=True))
    tensors["attn_mask"] = hidden_mask(shape, mask_dtype)
    found = {}
    for threads in (3, 1):
        torch.set_num_threads(threads)
        found[threads] = run(tensors, cotangent, attend, return_lse=False, **options)
    assert_same(found[3], found[1], f"three threads, {options}")

    exact, peer, terms = judges(tensors, cotangent, shape, options)
    for i, name in enumerate(tensors):
        size = max(terms, 4.0) if name == "attn_mask" else 4.0
        assert_accurate(f"{name}, {options}", found[1][i], exact[i], peer[i], size, dtype)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_every_broadcast(shape: tuple[int, ...], part: int, isa: str, one_thread: None) -> None:
    """Every dimension of the mask, whole or of size 1, meets all positions; .ci/run has all of both."""
    whole = sum(size > 1 for size in shape)
    for options in POSITIONS[(whole + part) % 2 :: 2]:
        check(shape, (torch.float32, torch.float32, 2), options)


def check_kind(shape: tuple[int, ...], number: int) -> None:
    check(shape, KINDS[number], POSITIONS[(SHAPES.index(shape) + number) % len(POSITIONS)])


def of_kind(number: int) -> str:
    return "-".join(map(str, KINDS[number])).replace("torch.", "")


@pytest.mark.parametrize("number", range(len(KINDS)), ids=of_kind)
@pytest.mark.parametrize("shape", SHAPES[::3], ids=named)
def test_dtypes_and_groups(shape: tuple[int, ...], number: int, isa: str, one_thread: None) -> None:
    """Every third of the shapes is checked; among them are all pairs of sizes of two dimensions."""
    check_kind(shape, number)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(KINDS)), ids=of_kind)
@pytest.mark.parametrize(
    "shape",
    [shape for index, shape in enumerate(SHAPES) if index % 3 in turns.chosen((1, 2))],
    ids=named,
)
def test_dtypes_and_groups_of_the_other_shapes(
    shape: tuple[int, ...], number: int, isa: str, one_thread: None
) -> None:
    check_kind(shape, number)


@pytest.mark.parametrize("shape", [(70, 100), (70, 1), (1, 100), (1, 1)], ids=named)
def test_masks_of_any_magnitude(shape: tuple[int, ...], kernel: str) -> None:
    """A kernel's vectors reach beyond the last query, where no maximum is subtracted from such a score."""
    query, key, value = (torch.randn(1, 2, length, DIM) for length in (70, 100, 100))
    mask = (1000 + torch.randn(shape)).requires_grad_()
    (grad,) = torch.autograd.grad(scaled_dot_product_attention(query, key, value, mask).sin().sum(), mask)
    assert grad.isfinite().all()
