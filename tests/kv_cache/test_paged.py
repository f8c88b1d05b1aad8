"""Operators on caches, in slots and in pages, whose sequences have different lengths.

The operators give each sequence the bits that it has alone, wherever its keys lie.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, dropout_seed
from kv_cache_cases import in_pages
from torch import Tensor

from selfattn_ext import ops

PAGE_SIZES = (1, 7, 16, 64, 257)

QUERIES = (1, 3, 5, 50)

#: No key, one key, and lengths around the blocks and chunks for few queries (512, 1024) and for many (64).
LENGTHS = (0, 1, 15, 63, 64, 65, 256, 512, 513, 1031)

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 24, 40


def option(name: str, batch: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the operators' arguments for one of OPTIONS."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if name == "bool mask":
        return {"attn_mask": torch.rand(batch, HEADS, queries, keys) < 0.7}
    if name == "float mask":
        return {"attn_mask": torch.randn(1, 1, queries, keys).to(dtype)}
    if name == "key mask":
        return {"attn_mask": torch.rand(batch, 1, 1, keys) < 0.7}
    if name == "window":
        return {"window_left": 37, "window_right": 3}
    if name == "softcap":
        return {"softcap": 1.5}
    if name == "sinks":
        return {"sinks": torch.randn(1, HEADS).to(wide)}
    if name == "slopes":
        return {"alibi_slopes": torch.rand(batch, HEADS).to(wide)}
    if name == "dropout":
        return {"dropout_p": 0.3, "dropout_seed": dropout_seed(0)}
    assert name == "plain"
    return {}


OPTIONS = ("plain", "bool mask", "float mask", "key mask", "window", "softcap", "sinks", "slopes", "dropout")


class Cache:
    """Queries and a cache of keys and values, whose rows without a key hold NaN."""

    def __init__(
        self, queries: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, kv_heads: int = KV_HEADS
    ) -> None:
        self.lengths = torch.tensor(lengths)
        self.kv_heads = kv_heads
        batch, most = len(lengths), max(lengths) + 3
        self.query = torch.randn(batch, HEADS, queries, HEAD_DIM).to(dtype)
        self.key = torch.randn(batch, kv_heads, most, HEAD_DIM).to(dtype)
        self.value = torch.randn(batch, kv_heads, most, VALUE_DIM).to(dtype)
        for b, length in enumerate(lengths):
            self.key[b, :, length:] = torch.nan
            self.value[b, :, length:] = torch.nan
        # As at the end of a cache, the last query is at the last key.
        self.offsets = self.lengths - queries

    def pages(self, size: int, heads_inside: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys and values in pages without order, and their table. Table entries past a sequence's
        length name no page.
        """
        (key, value), table = in_pages([self.key, self.value], size, torch.Generator().manual_seed(0))
        used = torch.arange(table.shape[1]) * size < self.lengths[:, None]
        if heads_inside:
            key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (key, value))
        return key, value, table.masked_fill(~used, -7)


def as_wide(mask: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Returns a mask as wide as the table; its elements past the lengths are not read."""
    return torch.nn.functional.pad(mask, (0, table.shape[1] * page_size - mask.shape[-1]), value=1)


def run(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> dict[str, Tensor]:
    """Calls the operators for the forward and for the weights."""
    scale = HEAD_DIM**-0.5
    out, row_max, row_sum, _ = ops.attention_forward(query, key, value, scale, **options)
    weights = ops.attention_weights(query, key, row_max, row_sum, scale, **options)
    return {"out": out, "row_max": row_max, "row_sum": row_sum, "weights": weights}


def check_pages(cache: Cache, page_size: int, name: str, causal: bool) -> None:
    options = option(name, len(cache.lengths), cache.query.shape[2], cache.key.shape[2], cache.query.dtype)
    options |= {"is_causal": causal, "query_offsets": cache.offsets, "seqlens_k": cache.lengths}
    contiguous = run(cache.query, cache.key, cache.value, **options)
    assert not contiguous["out"].isnan().any()
    if page_size == 16:  # once for all sizes
        heads_inside = [
            tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (cache.key, cache.value)
        ]
        for field, found in run(cache.query, *heads_inside, **options).items():
            assert torch.equal(found, contiguous[field]), f"{field}, {name}, heads inside"
    for inside in (False, True):
        key, value, table = cache.pages(page_size, inside)
        wide = {"attn_mask": as_wide(options["attn_mask"], table, page_size)} if "mask" in name else {}
        paged = run(cache.query, key, value, **options | wide, block_table=table)
        weights = paged["weights"]
        paged["weights"] = weights[..., : cache.key.shape[2]]
        assert not weights[..., cache.key.shape[2] :].any()
        for field, expected in contiguous.items():
            assert torch.equal(paged[field], expected), f"{field}, {name}, pages of {page_size}"


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_change_no_bit(page_size: int, queries: int, kernel: str) -> None:
    """Each page size, number of queries and dtype occurs, with the causal rule or without."""
    check_dtypes(page_size, queries, kernel, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_change_no_bit_with_and_without_the_causal_rule(
    page_size: int, queries: int, kernel: str
) -> None:
    check_dtypes(page_size, queries, kernel, 1)


def check_dtypes(page_size: int, queries: int, kernel: str, turn: int) -> None:
    # The loops have no blocks whose edges long sequences would reach.
    lengths = (0, 1, 9, 70) if kernel == "loops" else LENGTHS
    size, number = PAGE_SIZES.index(page_size), QUERIES.index(queries)
    for place, dtype in enumerate(DTYPES, size + number):
        causal = bool((place + turn) % 2)
        name = OPTIONS[(place + number + 4 * turn) % len(OPTIONS)]
        check_pages(Cache(queries, dtype, lengths), page_size, name, causal)


@pytest.mark.parametrize(
    ("place", "queries", "dtype"),
    [(0, 1, torch.float32), (1, 1, torch.bfloat16), (2, 4, torch.float32), (3, 4, torch.bfloat16)],
)
@pytest.mark.parametrize(("number", "page_size"), [*enumerate((1, 7, 16, 33, 64, 257))])
def test_heads_in_turn(
    number: int, page_size: int, place: int, queries: int, dtype: torch.dtype, isa: str, one_thread: None
) -> None:
    """With enough heads and work, decoding works on several heads at a time, by steps of small pages. Each
    page size meets each option.
    """
    name = ("plain", "window", "bool mask")[(number + place) % 3]
    check_pages(Cache(queries, dtype, kv_heads=4), page_size, name, causal=queries > 1)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, queries: int, isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_pages(Cache(queries, dtype, (0, 5, 130, 600)), 16, name, causal=True)


@pytest.mark.parametrize(("place", "queries"), [*enumerate((1, 4, 33))])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dropout"])
def test_an_element_has_the_bits_that_it_has_alone(name: str, place: int, queries: int, isa: str) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[(OPTIONS.index(name) + place) % 3]
    cache = Cache(queries, dtype)
    options = option(name, len(LENGTHS), queries, cache.key.shape[2], dtype)
    joint = run(
        cache.query,
        cache.key,
        cache.value,
        is_causal=True,
        query_offsets=cache.offsets,
        seqlens_k=cache.lengths,
        **options,
    )
    for b, length in enumerate(LENGTHS):
        own = dict(options)
        if "attn_mask" in own:
            mask = own["attn_mask"]
            own["attn_mask"] = mask[b if mask.shape[0] > 1 else 0][None, ..., :length]
        if name == "slopes":
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        alone = run(
            cache.query[b : b + 1],
            cache.key[b : b + 1, :, :length],
            cache.value[b : b + 1, :, :length],
            is_causal=True,
            query_offset=length - queries,
            **own,
        )
        for field, expected in alone.items():
            found = joint[field][b : b + 1]
            if field == "weights":
                assert not found[..., length:].any()
                found = found[..., :length]
            assert torch.equal(found, expected), f"{field} of {length} keys"


def test_threads_change_no_bit(one_thread: None) -> None:
    cache = Cache(2, torch.bfloat16)
    key, value, table = cache.pages(16)
    options = {"seqlens_k": cache.lengths, "block_table": table}
    alone = run(cache.query, key, value, **options)
    torch.set_num_threads(3)
    for field, found in run(cache.query, key, value, **options).items():
        assert torch.equal(found, alone[field]), field


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_hidden_keys_of_a_page_leave_no_trace(junk: float, isa: str) -> None:
    """The pass that skips hidden keys reads pages, too."""
    for queries in (2, 9):
        cache = Cache(queries, torch.float32, (300, 700))
        mask = torch.rand(2, 1, 1, cache.key.shape[2]) < 0.5
        options = {"attn_mask": mask, "seqlens_k": cache.lengths}
        clean = run(cache.query, cache.key, cache.value, **options)
        cache.key.masked_fill_(~mask.mT, junk)
        cache.value.masked_fill_(~mask.mT, junk)
        key, value, table = cache.pages(7)
        wide = {"attn_mask": as_wide(mask, table, 7), "block_table": table}
        spoiled = run(cache.query, key, value, **(options | wide))
        for field in ("out", "row_max", "row_sum"):
            assert torch.equal(spoiled[field], clean[field]), field
