"""Autocast: it casts and leaves the same tensors as with torch's attention."""

from __future__ import annotations

import itertools

import gpu
import pytest
import torch
import torch.nn.functional as F

from selfattn_ext import attention_scores, attention_weights, masked_softmax, scaled_dot_product_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, *DTYPES], ids=str)
def test_results_have_the_dtypes_of_torch(autocast: torch.dtype, mask_dtype: torch.dtype | None) -> None:
    """This holds for every mixture of dtypes that torch accepts; its refusals need not be ours."""
    taken = 0
    for query_dtype, key_dtype in itertools.product(DTYPES, DTYPES):
        query, key = (torch.randn(1, 2, 4, 8).to(dtype) for dtype in (query_dtype, key_dtype))
        mask = None if mask_dtype is None else torch.ones(4, 4).to(mask_dtype)
        with torch.autocast(gpu.DEVICE, autocast):
            try:
                expected = F.scaled_dot_product_attention(query, key, key, mask)
            except RuntimeError:
                continue
            out = scaled_dot_product_attention(query, key, key, mask)
            assert out.dtype == expected.dtype, (query_dtype, key_dtype)
        taken += 1
    assert taken


def test_all_results_under_autocast() -> None:
    query = torch.randn(1, 2, 4, 8)
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        results = scaled_dot_product_attention(query, query, query, return_weights=True, return_lse=True)
        assert [result.dtype for result in results] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert attention_weights(query, query).dtype == torch.bfloat16
        assert attention_scores(query, query).dtype == (query @ query.mT).dtype == torch.bfloat16
        assert masked_softmax(query).dtype == query.softmax(-1).dtype == torch.float32


def test_a_nested_block_without_autocast_casts_nothing() -> None:
    query = torch.randn(1, 2, 4, 8)
    expected = scaled_dot_product_attention(query, query, query)
    with torch.autocast(gpu.DEVICE, torch.bfloat16), torch.autocast(gpu.DEVICE, enabled=False):
        assert torch.equal(scaled_dot_product_attention(query, query, query), expected)


def test_gradients_come_back_in_the_dtype_of_their_tensor() -> None:
    tensors = [torch.randn(1, 2, 4, 8).to(dtype).requires_grad_() for dtype in DTYPES[:3]]
    mask = torch.randn(4, 4, requires_grad=True)
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        out = scaled_dot_product_attention(*tensors, mask)
    gradients = torch.autograd.grad(out.float().sum(), [*tensors, mask])
    assert [gradient.dtype for gradient in gradients] == [*DTYPES[:3], torch.float32]
