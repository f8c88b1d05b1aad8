"""batch_invariant(): a row has the same bits alone, in a chunk of any size, and in the prompt.

The judge is the prompt as one call. test_a_pair_of_options shows that results are right if few queries are
computed as many are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, check
from comparisons import assert_same
from option_pairs import CASES
from prompts import HEADS, KV_HEADS, LENGTH, Prompt, assert_cuts, prompt
from torch import Tensor

from selfattn_ext import (
    KVCache,
    attention_with_kvcache,
    backends,
    batch_invariant,
    varlen_attention,
)
from selfattn_ext.arguments import forced_kernel

#: Chunks around the widths of vectors, strips, tiles and blocks of keys, and around the largest number of
#: queries that count as few.
SIZES = (*range(1, 14), 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
SOME_SIZES = (4, 5, 33)
if forced_kernel.current():
    SOME_SIZES = (33,)  # for the PTX machine, which is slow; MIXED has small sizes


def ends_of(size: int) -> list[int]:
    return [*range(size, LENGTH, size), LENGTH]


#: The cuts of prompts whose chunks differ in size; single rows are the first, the last, and some at edges.
MIXED = (1, 3, 8, 24, 25, 63, 64, 65, 88, 93, 94, 96, 100, 128, 129, LENGTH - 1, LENGTH)


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    with batch_invariant():
        yield


#: On instruction sets with bfloat16 pieces, each of these takes a different number of pieces.
ARITHMETICS = [
    (torch.float64, "highest"),
    (torch.float32, "highest"),
    (torch.float32, "high"),
    (torch.float32, "medium"),
    (torch.bfloat16, "highest"),
    (torch.float16, "highest"),
]


@pytest.fixture(params=ARITHMETICS, ids=lambda it: f"{str(it[0])[6:]}-{it[1]}")
def arithmetic(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Sets the precision of torch.float32; gives the dtype."""
    dtype, precision = request.param
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield dtype
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


def test_every_kernel(kernel: str, dtype: torch.dtype) -> None:
    assert_cuts(prompt(dtype), [ends_of(33), MIXED])


def test_a_chunk_of_any_size(isa: str, arithmetic: torch.dtype) -> None:
    """Among these are all rows one by one, of which other tests have some."""
    assert_cuts(prompt(arithmetic), [*map(ends_of, SIZES), MIXED])


def masks() -> dict[str, Tensor]:
    seen = torch.rand(1, HEADS, LENGTH, LENGTH) < 0.7
    seen[..., 70:75, :] = False  # these rows see nothing
    seen[..., 64:128] &= torch.arange(LENGTH).reshape(-1, 1) % 5 == 0  # few rows of a strip see these keys
    added = torch.randn(1, HEADS, LENGTH, LENGTH)
    return {
        "bool": seen,
        "float": added.masked_fill(~seen, -torch.inf),
        "shared": torch.rand(1, 1, 1, LENGTH) < 0.7,
    }


#: Every option, with head dims of every kind.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "window": lambda: {"window_size": (37, -1)},
    "softcap": lambda: {"softcap": 3.0},
    "alibi": lambda: {"alibi_slopes": torch.rand(HEADS)},
    "sinks": lambda: {"sinks": torch.randn(HEADS)},
    "bool_mask": lambda: {"mask": masks()["bool"]},
    "float_mask": lambda: {"mask": masks()["float"]},
    "shared_mask": lambda: {"mask": masks()["shared"]},
    "narrow": lambda: {"head_dim": 5, "value_dim": 3},
    "whole_tiles": lambda: {"head_dim": 64, "value_dim": 64},
    "wide": lambda: {"head_dim": 200, "value_dim": 130},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options: str, isa: str, dtype: torch.dtype) -> None:
    assert_cuts(prompt(dtype, **OPTIONS[options]()), [*map(ends_of, SOME_SIZES), MIXED])


def test_options_together(isa: str, arithmetic: torch.dtype) -> None:
    it = prompt(
        arithmetic,
        mask=masks()["float"],
        window_size=(90, -1),
        softcap=5.0,
        alibi_slopes=torch.rand(HEADS) / 50,
        sinks=torch.randn(HEADS),
    )
    assert_cuts(it, [*map(ends_of, SOME_SIZES), MIXED])


def hidden_nan(it: Prompt) -> None:
    """Puts NaN where earlier rows do not see it, but rows of the same strips and blocks do."""
    it.value[:, :, 70], it.value[:, :, 130], it.key[:, :, 97] = torch.nan, torch.inf, torch.nan


def overflowing(it: Prompt) -> None:
    """Makes sums of some rows overflow whose means do not."""
    it.value[:, :, 20:60] = torch.finfo(it.value.dtype).max


def large_scores(it: Prompt) -> None:
    """Makes maxima move by more than a weight can be, and queries that have no pieces."""
    it.key.mul_(torch.linspace(0.1, 20.0, LENGTH).reshape(-1, 1))
    if it.query.dtype != torch.float16:
        it.query[:, :, 40:44] *= 1e22
        it.value[:, :, 50] *= 1e-25


def vanishing(it: Prompt) -> None:
    """Makes sums that rescaling turns into -0, as maxima rise after the only value."""
    it.query.fill_(1.0)
    it.key.copy_(torch.linspace(0, 1.2, LENGTH).reshape(-1, 1).expand_as(it.key))
    numbers = torch.finfo(it.value.dtype)
    it.value.zero_()[:, :, 63] = -numbers.smallest_normal * numbers.eps


@pytest.mark.parametrize("change", [hidden_nan, overflowing, large_scores, vanishing])
def test_numbers_that_take_another_way(
    change: Callable[[Prompt], None], isa: str, arithmetic: torch.dtype
) -> None:
    it = prompt(arithmetic)
    change(it)
    assert_cuts(it, [*map(ends_of, SOME_SIZES), MIXED])


def test_distances_beyond_the_integers_of_float32(isa: str) -> None:
    it = replace(prompt(torch.float32, alibi_slopes=torch.rand(HEADS) * 1e-7), first=2**24 + 1)
    whole = it.attend(0, LENGTH)[0]
    for begin, end in itertools.chain(*(it.chunks(ends) for ends in (*map(ends_of, SOME_SIZES), MIXED))):
        assert_same(it.attend(begin, end, LENGTH)[0], whole[:, :, begin:end], f"rows {begin} to {end}")


def test_keys_behind_the_last_one_that_a_row_sees(isa: str, dtype: torch.dtype) -> None:
    """Keys that the causal rule hides change no bit, however many a call has."""
    it = prompt(dtype)
    out, _, lse = it.attend(40, 45)
    for keys in (46, 63, 64, 65, 128, LENGTH):
        assert_same(it.attend(40, 45, keys)[::2], (out, lse), f"with {keys} keys")


def paged(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Copies a cache (B, Hk, capacity, E) to shuffled pages, NaN elsewhere; returns them and their table."""
    batch, heads, capacity, width = cache.shape
    of_sequence = -(-capacity // size)
    pages = torch.full((batch * of_sequence, heads, size, width), torch.nan, dtype=cache.dtype)
    table = torch.randperm(batch * of_sequence, generator=torch.Generator("cpu").manual_seed(1))
    table = table.to(cache.device, torch.int32).reshape(batch, of_sequence)
    for b in range(batch):
        for at in range(0, capacity, size):
            rows = cache[b, :, at : at + size]
            pages[int(table[b, at // size]), :, : rows.shape[1]] = rows
    return pages, table


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64, 100])
def test_caches_of_unlike_lengths(page_size: int | None, isa: str, dtype: torch.dtype) -> None:
    """The steps of two sequences append a chunk to each, at different positions."""
    first, second = prompt(dtype), prompt(dtype)
    it = Prompt(
        *(torch.cat(pair) for pair in zip(*((p.query, p.key, p.value) for p in (first, second)), strict=True))
    )
    whole = [p.attend(0, LENGTH) for p in (first, second)]
    for begins, size in (((30, 0), 1), ((100, 3), 4), ((64, 129), 17), ((90, 60), 64)):
        lengths = torch.tensor(begins)
        # Beyond the keys of each sequence the cache is NaN.
        caches = it.key.clone(), it.value.clone()
        for cache in caches:
            for b, begin in enumerate(begins):
                cache[b, :, begin:] = torch.nan
        table: dict[str, Tensor] = {}
        if page_size is not None:
            (keys, numbers), (values, _) = (paged(cache, page_size) for cache in caches)
            caches, table = (keys, values), {"block_table": numbers}
        ends = [begin + size for begin in begins]
        query, key, value = (
            torch.stack([x[b, :, begins[b] : ends[b]] for b in range(2)])
            for x in (it.query, it.key, it.value)
        )
        out, lse = attention_with_kvcache(
            query, *caches, key, value, lengths, is_causal=True, layout="bhld", return_lse=True, **table
        )
        for b in range(2):
            rows = slice(begins[b], ends[b])
            expected = [part[0, :, rows] for part in whole[b][::2]]
            assert_same((out[b], lse[b]), expected, f"sequence {b}, {size} queries")


def test_packed_chunks(isa: str, dtype: torch.dtype) -> None:
    """One call has chunks of different sizes, as in a server that decodes and prefills at once."""
    it = prompt(dtype)
    out, _, lse = it.attend(0, LENGTH)
    chunks = [(LENGTH - 1, LENGTH), (0, 1), (20, 24), (20, 25), (0, 0), (5, 70), (0, LENGTH), (128, 145)]
    query = torch.cat([it.query[0, :, begin:end].transpose(0, 1) for begin, end in chunks])
    key, value = (torch.cat([x[0, :, :end].transpose(0, 1) for _, end in chunks]) for x in (it.key, it.value))
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        for lengths in ([end - begin for begin, end in chunks], [end for _, end in chunks])
    )
    found, found_lse = varlen_attention(
        query,
        key,
        value,
        starts_q,
        starts_k,
        LENGTH,
        LENGTH,
        is_causal=True,
        enable_gqa=True,
        query_offset=torch.tensor([begin for begin, _ in chunks]),
        return_lse=True,
    )
    for n, (begin, end) in enumerate(chunks):
        rows = slice(int(starts_q[n]), int(starts_q[n + 1]))
        assert_same(found[rows].transpose(0, 1), out[0, :, begin:end], f"out of chunk {n}")
        assert_same(found_lse[:, rows], lse[0, :, begin:end], f"lse of chunk {n}")


def test_a_decoder_that_prefills_in_chunks(isa: str) -> None:
    """In packed steps on a KVCache, one sequence decodes while another's prompt comes in chunks."""
    first, second = prompt(torch.float32), prompt(torch.float32)
    whole = [p.attend(0, LENGTH)[0] for p in (first, second)]
    cache = KVCache(
        layers=1, sequences=2, kv_heads=KV_HEADS, head_dim=48, value_dim=40, capacity=256, page_size=16
    )
    at = [0, 0]
    for counts in ((100, 7), (1, 40), (1, 1), (3, 66), (0, 20)):
        ends = [begin + count for begin, count in zip(at, counts, strict=True)]
        query, key, value = (
            torch.cat([x[0, :, at[b] : ends[b]].transpose(0, 1) for b, x in enumerate(pair)])
            for pair in (
                (first.query, second.query),
                (first.key, second.key),
                (first.value, second.value),
            )
        )
        cache.extend(torch.tensor(counts))
        out = cache.attend(0, query, key, value)
        for b, rows in enumerate(out.split(counts)):
            assert_same(rows.transpose(0, 1), whole[b][0, :, at[b] : ends[b]], f"sequence {b}, {counts}")
        at = ends


@pytest.mark.cpu_only(reason="threads of the CPU")
def test_threads(isa: str, one_thread: None, dtype: torch.dtype) -> None:
    it = prompt(dtype)
    alone = it.attend(0, LENGTH)
    torch.set_num_threads(2)
    assert_cuts(it, [MIXED, ends_of(1)])
    assert_same(it.attend(0, LENGTH), alone, "two threads")


@pytest.mark.parametrize("options", ["whole_tiles", "float_mask"])
def test_gradients_of_queries(options: str, isa: str, arithmetic: torch.dtype) -> None:
    it = prompt(arithmetic, **OPTIONS[options]())
    cotangent = torch.randn(1, HEADS, LENGTH, it.value.shape[-1]).to(arithmetic)
    query = it.query.requires_grad_()

    def gradient(begin: int, end: int) -> Tensor:
        (grad,) = torch.autograd.grad(it.attend(begin, end)[0], query, cotangent[:, :, begin:end])
        return grad[:, :, begin:end]

    whole = gradient(0, LENGTH)
    for ends in (ends_of(33), MIXED):
        for begin, end in it.chunks(ends):
            assert_same(gradient(begin, end), whole[:, :, begin:end], f"rows {begin} to {end}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pair_of_options(case: Case, isa: str) -> None:
    check(case)


@pytest.mark.cpu_only(reason="the reason is how the CPU decodes")
def test_fast_ways_are_taken_without_it(isa: str, dtype: torch.dtype) -> None:
    """Otherwise the setting would not be needed: one query is computed by other sums than many."""
    it = prompt(dtype)
    with batch_invariant(False):
        out = it.attend(0, LENGTH)[0]
        assert any(
            not torch.equal(it.attend(row, row + 1)[0], out[:, :, row : row + 1]) for row in range(LENGTH)
        )


@pytest.mark.cpu_only(reason="instruction sets of a CPU")
@pytest.mark.parametrize("queries", [1, 16, 200])
def test_one_instruction_set_takes_all(queries: int, isa: str) -> None:
    """explain() names the kernel, which without the setting depends on the number of queries."""
    query = key = value = torch.randn(1, 1, queries, 64).bfloat16()
    assert backends.explain(query, key, value).isa == isa
