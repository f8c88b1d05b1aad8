"""Masks: rows that see nothing, hidden NaN, large negative numbers, broadcasts without expanding.

test_special_numbers.py has more of what is hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES
from comparisons import check_call
from tolerances import assert_accurate
from torch.utils._python_dispatch import TorchDispatchMode

from selfattn_ext import masked_softmax, reference, scaled_dot_product_attention

HIDING = {
    "bool": lambda seen, dtype: {"attn_mask": seen},
    "-inf": lambda seen, dtype: {
        "attn_mask": torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    },
    "float32 -inf": lambda seen, dtype: {"attn_mask": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)},
}


def qkv(queries: int, keys: int, dtype: torch.dtype = torch.float64, heads: int = 2) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, 16).to(dtype).requires_grad_() for length in (queries, keys, keys)]


@pytest.mark.parametrize("hide", HIDING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(hide: str, dtype: torch.dtype, kernel: str) -> None:
    query, key, value = qkv(70, 130, dtype)
    seen = torch.rand(2, 1, 70, 130) < 0.5
    blind = torch.zeros(70, dtype=torch.bool)
    blind[[0, 3, 31, 32, 69]] = True
    blind[40:60] = True
    seen[:, :, blind] = False
    out, weights, lse = scaled_dot_product_attention(
        query, key, value, **HIDING[hide](seen, dtype), return_weights=True, return_lse=True
    )
    assert not out[:, :, blind].any()
    assert not weights[:, :, blind].any()
    assert (lse[:, :, blind] == -torch.inf).all()
    assert lse[:, :, ~blind].isfinite().all()
    cotangents = [torch.randn_like(result) for result in (out, weights, lse)]
    grads = torch.autograd.grad((out, weights, lse), (query, key, value), cotangents, retain_graph=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, blind].any()
    # The gradients of these rows have no influence on anything else.
    for cotangent in cotangents:
        cotangent[:, :, blind] = 100.0
    again = torch.autograd.grad((out, weights, lse), (query, key, value), cotangents)
    assert all(torch.equal(*pair) for pair in zip(grads, again, strict=True))


def test_rows_that_see_nothing_by_position(kernel: str) -> None:
    tensors, incoming = qkv(40, 20), torch.randn(2, 2, 40, 16)
    for options, blind in (
        ({"is_causal": True, "query_offset": -5}, slice(0, 5)),
        ({"window_size": (3, 3)}, slice(23, 40)),
        ({"is_causal": True, "window_size": (0, -1), "query_offset": 10}, slice(10, 40)),
    ):
        found = check_call(tensors, incoming, options)
        assert not found["out"][:, :, blind].any()
        assert (found["lse"][:, :, blind] == -torch.inf).all()


def test_sink_of_a_row_that_sees_nothing(kernel: str) -> None:
    query, key, value = qkv(5, 7)
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[2] = False
    out, lse = scaled_dot_product_attention(query, key, value, seen, sinks=sinks, return_lse=True)
    assert not out[:, :, 2].any()
    torch.testing.assert_close(lse[:, :, 2], sinks.detach().expand(2, 2))
    (grad,) = torch.autograd.grad(lse[:, :, 2].sum(), sinks)
    torch.testing.assert_close(grad, torch.full((2,), 2.0, dtype=torch.float64))


def test_partly_hidden_nan_stays_in_the_rows_that_see_it(kernel: str) -> None:
    query, key, value = (tensor.detach() for tensor in qkv(60, 60, torch.float32))
    value[:, :, 33] = torch.nan
    key[:, :, 45] = torch.nan
    points = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = scaled_dot_product_attention(*points, is_causal=True)
    assert out[:, :, :33].isfinite().all()
    assert out[:, :, 33:].isnan().all()
    grads = torch.autograd.grad(out.sum(), points)
    assert grads[0][:, :, :33].isfinite().all()
    assert grads[0][:, :, 33:].isnan().all()
    assert grads[1].isnan().all(-1)[:, :, 46:].all()


@pytest.mark.parametrize("junk", [torch.nan, -torch.inf, torch.inf])
def test_keys_hidden_from_a_nan_row_get_no_gradient_of_it(junk: float, kernel: str) -> None:
    """The junk that a query sees may be near the key that it does not see, or far before or after it."""
    query, key, value = (torch.randn(1, 1, length, 64) for length in (8, 700, 700))
    for at, hidden in ((3, 90), (3, 650), (650, 3)):
        points = [query.clone(), key.clone(), value.clone()]
        points[1][:, :, at] = junk
        points = [point.requires_grad_() for point in points]
        seen = torch.ones(8, 700, dtype=torch.bool)
        seen[:, hidden] = False
        out = scaled_dot_product_attention(*points, seen)
        assert out.isnan().any()
        grads = torch.autograd.grad(out.sum(), points)
        for grad in grads[1:]:
            assert not grad[:, :, hidden].any()


def test_score_of_minus_infinity_is_a_weight_of_zero(kernel: str) -> None:
    query, key, value = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 3, 1), torch.randn(1, 1, 3, 4)
    key[0, 0, 1] = -torch.inf
    out, weights = scaled_dot_product_attention(query, key, value, return_weights=True)
    assert weights[0, 0].tolist() == [[0.5, 0.0, 0.5]] * 2
    torch.testing.assert_close(out[0, 0, 0], (value[0, 0, 0] + value[0, 0, 2]) / 2)
    key[:] = -torch.inf
    out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_dtype", [None, torch.float32], ids=str)
def test_rows_of_the_least_number_are_averages(
    dtype: torch.dtype, mask_dtype: torch.dtype | None, kernel: str
) -> None:
    query, key, value = qkv(6, 70, dtype)
    mask = torch.zeros(6, 70, dtype=mask_dtype or dtype)
    mask[2] = torch.finfo(mask.dtype).min
    mask[4, :50] = torch.finfo(mask.dtype).min
    out, weights = scaled_dot_product_attention(query, key, value, mask, return_weights=True)
    if mask.dtype != torch.float16:
        # The weights are multiplied by 70, so that the bound is relative to each weight.
        uniform = torch.ones(2, 2, 70, dtype=torch.float64)
        assert_accurate("weights", weights[:, :, 2].detach().double() * 70, uniform, dtype=dtype)
        assert_accurate("out", out[:, :, 2].detach(), value.detach().double().mean(2))
    assert not weights[:, :, 4, :50].any()
    exact, peer = (
        reference.attention(*tensors).weights
        for tensors in ([x.double() for x in (query, key, value, mask)], (query, key, value, mask))
    )
    assert_accurate("weights", weights.detach(), exact.detach(), peer.detach())
    grads = torch.autograd.grad(out.float().sum(), (query, key, value))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("magnitude", [-1e30, -1e9, -1e4, 1e4, 1e9, 1e30])
def test_normalised_at_any_magnitude(magnitude: float, kernel: str) -> None:
    """exp(score - lse) would lose the logarithm of the row's length when a large lse is rounded."""
    query, key, value = qkv(3, 100, torch.float32)
    mask = torch.full((3, 100), magnitude)
    _, weights = scaled_dot_product_attention(query, key, value, mask, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 3))
    torch.testing.assert_close(masked_softmax(torch.randn(3, 100), mask).sum(-1), torch.ones(3))


def test_rows_of_hidden_entries_of_a_softmax(kernel: str) -> None:
    scores = torch.randn(2, 3, 20, 70, requires_grad=True)
    with torch.no_grad():
        scores[..., 5] = torch.nan
    keep = torch.rand(20, 70) < 0.5
    keep[:, 5] = False
    keep[[0, 7, 19]] = False
    for mask in (keep, torch.zeros(20, 70).masked_fill(~keep, -torch.inf)):
        weights = masked_softmax(scores, mask)
        expected = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(weights, expected)
        (grad,) = torch.autograd.grad(weights.square().sum(), scores)
        assert grad.isfinite().all()
        assert not grad[:, :, ~keep].any()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest storage that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return results


@pytest.mark.parametrize("requires_grad", [False, True])
def test_broadcast_masks_are_never_expanded(requires_grad: bool) -> None:
    length, width = 512, 4
    query, key, value = (torch.randn(2, 2, length, width, requires_grad=True) for _ in range(3))
    for shape in [(length,), (length, 1), (2, 1, 1, length), (1, 2, length, 1)]:
        small = torch.randn(shape)
        # The gradient of an expanded mask has to be as large as its shape.
        masks = [small.requires_grad_()] if requires_grad else [small, small.expand(2, 2, length, length)]
        for mask in masks:
            with LargestTensor() as largest:
                out = scaled_dot_product_attention(query, key, value, mask, is_causal=True, softcap=3.0)
                out.sum().backward()
            assert largest.elements <= 2 * 2 * length * width
