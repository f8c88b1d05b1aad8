"""Few queries against at most 16 keys, whose rows share a softmax across heads and batch elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, Case, check, normal
from comparisons import Results, assert_same, results_of

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_bits_of_the_general_way(isa: str, dtype: torch.dtype) -> None:
    """That way is taken by calls whose heads share keys, and by those that want more gradients."""
    queries, keys = (1, 2, 0, 4, 3, 0, 1), (1, 16, 3, 5, 0, 0, 17)
    query, incoming = (normal(sum(queries), 4, 24, dtype=dtype, seed=seed) for seed in (1, 4))
    key, value = (normal(sum(keys), 2, 24, dtype=dtype, seed=seed) for seed in (2, 3))
    starts = [torch.tensor([0, *counts]).cumsum(0) for counts in (queries, keys)]
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = dict(zip(names, (*starts, max(queries), max(keys)), strict=True))
    packed = results_of(varlen_attention, (query, key, value), incoming, enable_gqa=True, **packing)
    for b, (first, first_key) in enumerate(zip(*starts, strict=True)):
        if b == len(queries):
            break
        of_queries, of_keys = slice(first, first + queries[b]), slice(first_key, first_key + keys[b])
        parts = [tensor.transpose(0, 1).unsqueeze(0) for tensor in
                 (query[of_queries], key[of_keys], value[of_keys], incoming[of_queries])]  # fmt: skip
        alone = results_of(scaled_dot_product_attention, parts[:3], parts[3], enable_gqa=True)
        for name, one in alone.items():
            rows = of_queries if name in ("out", "grad of query") else of_keys
            assert_same(packed[name][rows], one[0].transpose(0, 1), f"{name} of sequence {b}")
    for count in (1, 3, 7):
        tensors = [normal(3, 2, rows, 20, dtype=dtype, seed=rows) for rows in (3, count, count)]
        incoming = normal(3, 2, 3, 20, dtype=dtype, seed=5)
        mask, sinks = normal(3, count, dtype=dtype, seed=6), normal(2, dtype=tensors[0].dtype, seed=7)
        plain, more = (
            results_of(
                scaled_dot_product_attention,
                tensors,
                incoming,
                attn_mask=mask.requires_grad_(wanted),
                sinks=sinks,
            )
            for wanted in (False, True)
        )
        assert_same(more, plain, f"{count} keys")


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_hidden_junk_changes_nothing(isa: str, junk: float) -> None:
    query, key, value = (normal(2, 3, rows, 20, seed=rows) for rows in (2, 9, 9))
    shown = torch.ones(2, 9, dtype=torch.bool)
    shown[:, 4] = False
    shown[1, :7] = False
    incoming = normal(2, 3, 2, 20, seed=1)

    def results() -> Results:
        return results_of(scaled_dot_product_attention, (query, key, value), incoming, attn_mask=shown)

    plain = results()
    for tensor in (key, value):
        kept = tensor[0, 1, 4].clone()
        tensor[0, 1, 4] = junk
        assert_same(results(), plain, "hidden from all")
        tensor[0, 1, 4] = kept
    value[0, 1, 2] = junk
    found = results()
    for name in ("out", "grad of query"):
        assert_same(found[name][0, 1, 1], plain[name][0, 1, 1], f"{name}, hidden from this query")
        assert not bool(found[name][0, 1, 0].isfinite().any())
    assert_same(found["grad of value"], plain["grad of value"], "weights do not depend on values")
    value[0, 1, 2] = 0
    plain = results()
    query[0, 1, 0] = incoming[0, 1, 1] = junk
    found = results()
    for name in ("grad of key", "grad of value"):
        assert_same(found[name][0, 1, 4], plain[name][0, 1, 4], f"{name}, hidden from these queries")
