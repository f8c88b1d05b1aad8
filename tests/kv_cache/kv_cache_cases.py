"""A decoder's steps on caches of every form, and their judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpu
import torch
from cases import STATISTICS, drawn, statistics_of
from comparisons import exact_and_peer
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import attention_with_kvcache, reference
from selfattn_ext.formula_steps import mask_of_sequence

#: Options that statistics do not depend on, or that the formula need not be told.
_NOT_OF_STATISTICS = ("dropout_p", "dropout_seed", "enable_gqa")

TENSORS = ("query", "key_cache", "value_cache", "key", "value")


@dataclass(frozen=True)
class Step:
    lengths: tuple[int, ...] = (3, 0, 11)  # before the step
    queries: int = 1
    new: int = 1  # new keys; 0 is a call without key and value
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 5
    capacity: int = 20
    page_size: int = 0  # 0 means slots
    layout: str = "bhld"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = gpu.DEVICE

    def __str__(self) -> str:
        fields = Step.__dataclass_fields__.items()
        differs = [
            f"{name}={getattr(self, name)}" for name, field in fields if getattr(self, name) != field.default
        ]
        return "-".join(differs).replace(" ", "").replace("torch.", "") or "default"

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Brings a tensor (B, H, L, E) into the layout of the step."""
        return tensor.transpose(1, 2).contiguous() if self.layout == "blhd" else tensor

    def plain(self, tensor: Tensor) -> Tensor:
        """Brings a tensor in the layout of the step back to (B, H, L, E)."""
        return tensor.transpose(1, 2) if self.layout == "blhd" else tensor

    def inputs(self) -> dict[str, Any]:
        """Returns the arguments that are always given. Rows of the cache without a key hold NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = len(self.lengths)

        def normal(heads: int, rows: int, width: int) -> Tensor:
            return drawn((batch, heads, rows, width), generator).to(self.device, self.dtype)

        query = normal(self.heads, self.queries, self.head_dim)
        caches = [normal(self.kv_heads, self.capacity, width) for width in (self.head_dim, self.value_dim)]
        for cache in caches:
            for b, length in enumerate(self.lengths):
                cache[b, :, length:] = torch.nan
        arguments: dict[str, Any] = {
            "query": self.laid_out(query),
            "cache_seqlens": torch.tensor(self.lengths, device=self.device),
        }
        if self.page_size:
            caches, arguments["block_table"] = in_pages(caches, self.page_size, generator)
        arguments["key_cache"], arguments["value_cache"] = (self.laid_out(cache) for cache in caches)
        if self.new:
            arguments["key"] = self.laid_out(normal(self.kv_heads, self.new, self.head_dim))
            arguments["value"] = self.laid_out(normal(self.kv_heads, self.new, self.value_dim))
        return arguments

    def sequence(self, arguments: dict[str, Any], b: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values (Hk, length, E) that a sequence has after the step, given the arguments
        before it.
        """
        both = []
        for name in ("key", "value"):
            cache = self.plain(arguments[f"{name}_cache"])
            if "block_table" in arguments:
                pages = arguments["block_table"][b].clamp(0, cache.shape[0] - 1).long()
                rows = cache[pages].transpose(0, 1).flatten(1, 2)
            else:
                rows = cache[b]
            rows = rows[:, : self.lengths[b]]
            both.append(torch.cat([rows, self.plain(arguments[name])[b]], 1) if self.new else rows)
        return both[0], both[1]


def in_pages(
    caches: Sequence[Tensor], page_size: int, generator: torch.Generator
) -> tuple[list[Tensor], Tensor]:
    """Returns caches (B, Hk, S, E) as pages in random order, some of them unused, and their block table."""
    batch, heads, capacity, _ = caches[0].shape
    columns = -(-capacity // page_size)
    count = batch * columns + 3
    order = torch.randperm(count, generator=generator, device="cpu")[: batch * columns].to(caches[0].device)
    results = []
    for cache in caches:
        padded = torch.nn.functional.pad(cache, (0, 0, 0, columns * page_size - capacity), value=torch.nan)
        pages = cache.new_full((count, heads, page_size, cache.shape[3]), torch.nan)
        pages[order] = padded.unflatten(2, (columns, page_size)).transpose(1, 2).flatten(0, 1)
        results.append(pages)
    return results, order.view(batch, columns).int()


def check(step: Step, arguments: dict[str, Any] | None = None, **options: Any) -> Tensor:
    """Asserts that out, weights, lse and the cache after the step are right; returns out.

    Options are keywords of attention_with_kvcache; a mask is (B, H, L, capacity).
    """
    given = step.inputs() if arguments is None else arguments
    sequences = [step.sequence(given, b) for b in range(len(step.lengths))]
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    out, weights, lse, aux = attention_with_kvcache(
        **given, **options, layout=step.layout, return_weights=True, return_lse=True, return_aux=STATISTICS
    )
    out, found = step.plain(out), statistics_of(aux)
    table = given.get("block_table")
    capacity = step.capacity if table is None else table.shape[1] * step.page_size
    assert weights.shape == (len(step.lengths), step.heads, step.queries, capacity)
    offsets = options.get("query_offset")
    for b, (keys, values) in enumerate(sequences):
        count = keys.shape[1]
        keywords = {
            name: value[b] if isinstance(value, Tensor) and value.dim() == 2 else value
            for name, value in options.items()
        }
        mask = options.get("attn_mask")
        keywords["attn_mask"] = mask_of_sequence(mask, b, step.queries, count)
        keywords["query_offset"] = (
            count - step.queries
            if offsets is None
            else int(torch.as_tensor(offsets).expand(len(sequences))[b])
        )
        exact, peer = exact_and_peer([step.plain(given["query"])[b], keys, values], keywords)
        rows = step.plain(given["query"])[b], keys
        without = {name: value for name, value in keywords.items() if name not in _NOT_OF_STATISTICS}
        statistics = [
            reference.score_statistics(*(each.to(dtype) for each in rows), **without)
            for dtype in (torch.float64, step.dtype)
        ]
        for name, result in (("out", out), ("weights", weights[..., :count]), ("lse", lse)):
            judges = (exact[name], peer[name])
            assert_accurate(f"{name} of sequence {b}", result[b], *judges, dtype=step.dtype)
        assert not weights[b, :, :, count:].any(), b
        assert not found["key_weights"][b, :, count:].any(), b
        for name, result in found.items():
            own = result[b, :, :count] if name == "key_weights" else result[b]
            judges = (getattr(of_rows, name) for of_rows in statistics)
            assert_accurate(f"{name} of sequence {b}", own, *judges, dtype=step.dtype)
        after = Step.sequence(_without_new(step, count), given, b)
        assert all(torch.equal(*pair) for pair in zip(after, (keys, values), strict=True)), b
    for name, tensor in before.items():
        if not name.endswith("cache"):
            assert torch.equal(given[name], tensor), name
    # Only the rows of the new keys have changed.
    for name in ("key", "value"):
        changed = step.plain(before[f"{name}_cache"] != given[f"{name}_cache"]) & ~step.plain(
            before[f"{name}_cache"].isnan() & given[f"{name}_cache"].isnan()
        )
        rows = changed.any(-1)
        assert int(rows.sum()) <= len(step.lengths) * step.kv_heads * step.new, name
    return out


def _without_new(step: Step, count: int) -> Step:
    """Returns a step without new keys, whose sequences all have ``count`` keys."""
    return Step(lengths=(count,) * len(step.lengths), new=0, layout=step.layout, page_size=step.page_size)
