"""Accuracy of the sums in a float mask's gradient, compared with torch's sum of the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_mask_gradient import BATCH, DIM, HEADS, KEYS, QUERIES, named
from tolerances import PEER_FACTOR

from selfattn_ext import scaled_dot_product_attention

#: Shapes of masks that have a number for each row, for each column, or one for all.
SHAPES = [
    *itertools.product((BATCH, 1), (HEADS, 1), (QUERIES,), (1,)),
    *itertools.product((BATCH, 1), (HEADS, 1), (1,), (KEYS, 1)),
]
#: All of them in float32; a third of them in float64 here, and the others in .ci/run.
KINDS = [
    *((shape, torch.float32) for shape in SHAPES),
    *((shape, torch.float64) for shape in SHAPES[::3]),
    *(
        pytest.param(shape, torch.float64, marks=pytest.mark.thorough)
        for index, shape in enumerate(SHAPES)
        if index % 3
    ),
]


@pytest.mark.parametrize(("shape", "mask_dtype"), KINDS, ids=named)
def test_sums_are_as_accurate_as_torchs(
    shape: tuple[int, ...], mask_dtype: torch.dtype, kernel: str, one_thread: None
) -> None:
    """The numbers are the gradient of a mask of the full size. Each of their rows sums to 0, so that only
    the errors of a sum are left.
    """
    squares, squares_of_torch = 0.0, 0.0
    for offset in (KEYS, 490):
        tensors = [torch.randn(BATCH, heads, n, DIM) for heads, n in ((4, QUERIES), (2, KEYS), (2, KEYS))]
        mask = torch.randn(shape)
        gradients = []
        for given in (mask.to(mask_dtype), mask.expand(BATCH, HEADS, QUERIES, KEYS).contiguous()):
            out = scaled_dot_product_attention(
                *tensors, given.requires_grad_(), is_causal=True, query_offset=offset, enable_gqa=True
            )
            gradients += torch.autograd.grad(out.square().sum(), given)
        exact = gradients[1].double().sum_to_size(shape)
        squares += float((gradients[0].double() - exact).square().sum())
        squares_of_torch += float((gradients[1].sum_to_size(shape).double() - exact).square().sum())
    assert squares**0.5 <= PEER_FACTOR * squares_of_torch**0.5
