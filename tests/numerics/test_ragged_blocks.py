"""Keys that do not fill a block, or that only some of neighbouring queries see.

Sizes are around 16, 32, 64 and 128; diagonals, windows and key lengths begin and end anywhere, with junk
beside them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from comparisons import assert_same, attend, check_call
from torch import Tensor

from selfattn_ext import attention_with_kvcache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Numbers of keys around parts of a block, one block, two blocks, and those that are loaded together.
KEYS = (1, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 161, 192, 255, 257)
QUERIES = (17, 32, 33, 65)


def inputs(queries: int, keys: int, dtype: torch.dtype, head_dim: int = 64) -> list[Tensor]:
    shapes = (1, 2, queries, head_dim), (1, 1, keys, head_dim), (1, 1, keys, 32)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return tuple(check_call(tensors, None, options, dtype=tensors[0].dtype).values())


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_keys(dtype: torch.dtype, keys: int, kernel: str) -> None:
    """With some head dims keys are used in place, with others they are copied first."""
    for queries, head_dim in itertools.product(QUERIES, (64, 40)):
        check(inputs(queries, keys, dtype, head_dim))


@pytest.mark.parametrize("offset", [-40, -1, 0, 1, 15, 31, 33, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_diagonals(dtype: torch.dtype, offset: int, kernel: str) -> None:
    for queries, keys in ((97, 33), (65, 97), (97, 130), (32, 257), (129, 129)):
        check(inputs(queries, keys, dtype), is_causal=True, query_offset=offset)


WINDOWS = [(0, 0), (1, 0), (31, 0), (32, 32), (33, 5), (63, 64), (100, 0), (0, 100), (128, -1), (-1, 17)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows(dtype: torch.dtype, window: tuple[int, int], kernel: str) -> None:
    for queries, keys, offset in ((97, 97, 0), (65, 257, 100), (161, 130, -7), (129, 350, 61)):
        check(inputs(queries, keys, dtype), window_size=window, query_offset=offset)


@pytest.mark.parametrize("keys", [97, 128, 161, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_late_maxima_at_an_edge(dtype: torch.dtype, keys: int, kernel: str) -> None:
    """Scores rise where a diagonal or a window ends, after keys whose scores are -inf or small."""
    for step in (0, 1, 31, 64, 95):
        query, key, value = inputs(97, keys, torch.float32)
        query[..., 0] = 8.0
        key[..., 0] = 0.0
        key[:, :, step:, 0] = 40.0
        tensors = [tensor.to(dtype) for tensor in (query, key, value)]
        check(tensors, is_causal=True, query_offset=keys - 97)
        check(tensors, window_size=(40, 3), query_offset=keys // 2)


def test_scores_that_are_minus_infinity(kernel: str) -> None:
    """The largest score of a row comes after 70 keys whose scores are too far below to be numbers."""
    query, key, value = inputs(32, 300, torch.bfloat16)
    query[..., 0] = 3e38
    key[..., 0] = 0.0
    key[:, :, :70, 0] = -3e38
    check([query, key, value])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_junk_that_some_queries_do_not_see(dtype: torch.dtype, kernel: str) -> None:
    """Rows that do not see a key or a value of NaN keep every bit, even if they see its neighbour; the
    others are NaN.
    """
    for queries, keys, offset in ((97, 130, 33), (64, 64, 0), (33, 257, 200)):
        tensors = inputs(queries, keys, dtype)
        for options in ({"is_causal": True}, {"window_size": (20, 9)}):
            left, right = options.get("window_size", (keys, 0))
            clean = attend(*tensors, query_offset=offset, **options)
            for junk, which in itertools.product((offset, offset + 20, keys - 1), (1, 2)):
                dirty = [tensor.clone() for tensor in tensors]
                dirty[which][:, :, junk, 3] = torch.nan
                position = torch.arange(queries) + offset
                sees = (junk >= position - left) & (junk <= position + right)
                found = attend(*dirty, query_offset=offset, **options)
                unseen = ([part[:, :, ~sees] for part in parts] for parts in (found, clean))
                assert_same(*unseen, (junk, which))
                assert bool(found[0][:, :, sees].isnan().any(-1).all()), (junk, which)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_of_a_row_change_no_bit(dtype: torch.dtype, isa: str) -> None:
    """The neighbours are rows whose maximum moves, in one block or in each, or rows of special numbers."""
    query, key, value = inputs(70, 300, torch.float32)
    query[..., 0], key[..., 0] = 0.0, torch.arange(300) // 64
    odd, others = [3, 40], [row for row in range(70) if row not in (3, 40)]
    for options in ({}, {"is_causal": True, "query_offset": 200}, {"attn_mask": torch.rand(70, 300) < 0.9}):
        clean = attend(*(tensor.to(dtype) for tensor in (query, key, value)), **options)
        for number in (60.0, 30000.0 if dtype == torch.float16 else 80.0, torch.inf, -torch.inf, torch.nan):
            dirty = query.clone()
            dirty[:, :, odd, 0] = number
            found = attend(*(tensor.to(dtype) for tensor in (dirty, key, value)), **options)
            assert_same(*([part[:, :, others] for part in parts] for parts in (found, clean)), number)


def blocks_hidden(queries: int, keys: int, hidden: list[int], alone: int) -> Tensor:
    """Returns a mask that shows none or most of each 64 keys, and others to the first 64 queries."""
    seen = torch.rand(queries, keys) < 0.8
    for block in hidden:
        seen[:64, 64 * block : 64 * (block + 1)] = False
        seen[64:, 64 * (block + 1) : 64 * (block + 2)] = False
    seen[:, alone] = True
    return seen


#: Hidden blocks of 64 keys: the first or second half of a block of 128, or both; the first or last block;
#: neighbouring or separate ones.
HIDDEN: list[list[int]] = [
    *([], [0], [1], [0, 1], [2], [3], [1, 2]),
    *([0, 2], [1, 3], [4], [0, 1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 4]),
]


@pytest.mark.parametrize("first", range(0, len(HIDDEN), 7))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_that_hide_blocks(dtype: torch.dtype, first: int, kernel: str) -> None:
    """Masks are boolean and additive; keys that they hide from all may be junk, and change no bit."""
    queries, keys = 97, 300
    tensors = inputs(queries, keys, dtype)
    for index, hidden in enumerate(HIDDEN[first : first + 7], first):
        seen = blocks_hidden(queries, keys, hidden, alone=(290, 5, 130)[index % 3])
        if index % 4 == 1:
            seen[32:64] = False  # this strip of queries sees nothing
        seen[:, [70, 131, 257]] = False
        bias = torch.randn(queries, keys).masked_fill(~seen, -torch.inf).to(dtype)
        for mask in (seen, bias):
            options = {"attn_mask": mask, "is_causal": index % 2 == 1, "query_offset": 200}
            clean = check(tensors, **options)
            dirty = [tensors[0], *(tensor.clone() for tensor in tensors[1:])]
            for tensor in dirty[1:]:
                tensor[:, :, [70, 131, 257]] = torch.nan
            assert_same(attend(*dirty, **options), clean, hidden)


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 2.0},
    {"softcap": 1.5, "scale": 0.3, "is_causal": True, "query_offset": 70},
    {"scale": 0.3, "window_size": (70, 20), "query_offset": 40},
    {"sinks": torch.tensor([0.5, -30.0]), "window_size": (40, 0), "query_offset": 10},
    {"alibi_slopes": torch.tensor([0.1, 0.01]), "scale": 0.2},
    {"alibi_slopes": torch.tensor([0.1, 0.01]), "softcap": 3.0, "window_size": (100, 30), "query_offset": 80},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_altered_scores(dtype: torch.dtype, options: dict[str, Any], kernel: str) -> None:
    options = {
        name: option.to(dtype) if isinstance(option, Tensor) else option for name, option in options.items()
    }
    mask = torch.randn(129, 257).masked_fill(torch.rand(129, 257) < 0.3, -torch.inf).to(dtype)
    for queries, keys in ((97, 130), (32, 257), (129, 257)):
        tensors = inputs(queries, keys, dtype)
        for more in ({}, {"attn_mask": mask[:queries, :keys]}):
            check(tensors, **options, **more)


LENGTHS = (1, 33, 64, 95, 130, 200, 129)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unlike_lengths_of_one_batch(dtype: torch.dtype, kernel: str) -> None:
    """Each batch element has the same bits as alone, whatever is beyond its keys."""
    queries, size = 48, 220
    query = torch.randn(len(LENGTHS), 2, queries, 64).to(dtype)
    key, value = (torch.randn(len(LENGTHS), 1, size, dim).to(dtype) for dim in (64, 32))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for causal in (False, True):
        for junk in (0.0, torch.nan):
            for index, length in enumerate(LENGTHS):
                key[index, :, length:] = value[index, :, length:] = junk
            out = attention_with_kvcache(query, key, value, cache_seqlens=lengths, is_causal=causal)
            for index, length in enumerate(LENGTHS):
                tensors = [query[[index]], key[[index], :, :length], value[[index], :, :length]]
                offset = length - queries if causal else 0
                alone, _ = attend(*tensors, is_causal=causal, query_offset=offset)
                assert_same(out[index], alone[0], (length, junk, causal))
