"""Large sizes on a GPU: more heads than a grid has in y, offsets above 31 bits, long rows.

Memory must not grow with L·S.
"""

from __future__ import annotations

import functools

import gpu
import pytest
import torch
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import attention_scores, masked_softmax, reference, scaled_dot_product_attention

gpu.need()

GIB = 2**30
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


def need_memory(gibibytes: float) -> None:
    """Skips the test if the GPU has less free memory than this."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes:g} GiB of GPU memory")


def assert_right(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: object) -> None:
    exact = reference.attention(query.double(), key.double(), value.double(), **options).out
    assert_accurate("out", out, exact, reference.attention(query, key, value, **options).out)


@dtypes
@pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000), (300, 300)], ids=str)
def test_more_heads_than_a_grid_has_in_y(
    shape: tuple[int, int], dtype: torch.dtype, cuda_kernel: str
) -> None:
    query, key, value = (torch.randn(*shape, length, 16, device="cuda").to(dtype) for length in (3, 5, 5))
    out, weights = scaled_dot_product_attention(query, key, value, return_weights=True)
    exact = reference.attention(query.double(), key.double(), value.double())
    peer = reference.attention(query, key, value)
    assert_accurate("out", out, exact.out, peer.out)
    assert_accurate("weights", weights, exact.weights, peer.weights)
    scores = attention_scores(query, key)
    assert_accurate(
        "scores", scores, reference.attention_scores(query.double(), key.double()), query @ key.mT / 4
    )
    assert_accurate("softmax", masked_softmax(scores), scores.double().softmax(-1), scores.softmax(-1))


@dtypes
def test_more_queries_than_a_grid_has_in_y(dtype: torch.dtype, cuda_kernel: str) -> None:
    query = torch.randn(1, 1, 5_000_000, 16, device="cuda").to(dtype)
    key, value = (torch.randn(1, 1, 7, 16, device="cuda").to(dtype) for _ in range(2))
    out = scaled_dot_product_attention(query, key, value)
    for rows in (slice(0, 100), slice(-100, None)):
        assert_right(out[:, :, rows], query[:, :, rows], key, value)
    weights = masked_softmax(query[0, 0])
    assert_accurate("softmax", weights[-100:], query[0, 0, -100:].double().softmax(-1), None, 1.0, dtype)


def test_queries_and_outputs_beyond_31_bits(cuda_kernel: str) -> None:
    """There are 2^31 elements and some more, so the last rows are beyond the reach of a 32-bit offset."""
    need_memory(10)
    length = 2**31 // (64 * 64) + 100
    query = torch.randn(64, 1, length, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(64, 1, 9, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert query.numel() > 2**31
    out = scaled_dot_product_attention(query, key, value)
    for batch in (0, 63):
        last = query[batch : batch + 1, :, -100:]
        assert_right(out[batch : batch + 1, :, -100:], last, key[batch : batch + 1], value[batch : batch + 1])


def test_keys_beyond_31_bits(cuda_kernel: str) -> None:
    """One query has keys that are more than 2^31 elements apart."""
    need_memory(12)
    keys = 2**31 // 64 // 4 + 1000
    key = torch.randn(4, 1, keys, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(4, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    assert key.numel() > 2**31
    seen = torch.zeros(keys, device="cuda", dtype=torch.bool)
    seen[-50:] = True
    out = scaled_dot_product_attention(query, key, key, seen.expand(1, keys))
    assert_right(out, query, key[:, :, -50:], key[:, :, -50:])


def test_masks_and_weights_beyond_31_bits(cuda_kernel: str) -> None:
    need_memory(16)
    length = 2**15 + 64
    query, key, value = (torch.randn(1, 2, length, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = torch.rand(2, length, length, device="cuda", dtype=torch.float16) < 0.5
    out, weights = scaled_dot_product_attention(query, key, value, mask, return_weights=True)
    assert weights.numel() > 2**31
    rows = slice(length - 20, length)
    exact = reference.attention(query[:, :, rows].double(), key.double(), value.double(), mask[:, rows])
    peer = reference.attention(query[:, :, rows], key, value, mask[:, rows])
    assert_accurate("out", out[:, :, rows], exact.out, peer.out)
    assert_accurate("weights", weights[:, :, rows], exact.weights, peer.weights)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_rows(dtype: torch.dtype, queries: int, kv_heads: int, cuda_kernel: str) -> None:
    """Few queries have many keys, which are divided among blocks and merged."""
    for keys in (16_384, 100_003):
        query = torch.randn(2, 8, queries, 128, device="cuda").to(dtype)
        key, value = (torch.randn(2, kv_heads, keys, 128, device="cuda").to(dtype) for _ in range(2))
        out, lse = scaled_dot_product_attention(query, key, value, enable_gqa=True, return_lse=True)
        wide_key, wide_value = (tensor.repeat_interleave(8 // kv_heads, dim=1) for tensor in (key, value))
        exact = reference.attention(query.double(), wide_key.double(), wide_value.double())
        peer = reference.attention(query, wide_key, wide_value)
        assert_accurate("out", out, exact.out, peer.out)
        assert_accurate("lse", lse, exact.lse, peer.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_does_not_grow_with_the_square_of_the_length(dtype: torch.dtype, cuda_kernel: str) -> None:
    extra = []
    for length in (2048, 8192):
        query, key, value = (torch.randn(1, 2, length, 64, device="cuda").to(dtype) for _ in range(3))
        mask = torch.randn(length, device="cuda")
        given = (query, key, value, mask.expand(length, length))
        extra.append(gpu.peak(functools.partial(scaled_dot_product_attention, *given, dropout_p=0.1)))
    # The output and two numbers per row are allowed; a matrix of scores would have grown sixteenfold.
    assert extra[1] <= 4.5 * extra[0]
    assert extra[1] <= 2 * 8192 * (64 + 64) * 4 + 4 * 2**20
