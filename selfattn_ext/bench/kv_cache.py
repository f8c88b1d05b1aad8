"""Cases of decoding from KV caches of several lengths: one new token per sequence of a batch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext import attention_with_kvcache
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import OURS, TORCH, Call, Contender
from selfattn_ext.kv_cache import huge_pages

Layout = Literal["bhld", "blhd"]

#: Tokens per page of the caches in pages that are timed beside those in slots.
PAGE_SIZES = (16, 64, 256)

_MOST_PADDED = 1e9


@dataclass(frozen=True)
class CacheCase(Case):
    """One query for each of ``batch`` sequences, each with a cache.

    The caches hold ``lengths`` keys, the one that the call appends included; ``keys`` is the capacity. With
    ``page_size`` 0 the cache is in slots. ``layout`` is that of attention_with_kvcache, for caches and pages.
    """

    lengths: tuple[int, ...] = ()
    page_size: int = 0
    layout: Layout = "bhld"

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, head_dim: int, **fields: Any) -> CacheCase:
        capacity = max(lengths)
        return cls(len(lengths), heads, 1, head_dim, keys=capacity, lengths=tuple(lengths), **fields)

    def options(self) -> str:
        found = [f"lengths={min(self.lengths)}-{self.key_count}"]
        if self.kv_heads is not None:
            found.append(f"kv_heads={self.kv_heads}")
        if self.page_size:
            found.append(f"page_size={self.page_size}")
        return " ".join([*found, self.layout])

    def pairs(self) -> int:
        return sum(self.lengths)

    def total_keys(self) -> int:
        return sum(self.lengths)

    def element(self, index: int) -> Case:
        return Case(
            1, self.heads, 1, self.head_dim, self.dtype, keys=self.lengths[index], kv_heads=self.kv_heads
        )

    def new_keys(self, draw: Callable[..., Tensor], width: int) -> Tensor:
        """Returns keys or values as in Case, with the layout of the cache in memory."""
        return _in_layout(self, draw, self.batch, self.key_count, width)

    def further(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "page_size": self.page_size, "layout": self.layout}


def _cache(case: Case) -> CacheCase:
    assert isinstance(case, CacheCase)
    return case


def new_rows(case: CacheCase, cache: Tensor) -> Tensor:
    """Returns the rows (B, Hk, 1, E) that the call appends: the last ones of a cache (B, Hk, S, E)."""
    last = torch.tensor(case.lengths, device=cache.device) - 1
    return cache[torch.arange(case.batch, device=cache.device), :, last][:, :, None].clone()


def block_table(case: CacheCase, seed: int = 0) -> Tensor:
    """Returns a block_table (B, pages), int32: pages in random order for each sequence, then 0."""
    counts = [-(-length // case.page_size) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.zeros(case.batch, max(counts), dtype=torch.int32)
    for row, numbers in zip(table, order.split(counts), strict=True):
        row[: len(numbers)] = numbers
    return table


def pages_of(case: CacheCase, cache: Tensor, table: Tensor) -> Tensor:
    """Copies a cache (B, Hk, S, E) to pages (N, Hk, page_size, E) in the case's layout.

    Their memory is allocated as KVCache does it.
    """
    size = case.page_size

    def zeros(*shape: int) -> Tensor:
        return huge_pages.empty(shape, cache.dtype, cache.device).zero_()

    pages = _in_layout(case, zeros, int(table.max()) + 1, size, cache.shape[3])
    for sequence, numbers, length in zip(cache, table.tolist(), case.lengths, strict=True):
        for index in range(-(-length // size)):
            rows = sequence[:, index * size : min(length, (index + 1) * size)]
            pages[numbers[index], :, : rows.shape[1]] = rows
    return pages


def _in_layout(case: CacheCase, make: Callable[..., Tensor], count: int, rows: int, width: int) -> Tensor:
    """Returns make(*shape) as (count, Hk, rows, width), with the case's layout in memory."""
    if case.layout == "bhld":
        return make(count, case.kv_head_count, rows, width)
    return make(count, rows, case.kv_head_count, width).transpose(1, 2)


def _laid_out(case: CacheCase, tensor: Tensor) -> Tensor:
    """Returns a tensor (., H, rows, E) in the case's layout, not copied if its memory has that layout."""
    return tensor if case.layout == "bhld" else tensor.transpose(1, 2).contiguous()


def _prepare(case: Case, tensors: Inputs) -> Call:
    case = _cache(case)
    table = block_table(case) if case.page_size else None

    def stored(cache: Tensor) -> Tensor:
        return _laid_out(case, cache if table is None else pages_of(case, cache, table))

    query, key_cache, value_cache = _laid_out(case, tensors.query), stored(tensors.key), stored(tensors.value)
    key, value = (_laid_out(case, new_rows(case, cache)) for cache in (tensors.key, tensors.value))
    before = torch.tensor(case.lengths, dtype=torch.int32, device=query.device) - 1
    table = None if table is None else table.to(query.device)
    grouped = case.kv_head_count != case.heads

    def call() -> Tensor:
        out = attention_with_kvcache(
            query,
            key_cache,
            value_cache,
            key,
            value,
            before,
            table,
            is_causal=True,
            enable_gqa=grouped,
            layout=case.layout,
        )
        assert isinstance(out, Tensor)
        return out

    return call


def pages_name(page_size: int) -> str:
    """Returns the name of the contender with pages of that many tokens."""
    return f"pages of {page_size}"


def _in_pages(page_size: int) -> Contender:
    """Returns this package as a contender that stores in pages what the case has in slots."""

    def prepare(case: Case, tensors: Inputs) -> Call:
        if _cache(case).page_size:
            raise NotImplementedError("the case has pages already")
        return _prepare(replace(_cache(case), page_size=page_size), tensors)

    return Contender(pages_name(page_size), prepare, padded=_from_layout)


def _prepare_torch(case: Case, tensors: Inputs) -> Call:
    case = _cache(case)
    if case.page_size:
        raise NotImplementedError("scaled_dot_product_attention takes no pages")
    if tensors.query.device.type == "cpu" and case.flops() > _MOST_PADDED:
        raise NotImplementedError(f"cases of more than {_MOST_PADDED:.0e} operations take seconds on the CPU")
    mask = torch.arange(case.key_count) < torch.tensor(case.lengths)[:, None, None, None]
    mask = mask.to(tensors.query.device)
    grouped = case.kv_head_count != case.heads

    def call() -> Tensor:
        # torch reads the tensors in the case's layout in memory, too.
        return F.scaled_dot_product_attention(
            tensors.query, tensors.key, tensors.value, attn_mask=mask, enable_gqa=grouped
        )

    return call


def _prepare_torch_varlen(case: Case, tensors: Inputs) -> Call:
    """Prepares torch.nn.attention.varlen on the same caches, without the append, a copy of a few rows."""
    case = _cache(case)
    if tensors.query.device.type != "cuda":
        raise NotImplementedError("torch.nn.attention.varlen computes only on CUDA")
    if not case.page_size:
        raise NotImplementedError("torch.nn.attention.varlen takes pages, or keys without room between them")
    attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "seqused_k" not in inspect.signature(attend).parameters:
        raise NotImplementedError(f"torch.nn.attention.varlen of torch {torch.__version__} takes no caches")
    table = block_table(case)
    pages = [
        pages_of(case, cache, table).transpose(1, 2).contiguous() for cache in (tensors.key, tensors.value)
    ]
    device = tensors.query.device
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    options: dict[str, Any] = {
        "seqused_k": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "block_table": table.to(device),
        "enable_gqa": case.kv_head_count != case.heads,
    }
    query = tensors.query[:, :, 0].contiguous()

    def call() -> Tensor:
        return attend(query, *pages, starts, None, 1, case.key_count, **options)

    return call


def _from_layout(case: Case, result: Tensor) -> Tensor:
    """Returns as (B, H, 1, E) what a call in the case's layout returns."""
    return result if _cache(case).layout == "bhld" else result.transpose(1, 2)


def _from_packed(case: Case, result: Tensor) -> Tensor:
    return result[:, :, None]


TORCH_VARLEN = Contender("varlen", _prepare_torch_varlen, padded=_from_packed)

CONTENDERS = (
    Contender(OURS.name, _prepare, padded=_from_layout),
    Contender(TORCH.name, _prepare_torch),
    *(_in_pages(size) for size in PAGE_SIZES),
)
