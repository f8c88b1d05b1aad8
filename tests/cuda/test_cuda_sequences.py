"""Packed sequences and caches on a GPU: changing lengths in graphs, unread lengths, pages.
The tests of numbers run on every device: see tests/support/gpu.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import gpu
import pytest
import torch
from torch import Tensor

from selfattn_ext import attention_with_kvcache, varlen_attention

gpu.need()

LONGEST = 400
#: Lengths of as many sequences each; their sums are at most the first sum.
LENGTHS = ((300, 0, 1, 77, 128), (400, 5, 16, 0, 3), (0, 0, 0, 0, 0), (100, 100, 100, 100, 106))
TOTAL = 506
#: Starts that lead outside of the tensors, that decrease, and that overflow 64 bits when they are multiplied.
WILD = (
    [-5, 2**40, 3, -(2**62), 7, 100],
    [0, 600, 1200, 1800, 2400, 3000],
    [2**62] * 6,
    [506, 0, 506, 0, 506, 0],
)

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")


def packed(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(TOTAL, heads, 64, device="cuda").to(dtype) for heads in (4, 2, 2)]


def step_of(tensors: list[Tensor], starts: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    points = [tensor.detach().requires_grad_() for tensor in tensors]
    out = varlen_attention(*points, starts, starts, LONGEST, LONGEST, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, points, torch.ones_like(out))
    return [out.detach(), *grads]


@dtypes
def test_a_graph_replays_with_other_lengths(dtype: torch.dtype, cuda_kernel: str) -> None:
    tensors, starts = packed(dtype), starts_of(LENGTHS[0])
    graph, found = gpu.captured(lambda: step_of(tensors, starts))
    for lengths in LENGTHS:
        starts.copy_(starts_of(lengths))
        graph.replay()
        for one, other in zip(found, step_of(tensors, starts), strict=True):
            assert torch.equal(one, other)


@dtypes
def test_wrong_lengths_in_a_graph_do_no_harm(dtype: torch.dtype, cuda_kernel: str) -> None:
    tensors, starts = packed(dtype), starts_of(LENGTHS[0])
    graph, found = gpu.captured(lambda: step_of(tensors, starts))
    expected = step_of(tensors, starts)
    for numbers in WILD:
        starts.copy_(torch.tensor(numbers))
        graph.replay()
    starts.copy_(starts_of(LENGTHS[0]))
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_calls_return_before_the_gpu_is_done(cuda_kernel: str) -> None:
    tensors, starts = packed(torch.bfloat16), starts_of(LENGTHS[0])
    assert not gpu.waits(lambda: step_of(tensors, starts))


def caches(dtype: torch.dtype, batch: int, capacity: int) -> tuple[Tensor, Tensor]:
    key, value = (torch.randn(batch, 2, capacity, 64, device="cuda").to(dtype) for _ in range(2))
    return key, value


@dtypes
def test_a_graph_of_a_decoding_step_extends_the_cache(dtype: torch.dtype, cuda_kernel: str) -> None:
    batch, capacity = 3, 700
    key_cache, value_cache = caches(dtype, batch, capacity)
    query, key, value = (torch.randn(batch, heads, 1, 64, device="cuda").to(dtype) for heads in (4, 2, 2))
    begin = torch.tensor([0, 130, 600], device="cuda")
    lengths = begin.clone()

    def step() -> Tensor:
        out = attention_with_kvcache(
            query, key_cache, value_cache, key, value, cache_seqlens=lengths, is_causal=True
        )
        lengths.add_(1)
        return out

    expected_caches = key_cache.clone(), value_cache.clone()
    with torch.no_grad():
        graph, found = gpu.captured(step)
        lengths.copy_(begin)
        for taken in range(3):
            graph.replay()
            expected = attention_with_kvcache(
                query, *expected_caches, key, value, cache_seqlens=begin + taken, is_causal=True
            )
            assert torch.equal(found, expected)
    for b, first in enumerate(begin.tolist()):
        for cache, new in ((key_cache, key), (value_cache, value)):
            assert torch.equal(cache[b, :, first : first + 3], new[b].expand(-1, 3, -1))


@dtypes
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("queries", [1, 40])
def test_pages_change_no_bit(dtype: torch.dtype, page_size: int, queries: int, cuda_kernel: str) -> None:
    batch, capacity = 3, 512
    key_cache, value_cache = caches(dtype, batch, capacity)
    columns = capacity // page_size
    table = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
    pages = []
    for cache in (key_cache, value_cache):
        page = torch.empty(batch * columns, 2, page_size, 64, device="cuda", dtype=dtype)
        page[table.flatten().long()] = cache.unflatten(2, (columns, page_size)).transpose(1, 2).flatten(0, 1)
        pages.append(page)
    query = torch.randn(batch, 4, queries, 64, device="cuda").to(dtype)
    lengths = torch.tensor([40, 512, 211], device="cuda")
    with torch.no_grad():
        expected = attention_with_kvcache(
            query, key_cache, value_cache, cache_seqlens=lengths, is_causal=True
        )
        found = attention_with_kvcache(
            query, *pages, cache_seqlens=lengths, block_table=table, is_causal=True
        )
    assert torch.equal(found, expected)
