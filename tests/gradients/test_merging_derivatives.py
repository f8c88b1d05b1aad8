"""Derivatives of merge_attention: second ones, forward mode, torch.func, torch.compile.

Gradients of parts against those of one call are in test_merging.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparisons import assert_same
from torch import Tensor

from selfattn_ext import merge_attention, reference, scaled_dot_product_attention


def parts(count: int, *lead: int, **options: Any) -> list[Tensor]:
    """Returns outs, and then lses, of so many parts."""
    shapes = [(*lead, 3)] * count + [lead] * count
    return [torch.randn(shape, dtype=torch.float64, **options) for shape in shapes]


def merged(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    count = len(tensors) // 2
    return merge_attention(tensors[:count], tensors[count:])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_finite_differences(count: int) -> None:
    """First and second derivatives, forward mode, forward over backward, and batches of cotangents."""
    points = parts(count, 2, 2, requires_grad=True)
    assert torch.autograd.gradcheck(merged, points, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(merged, points, check_fwd_over_rev=True)


def test_unseen_parts_have_no_second_derivative() -> None:
    """Those of the other parts are what they are without the row."""
    points = parts(3, 4)
    points[4][1] = -math.inf
    points[3][2] = points[4][2] = points[5][2] = -math.inf
    points = [point.requires_grad_() for point in points]

    def seen(*points: Tensor) -> tuple[Tensor, ...]:
        out, lse = merged(*points)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    first = torch.autograd.grad(
        [result.square().sum() for result in seen(*points)], points, create_graph=True
    )
    second = torch.autograd.grad([grad.square().sum() for grad in first], points)
    for found in (first, second):
        assert bool(torch.stack([grad.isfinite().all() for grad in found]).all())
        for row in (found[1][1], found[4][1], *(grad[2] for grad in found)):
            assert not row.any()
    others = [point.detach()[1:2].requires_grad_() for point in (points[0], points[2], points[3], points[5])]
    alone = torch.autograd.grad(
        [result.square().sum() for result in merged(*others)], others, create_graph=True
    )
    again = torch.autograd.grad([grad.square().sum() for grad in alone], others)
    for part, expected in zip((0, 2, 3, 5), again, strict=True):
        torch.testing.assert_close(second[part][1:2], expected)


def test_a_tangent_of_a_row_that_sees_nothing_may_be_anything() -> None:
    points = parts(2, 3)
    points[2][1] = points[2][2] = points[3][2] = -math.inf
    tangents = [torch.ones_like(point) for point in points]
    tangents[2][1:] = tangents[3][2:] = tangents[0][1:] = tangents[1][2:] = math.nan
    moved: Any = torch.func.jvp(merged, tuple(points), tuple(tangents))
    results, found = moved
    assert_same(results, merged(*points))
    assert bool(found[0].isfinite().all() and found[1].isfinite().all())
    assert not found[0][2].any()
    torch.testing.assert_close(found[0][1], tangents[1][1])


def halves(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries after six keys to these, and to keys with their own positions."""
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    before = scaled_dot_product_attention(query, key[..., :6, :], value[..., :6, :], **options)
    own = key[..., 6:, :], value[..., 6:, :]
    among = scaled_dot_product_attention(query, *own, is_causal=True, **options)
    return merge_attention([before[0], among[0]], [before[1], among[1]])


def formula(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out, _, lse = reference.attention(query, key, value, is_causal=True, query_offset=6)
    return out, lse


def qkv(*lead: int) -> tuple[Tensor, ...]:
    shapes = ((4, 3, 5), (2, 9, 5), (2, 9, 4))
    return tuple(torch.randn(*lead, *shape, dtype=torch.float64) for shape in shapes)


def test_second_derivatives_through_attention() -> None:
    """Hessians times vectors are those of the formula over all keys."""
    points, directions = qkv(2), qkv(2)

    def loss(attention: Any) -> Any:
        return lambda *points: sum((result * result.cos()).sum() for result in attention(*points))

    found, expected = (
        torch.func.jvp(torch.func.grad(loss(attention), (0, 1, 2)), points, directions)
        for attention in (halves, formula)
    )
    for ours, theirs in zip(found, expected, strict=True):
        for got, exact in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, exact)


def test_vmap() -> None:
    """A mapped dimension anywhere, in some of the parts alone, and per-sample gradients."""
    outs, lses = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5)
    expected = merge_attention(outs, lses)
    mapped = torch.func.vmap(merge_attention, in_dims=(1, 1))(outs, lses)
    assert_same(mapped, expected)
    given = ([outs[0].movedim(0, 2), outs[1, 0]], [lses[0], lses[1, 0]])
    found = torch.func.vmap(merge_attention, in_dims=([2, None], [0, None]))(*given)
    for sample in range(2):
        alone = merge_attention([outs[0, sample], outs[1, 0]], [lses[0, sample], lses[1, 0]])
        torch.testing.assert_close([each[sample] for each in found], list(alone))

    def loss(*points: Tensor) -> Tensor:
        return halves(*points)[0].square().sum()

    points = qkv(3)
    of_samples = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*points)
    for got, whole in zip(of_samples, torch.func.grad(loss, (0, 1, 2))(*points), strict=True):
        torch.testing.assert_close(got, whole)


def test_one_graph() -> None:
    """Compiled, with its gradients, without a break."""
    compiled = torch.compile(halves, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        points = [point.requires_grad_() for point in qkv(batch)]
        results = [attention(*points) for attention in (compiled, halves)]
        grads = [torch.autograd.grad((out.sum(), lse.sum()), points) for out, lse in results]
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(grads[0], grads[1])


def test_exported() -> None:
    """A program for every batch and length, from parts in a list."""

    class Merge(torch.nn.Module):
        def forward(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
            return merge_attention(outs, lses)

    def given(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        tensors = parts(2, batch, 4, length)
        return tensors[:2], tensors[2:]

    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Merge(), given(2, 5), dynamic_shapes=([sizes, sizes], [sizes, sizes]))
    other = given(3, 7)
    assert_same(program.module()(*other), merge_attention(*other))


def test_autocast_changes_nothing() -> None:
    outs, lses = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5)
    expected = merge_attention(outs, lses)
    with torch.autocast(outs.device.type, dtype=torch.bfloat16):
        assert_same(merge_attention(outs, lses), expected)
