"""Types of the public functions, as a user's type checker sees them.

mypy compares the calls here with their assert_type (``make lint``), and running them shows that they return
these types.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

from selfattn_ext import (
    KVCache,
    apply_rotary,
    attention_weights,
    attention_with_kvcache,
    merge_attention,
    rotary_factors,
    scaled_dot_product_attention,
    varlen_attention,
)

#: Flags whose values are known only when the program runs.
YES, NO = bool(torch.ones(1)), bool(torch.zeros(1))


def is_results(given: Any, count: int) -> bool:
    """Tells whether a result is a tensor, for a count of 1, or a tuple of ``count`` tensors."""
    results = given if isinstance(given, tuple) else (given,)
    return len(results) == count and all(isinstance(result, Tensor) for result in results)


def test_scaled_dot_product_attention() -> None:
    x = torch.ones(1, 2, 3, 4)
    one = scaled_dot_product_attention(x, x, x, is_causal=True, window_size=(1, 0))
    weights = scaled_dot_product_attention(x, x, x, return_weights=True)
    lse = scaled_dot_product_attention(x, x, x, None, 0.0, return_weights=False, return_lse=True)
    both = scaled_dot_product_attention(x, x, x, return_weights=True, return_lse=True)
    unknown = scaled_dot_product_attention(x, x, x, return_weights=YES, return_lse=NO)
    assert is_results(assert_type(one, Tensor), 1)
    assert is_results(assert_type(weights, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(lse, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(both, tuple[Tensor, Tensor, Tensor]), 3)
    assert is_results(assert_type(unknown, Any), 2)


def test_attention_weights() -> None:
    x = torch.ones(1, 2, 3, 4)
    one = attention_weights(x, x, is_causal=True)
    lse = attention_weights(x, x, return_lse=True)
    unknown = attention_weights(x, x, return_lse=NO)
    assert is_results(assert_type(one, Tensor), 1)
    assert is_results(assert_type(lse, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(unknown, Any), 1)


def test_varlen_attention() -> None:
    x, starts = torch.ones(5, 2, 4), torch.tensor([0, 2, 5])
    masks = [torch.zeros(2, 2), torch.zeros(3, 3)]
    offset = starts.diff() - starts.diff()
    one = varlen_attention(x, x, x, starts, starts, 3, 3, masks, is_causal=True, query_offset=offset)
    weights = varlen_attention(x, x, x, starts, starts, 3, 3, return_weights=True)
    lse = varlen_attention(x, x, x, starts, starts, 3, 3, return_lse=True)
    both = varlen_attention(x, x, x, starts, starts, 3, 3, return_weights=True, return_lse=True)
    unknown = varlen_attention(x, x, x, starts, starts, 3, 3, return_weights=NO, return_lse=YES)
    assert is_results(assert_type(one, Tensor), 1)
    assert is_results(assert_type(weights, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(lse, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(both, tuple[Tensor, Tensor, Tensor]), 3)
    assert is_results(assert_type(unknown, Any), 2)


def test_attention_with_kvcache() -> None:
    new, cache = torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 8, 4)
    one = attention_with_kvcache(new, cache, cache.clone(), new, new, 0, is_causal=True, layout="bhld")
    weights = attention_with_kvcache(new, cache, cache, return_weights=True)
    lse = attention_with_kvcache(new, cache, cache, return_lse=True)
    both = attention_with_kvcache(new, cache, cache, return_weights=True, return_lse=True)
    unknown = attention_with_kvcache(new, cache, cache, return_weights=NO, return_lse=NO)
    assert is_results(assert_type(one, Tensor), 1)
    assert is_results(assert_type(weights, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(lse, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(both, tuple[Tensor, Tensor, Tensor]), 3)
    assert is_results(assert_type(unknown, Any), 1)


def test_kv_cache() -> None:
    cache = KVCache(
        layers=1, sequences=2, kv_heads=2, head_dim=4, capacity=16, page_size=4, dtype=torch.float32
    )
    cache.extend([3, 1])
    x = torch.ones(4, 2, 4)
    one = cache.attend(0, x, x, x)
    weights = cache.attend(0, x, x, x, return_weights=True)
    lse = cache.attend(0, x, x, x, return_lse=True)
    both = cache.attend(0, x, x, x, return_weights=True, return_lse=True)
    unknown = cache.attend(0, x, x, x, return_weights=YES, return_lse=YES)
    assert is_results(assert_type(one, Tensor), 1)
    assert is_results(assert_type(weights, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(lse, tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(both, tuple[Tensor, Tensor, Tensor]), 3)
    assert is_results(assert_type(unknown, Any), 3)

    assert is_results(assert_type(cache.cache_seqlens, Tensor), 1)
    assert is_results(assert_type(cache.cu_seqlens, Tensor), 1)
    assert is_results(assert_type(cache.packed_positions, Tensor), 1)
    assert is_results(assert_type(cache.block_table, Tensor | None), 1)
    assert assert_type(cache.lengths, list[int]) == [3, 1]
    assert assert_type(cache.keys, list[Tensor]) is cache.keys
    assert assert_type(cache.page_size, int) == 4
    cache.free(1)
    assert assert_type(cache.allocate(), int) == 1


def test_merge_attention() -> None:
    x = torch.ones(2, 3, 4)
    parts = [scaled_dot_product_attention(x, x, x, return_lse=True) for _ in range(2)]
    outs, lses = zip(*parts, strict=True)
    assert is_results(assert_type(merge_attention(outs, lses), tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(merge_attention([*outs], [*lses]), tuple[Tensor, Tensor]), 2)
    assert is_results(assert_type(merge_attention(torch.stack(outs), [*lses]), tuple[Tensor, Tensor]), 2)


def test_rotary_positions() -> None:
    x, positions = torch.ones(4, 2, 8), torch.arange(4)
    factors = rotary_factors(positions, 8)
    cos, sin = factors
    assert is_results((assert_type(cos, Tensor), assert_type(sin, Tensor)), 2)
    assert is_results(assert_type(apply_rotary(x, factors), Tensor), 1)
    assert is_results(assert_type(apply_rotary(x, positions, interleaved=True), Tensor), 1)
