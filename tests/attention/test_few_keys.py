"""Few queries against at most 16 keys, whose rows share a softmax across heads and batch elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, Case, check, normal
from comparisons import assert_same

from selfattn_ext import attention_with_kvcache, scaled_dot_product_attention, varlen_attention

#: (batch, heads, kv heads, queries): 1 row, a row less than a vector of rows has, as many, more, and an odd
#: number of them.
ROWS = ((1, 1, 1, 1), (3, 5, 1, 1), (2, 8, 2, 1), (17, 1, 1, 1), (3, 6, 3, 2), (2, 3, 3, 4), (1, 37, 1, 1))
KEYS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
DIMS = ((1, 8), (7, 15), (16, 17), (24, 1), (64, 31), (80, 130), (33, 48))
OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "bool", "sinks": 2},
    {"mask": "float", "softcap": 2.0},
    {"is_causal": True, "query_offset": 3, "alibi": 2},
    {"window": (2, 1), "query_offset": 2, "dropout_p": 0.3},
    {"mask": "float rows", "alibi": 1, "sinks": 1, "weights": True, "lse": True},
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(isa: str, dtype: torch.dtype) -> None:
    for turn in range(len(ROWS) * len(KEYS)):
        rows, keys, dims = ROWS[turn % len(ROWS)], KEYS[turn % len(KEYS)], DIMS[turn * 3 // 2 % len(DIMS)]
        check(Case(*rows, keys, *dims, dtype, layout=("contiguous", "transposed")[turn % 2]))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(isa: str, options: dict[str, Any]) -> None:
    for turn, keys in enumerate((3, 8, 11, 16)):
        check(Case(3, 6, (6, 2)[turn % 2], 1 + turn, keys, 24, 20, DTYPES[turn % len(DTYPES)], **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_own_bits(isa: str, dtype: torch.dtype) -> None:
    """Neither the rows beside it, nor packing, nor pages change them; lengths on both sides of 16 mix."""
    queries, keys = (1, 2, 1, 4, 3, 0, 1), (1, 16, 17, 5, 0, 3, 40)
    query = normal(sum(queries), 4, 24, dtype=dtype, seed=1)
    key, value = (normal(sum(keys), 2, 24, dtype=dtype, seed=seed) for seed in (2, 3))
    starts = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (queries, keys)]
    packed = varlen_attention(query, key, value, *starts, max(queries), max(keys), enable_gqa=True)
    pages, table = torch.zeros(2, 35, 8, 2, 24, dtype=dtype), torch.randperm(35).view(7, 5).int()
    for b, (count, end_q, end_k) in enumerate(zip(keys, starts[0][1:], starts[1][1:], strict=True)):
        parts = [query[end_q - queries[b] : end_q], key[end_k - count : end_k], value[end_k - count : end_k]]
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        alone = scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
        assert_same(packed[end_q - queries[b] : end_q], alone, f"sequence {b}")
        for head in range(4):
            one = scaled_dot_product_attention(q[:, head : head + 1], k[:, [head // 2]], v[:, [head // 2]])
            assert_same(one[0, 0], alone[:, head], f"sequence {b}, head {head}")
        for cache, part in zip(pages, parts[1:], strict=True):
            for j in range(count):
                cache[table[b, j // 8], j % 8] = part[j]
        paged = attention_with_kvcache(
            q.contiguous(), *(cache.transpose(1, 2) for cache in pages), cache_seqlens=torch.tensor([count]),
            block_table=table[b : b + 1], enable_gqa=True, is_causal=False,
        )  # fmt: skip
        assert_same(paged[0].transpose(0, 1), alone, f"sequence {b} in pages")


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_hidden_junk_changes_nothing(isa: str, junk: float) -> None:
    query, key, value = (normal(2, 3, rows, 20, seed=rows) for rows in (2, 9, 9))
    shown = torch.ones(2, 9, dtype=torch.bool)
    shown[:, 4] = False
    shown[1, :7] = False
    plain = scaled_dot_product_attention(query, key, value, shown)
    for tensor in (key, value):
        kept = tensor[0, 1, 4].clone()
        tensor[0, 1, 4] = junk
        assert_same(scaled_dot_product_attention(query, key, value, shown), plain, "hidden from all")
        tensor[0, 1, 4] = kept
    value[0, 1, 2] = junk
    found = scaled_dot_product_attention(query, key, value, shown)
    assert_same(found[0, 1, 1], plain[0, 1, 1], "hidden from this query")
    assert not bool(found[0, 1, 0].isfinite().any())
