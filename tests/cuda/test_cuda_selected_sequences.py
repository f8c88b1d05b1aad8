"""Selected keys of packed sequences and of caches on a GPU: kernels that go through the lists, and no mask.

Pairs of options and forms of caches are judged on every device by tests/sparse.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
import varlen_cases
from cases import DTYPES, check
from comparisons import assert_same
from selected_varlen_cases import SelectedCase, selecting
from torch import Tensor
from varlen_cases import packed

from selfattn_ext import attention_with_kvcache, varlen_attention

gpu.need()

#: Lengths around tiles, primes, and sequences without queries or keys.
LENGTHS = ((67, 70), (0, 5), (3, 0), (1, 1), (5, 64), (19, 130))
BASE = varlen_cases.of(LENGTHS, heads=4, kv_heads=2, head_dim=20, value_dim=24, lse=True, device="cuda")
kinds = pytest.mark.parametrize("kind", ["keys", "keys of all heads", "blocks of 7", "blocks of 64"])


@pytest.fixture(autouse=True)
def _no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it an error if a selection becomes a mask."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a selection became a mask")

    monkeypatch.setattr(importlib.import_module("selfattn_ext.sparse.sequences"), "_as_mask", refuse)


class FixedMask(SelectedCase):
    """A case whose mask requires no gradient, for which calls take the mask of the selection."""

    def inputs(self) -> dict[str, Tensor]:
        tensors = super().inputs()
        return {name: it.detach() if name == "attn_mask" else it for name, it in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    offsets = tuple(keys - queries for queries, keys in LENGTHS)
    check(selecting(replace(BASE, dtype=dtype, is_causal=True, offsets=offsets), kind))


OPTIONS: dict[str, dict[str, Any]] = {
    "rows of no sequence": {"more": 9, "layout": "columns"},
    "window": {"window": (19, 4), "offsets": (9, 0, -3, 1, 40, 120)},
    "bool mask": {"mask": "bool", "sinks": 2},
    "list of masks": {"mask": "float heads", "mask_list": True, "alibi": 2},
    "dropout": {"dropout_p": 0.4, "alibi": 1, "softcap": 2.0},
    "wide": {"head_dim": 131, "value_dim": 150, "index_dtype": torch.int32},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@kinds
def test_options(kind: str, options: dict[str, Any]) -> None:
    fields = dict(options)
    in_list = fields.pop("mask_list", False)
    case = selecting(replace(BASE, **fields), kind, mask_list=in_list)
    check(FixedMask(**vars(case)))


@kinds
def test_a_longer_maximum_changes_no_bit(kind: str) -> None:
    """Nor do the memory and the order of the inverse lists follow from it."""
    case = selecting(BASE, kind, 9)
    tensors = case.inputs()
    once = case.run_with_gradients(tensors)
    longer = replace(case, queries=case.queries + 100, keys=case.keys + 100)
    assert_same(longer.run_with_gradients(tensors), once)


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("queries", [1, 9])
def test_caches_have_the_bits_of_packed_sequences(queries: int, size: int) -> None:
    """In slots and in pages, which hold NaN where no sequence has a key; with a list for each query, and for
    neighbouring queries.
    """
    lengths, capacity, page = (37, 9, 70, 0), 80, 8
    generator = torch.Generator().manual_seed(queries)
    query, key, value = (
        torch.randn(4, heads, rows, 20, generator=generator, device="cpu").cuda()
        for heads, rows in ((4, queries), (2, capacity), (2, capacity))
    )
    for b, length in enumerate(lengths):
        key[b, :, length:], value[b, :, length:] = torch.nan, torch.nan
    chosen = torch.stack(
        [
            torch.randint(-1, -(-length // size), (2, queries, 6), generator=generator, device="cpu")
            for length in lengths
        ]
    ).cuda()
    name: dict[str, Any] = {"indices": chosen} if size == 1 else {"block_indices": chosen, "block_size": size}
    used = torch.tensor(lengths, device="cuda")
    given: dict[str, Any] = {"cache_seqlens": used, "is_causal": True}
    found = attention_with_kvcache(query, key, value, **given, **name)

    rows = next(iter(name))
    counts = [queries] * 4
    starts = varlen_cases.starts(counts, device="cuda"), varlen_cases.starts(lengths, device="cuda")
    of_all = [packed(query, counts), packed(key, lengths), packed(value, lengths)]
    options = {**name, rows: chosen.transpose(0, 1).flatten(1, 2)}
    one = varlen_attention(
        *of_all, *starts, queries, 70, **options, is_causal=True, query_offset=used - queries, enable_gqa=True
    )
    assert_same(found.transpose(1, 2).flatten(0, 1), one)

    table = torch.randperm(4 * capacity // page, device="cuda").int().view(4, -1)
    pages = []
    for cache in (key, value):
        pages.append(torch.empty(table.numel(), 2, page, 20, device="cuda"))
        pages[-1][table.long()] = cache.unflatten(2, (-1, page)).transpose(1, 2)
    # Entries behind a sequence's last page are numbers of no page.
    table[torch.arange(0, capacity, page, device="cuda") >= used[:, None]] = 2**31 - 1
    assert_same(attention_with_kvcache(query, *pages, block_table=table, **given, **name), found)
    if size > 1:
        few = {**name, rows: chosen[:, :, ::size]}
        many = {**name, rows: few[rows].repeat_interleave(size, 2)[:, :, :queries]}
        once = attention_with_kvcache(query, key, value, **given, **few)
        torch.testing.assert_close(once, attention_with_kvcache(query, key, value, **given, **many))


def test_a_graph_replays_with_other_lengths_and_indices() -> None:
    """Nothing reads lengths, indices or lists on the host."""
    total, longest, lengths = 100, 90, ((60, 3, 37), (90, 0, 10), (0, 0, 0), (33, 33, 34))
    tensors = [torch.randn(total, heads, 20, device="cuda") for heads in (4, 2, 2)]
    starts = torch.zeros(4, dtype=torch.int64, device="cuda")
    blocks = torch.zeros(2, total, 5, dtype=torch.int64, device="cuda")

    def renew(counts: tuple[int, ...]) -> None:
        starts.copy_(torch.tensor([0, *itertools.accumulate(counts)]))
        rows = [torch.randint(-1, -(-count // 16), (2, count, 5)) for count in counts]
        rows.append(torch.full((2, total - sum(counts), 5), -1))
        blocks.copy_(torch.cat(rows, 1))

    def step() -> list[Tensor]:
        points = [tensor.detach().requires_grad_() for tensor in tensors]
        out = varlen_attention(
            *points, starts, starts, longest, longest, block_indices=blocks, block_size=16, is_causal=True,
            enable_gqa=True,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, points, torch.ones_like(out))]

    renew(lengths[0])
    graph, found = gpu.captured(step)
    for counts in lengths:
        renew(counts)
        graph.replay()
        assert_same(found, step())


#: Starts that lead outside of the tensors, that decrease, and that make sequences overlap.
WILD = ([-5, 2**40, 3, -(2**62)], [0, 60, 120, 180], [2**62] * 4, [70, 0, 70, 0], [0, 70, 0, 70])


def test_wild_starts_lead_nowhere() -> None:
    """A graph cannot check them; kernels stay inside of the tensors, and of the inverse lists."""
    tensors = [torch.randn(70, heads, 16, device="cuda") for heads in (4, 2, 2)]
    starts = torch.tensor([0, 20, 20, 70], device="cuda")
    indices = torch.arange(70, device="cuda")[:, None] % torch.tensor([20, 7, 3], device="cuda")

    def step() -> list[Tensor]:
        points = [tensor.detach().requires_grad_() for tensor in tensors]
        given: dict[str, Any] = {"indices": indices, "is_causal": True, "enable_gqa": True}
        out = varlen_attention(*points, starts, starts, 70, 70, **given)
        return [out.detach(), *torch.autograd.grad(out, points, torch.ones_like(out))]

    graph, found = gpu.captured(step)
    graph.replay()
    expected = [one.clone() for one in found]
    for numbers in WILD:
        starts.copy_(torch.tensor(numbers))
        graph.replay()
    starts.copy_(torch.tensor([0, 20, 20, 70]))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, expected)


def test_a_graph_of_decoding_steps() -> None:
    """The blocks that a step selects and the lengths change from step to step."""
    key, value = torch.randn(2, 3, 2, 64, 20, device="cuda").unbind()
    query, new = torch.randn(3, 4, 1, 20, device="cuda"), torch.randn(3, 2, 1, 20, device="cuda")
    caches, lengths = (key.clone(), value.clone()), torch.tensor([0, 15, 50], device="cuda")
    begin = lengths.clone()
    blocks = torch.zeros(3, 2, 1, 2, dtype=torch.int64, device="cuda")

    def step(caches: tuple[Tensor, Tensor], lengths: Tensor) -> Tensor:
        given: dict[str, Any] = {"cache_seqlens": lengths, "block_indices": blocks, "block_size": 16}
        out: Tensor = attention_with_kvcache(query, *caches, new, new, **given, is_causal=True)
        lengths.add_(1)
        return out

    with torch.no_grad():
        graph, found = gpu.captured(lambda: step(caches, lengths))
        lengths.copy_(begin)
        again = begin.clone()
        for _ in range(3):
            blocks[..., 1] = (lengths // 16)[:, None, None]
            graph.replay()
            assert_same(found, step((key, value), again))


def test_refusals() -> None:
    query = torch.randn(7, 2, 16, device="cuda")
    starts = torch.tensor([0, 2, 7], device="cuda")
    chosen = torch.full((7, 1), 2, device="cuda")
    with pytest.raises(ValueError, match=r"indices must lie between 0 and 1, the last of the keys, .* is 2"):
        varlen_attention(query, query, query, starts, starts, 5, 5, indices=chosen)
    caches = torch.randn(2, 2, 2, 40, 16, device="cuda").unbind()
    with pytest.raises(
        ValueError, match="block_indices must lie between 0 and 0, the last of the blocks of 16"
    ):
        attention_with_kvcache(
            query[:2, :, None],
            *caches,
            cache_seqlens=torch.tensor([40, 16], device="cuda"),
            block_indices=torch.ones(2, 1, 1, 1, dtype=torch.int64, device="cuda"),
            block_size=16,
        )
