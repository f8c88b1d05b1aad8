"""KVCache under random steps: each sequence gets the bits of one dense call over its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, drawn
from torch import Tensor

from selfattn_ext import KVCache, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, STEPS = 2, 25
SEEDS = range(40)


@dataclass
class Model:
    """The expected content of a cache: each sequence's keys and values (layers, Hk, tokens, width), and
    whether it is in use.
    """

    cache: KVCache
    chance: random.Random
    generator: torch.Generator
    heads: int
    keys: list[Tensor]
    values: list[Tensor]
    used: list[bool]

    @classmethod
    def of(cls, seed: int) -> Model:
        chance = random.Random(seed)
        sequences, capacity = chance.choice([1, 2, 4]), chance.choice([5, 17, 40])
        page_size = chance.choice([None, 1, 3, 4, 16])
        heads, kv_heads = chance.choice([(4, 2), (3, 1), (2, 2)])
        widths = chance.choice([(8, 8), (16, 5), (3, 16)])
        half = None if page_size is None else sequences * -(-capacity // page_size) // 2 + 1
        cache = KVCache(
            LAYERS,
            sequences,
            kv_heads,
            widths[0],
            capacity,
            value_dim=widths[1],
            page_size=page_size,
            pages=chance.choice([None, half]),
            layout=chance.choice(["bhld", "blhd"]),
            dtype=chance.choice(DTYPES),
            device=gpu.DEVICE,
        )
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)
        keys, values = (
            [torch.empty(LAYERS, kv_heads, 0, width, dtype=cache.dtype, device=gpu.DEVICE)] * sequences
            for width in widths
        )
        generator = torch.Generator().manual_seed(seed)
        return cls(cache, chance, generator, heads, keys, values, [False] * sequences)

    def tokens(self, heads: int, counts: list[int], width: int) -> list[Tensor]:
        return [
            drawn((heads, count, width), self.generator).to(gpu.DEVICE, self.cache.dtype) for count in counts
        ]

    def chosen(self, least: int = 0) -> list[int] | None:
        """Returns some sequences in any order, or None for all."""
        count = len(self.used)
        if self.chance.random() < 0.5:
            return None
        return self.chance.sample(range(count), self.chance.randint(least, count))

    def shorten(self, sequence: int, length: int) -> None:
        self.keys[sequence] = self.keys[sequence][:, :, :length]
        self.values[sequence] = self.values[sequence][:, :, :length]

    def book(self) -> None:
        """Does an operation that moves no tokens."""
        kind = self.chance.choice(["free", "allocate", "truncate", "reset"])
        if kind == "free":
            sequence = self.chance.randrange(len(self.used))
            self.cache.free(sequence)
            self.shorten(sequence, 0)
            self.used[sequence] = False
        elif kind == "allocate":
            if all(self.used):
                with pytest.raises(ValueError, match="in use"):
                    self.cache.allocate()
            else:
                sequence = self.cache.allocate()
                assert not self.used[sequence]
                self.used[sequence] = True
        elif kind == "truncate":
            length, chosen = self.chance.randint(0, self.cache.capacity), self.chosen()
            self.cache.truncate(length, chosen)
            for sequence in range(len(self.used)) if chosen is None else chosen:
                self.shorten(sequence, length)
        elif self.chance.random() < 0.3:
            self.cache.reset()
            for sequence in range(len(self.used)):
                self.shorten(sequence, 0)
            self.used = [False] * len(self.used)

    def step(self) -> None:
        """Adds equal or different numbers of tokens; each layer attends with them or only appends them."""
        chosen, chance = self.chosen(1), self.chance
        sequences = list(range(len(self.used))) if chosen is None else chosen
        counts = [chance.choice([0, 1, 1, 2, 5])] * len(sequences)
        if chance.random() < 0.5:
            counts = [chance.choice([0, 1, 3, 7]) for _ in sequences]
        before, free = self.cache.lengths, self.cache.free_pages
        try:
            self.cache.extend(counts, chosen)
        except ValueError:
            assert (self.cache.lengths, self.cache.free_pages) == (before, free)
            assert self.is_too_much(sequences, counts)
            return
        assert not self.is_too_much(sequences, counts, free)
        for sequence, count in zip(sequences, counts, strict=True):
            self.used[sequence] = True
            self.keys[sequence] = torch.nn.functional.pad(self.keys[sequence], (0, 0, 0, count))
            self.values[sequence] = torch.nn.functional.pad(self.values[sequence], (0, 0, 0, count))
        places = [list(range(before[s], before[s] + n)) for s, n in zip(sequences, counts, strict=True)]
        assert self.cache.packed_positions.tolist() == [place for several in places for place in several]
        packed = len(set(counts)) > 1 or chance.random() < 0.5
        if not packed:
            assert self.cache.positions.tolist() == places
        options = {
            "window_size": chance.choice([(-1, -1), (0, -1), (7, 0)]),
            "softcap": chance.choice([0.0, 2.0]),
            "is_causal": chance.random() < 0.7,
            "alibi_slopes": chance.choice([None, torch.rand(self.heads)]),
            "sinks": chance.choice([None, torch.rand(self.heads)]),
        }
        for layer in range(LAYERS):
            self.layer(layer, sequences, counts, packed, options)

    def is_too_much(self, sequences: list[int], counts: list[int], free: int | None = None) -> bool:
        """Says whether a step, not begun or just begun, is more than sequences or the pool can take."""
        lengths = [self.keys[s].shape[2] for s in sequences]
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        missing = sum(self.pages(length) for length in after) - sum(self.pages(length) for length in lengths)
        return max(after) > self.cache.capacity or missing > (self.cache.free_pages if free is None else free)

    def pages(self, length: int) -> int:
        """Returns the pages that a sequence takes from the pool; in slots it takes none."""
        return -(-length // self.cache.page_size) if self.is_paged() else 0

    def is_paged(self) -> bool:
        return self.cache.page_size != self.cache.capacity

    def layer(
        self, layer: int, sequences: list[int], counts: list[int], packed: bool, options: dict[str, Any]
    ) -> None:
        """Compares one layer of a step with dense calls."""
        kv_heads, width, value_width = *self.keys[0].shape[1::2], self.values[0].shape[3]
        query = self.tokens(self.heads, counts, width)
        key, value = self.tokens(kv_heads, counts, width), self.tokens(kv_heads, counts, value_width)
        for s, new_key, new_value, count in zip(sequences, key, value, counts, strict=True):
            first = self.keys[s].shape[2] - count
            self.keys[s][layer, :, first:], self.values[s][layer, :, first:] = new_key, new_value

        def given(parts: list[Tensor]) -> Tensor:
            if packed:
                return torch.cat(parts, 1).transpose(0, 1)
            return torch.stack(parts) if self.cache.layout == "bhld" else torch.stack(parts).transpose(1, 2)

        if self.chance.random() < 0.15:
            self.cache.append(layer, given(key), given(value))
            return
        out, lse = self.cache.attend(
            layer, given(query), given(key), given(value), return_lse=True, **options
        )
        if packed:
            outs, lses = out.transpose(0, 1).split(counts, 1), lse.split(counts, 1)
        else:
            outs, lses = out if self.cache.layout == "bhld" else out.transpose(1, 2), lse
        for s, q, found, found_lse in zip(sequences, query, outs, lses, strict=True):
            k, v = self.keys[s][layer], self.values[s][layer]
            offset = k.shape[1] - q.shape[1]
            expected, expected_lse = scaled_dot_product_attention(
                q, k, v, enable_gqa=True, query_offset=offset, return_lse=True, **options
            )
            assert torch.equal(found, expected), f"sequence {s} of layer {layer}"
            assert torch.equal(found_lse, expected_lse), f"sequence {s} of layer {layer}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps(seed: int) -> None:
    model = Model.of(seed)
    pool = model.cache.free_pages
    for _ in range(STEPS):
        if model.chance.random() < 0.3:
            model.book()
        else:
            model.step()
        lengths = [keys.shape[2] for keys in model.keys]
        assert model.cache.lengths == lengths
        if model.is_paged():
            assert model.cache.free_pages == pool - sum(model.pages(length) for length in lengths)
