"""Generation with half of the cache: keys that received little attention make room for new ones.

    python examples/evict_cache.py
    python examples/evict_cache.py --text book.txt --keep 0.25

It trains a small model for some seconds, and then reads held-out text token by token, as generation does,
with a cache that has room for a part of the context alone (--keep, half by default). When the cache of a head
is full, one of its keys is given up for the new one. Which one differs: the one that has received the least
weight so far (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"), the oldest one, or one by chance. The weight
that each key receives is a statistic that attention returns beside its output (key_weights): no matrix of
weights is made, and the kernels read the cache as in any other step.

What is printed is the perplexity of each way: the exponential of the mean cross entropy per symbol. The next
letter of a text hardly depends on what is further away than half of this context, so that giving up the
oldest key costs no more here; giving up keys by chance does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext import AuxRequest, attention_with_kvcache
from selfattn_ext.demo import text
from selfattn_ext.demo.model import CharTransformer, ModelSize, extension_attention
from selfattn_ext.terminal import CommandError

WEIGHTS = AuxRequest(key_weights="kv_heads")

#: Returns the place (B, H) of the key to give up, from the weight (B, H, capacity) that each key has received
#: and from the number of the token that it is of.
Choice = Callable[[Tensor, Tensor], Tensor]


def least_weight(weights: Tensor, tokens: Tensor) -> Tensor:
    """Chooses the key with the least weight, but none of the latest tokens, which keep half of the cache: a
    key has to be there for a while before its weight says anything.
    """
    recent = tokens > tokens.amax(-1, keepdim=True) - tokens.size(-1) // 2
    return weights.masked_fill(recent, math.inf).argmin(-1)


def oldest(weights: Tensor, tokens: Tensor) -> Tensor:
    """Chooses the oldest key, which leaves a sliding window."""
    return tokens.argmin(-1)


def by_chance(weights: Tensor, tokens: Tensor) -> Tensor:
    """Chooses any key."""
    return torch.randint(weights.size(-1), weights.shape[:-1], device=weights.device)


class EvictingCache:
    """Keys and values of the layers of a model, for steps of one token, with room for ``capacity`` keys of
    each head. It takes the place of a :class:`selfattn_ext.KVCache`.
    """

    def __init__(self, size: ModelSize, batch: int, capacity: int, choose: Choice) -> None:
        shape = (size.layers, batch, size.heads, capacity)
        self._keys, self._values = torch.zeros(2, *shape, size.head_dim).unbind()
        self._weights = torch.zeros(shape)
        self._tokens = torch.zeros(shape, dtype=torch.int64)
        self._choose = choose
        self._read = 0  # tokens before this step

    @property
    def positions(self) -> Tensor:
        """The positions of the step's tokens (1, 1). Keys are rotated before they are kept, so that the place
        of a key in the cache means nothing.
        """
        return torch.tensor([[self._read - 1]])

    def extend(self, tokens: int) -> None:
        """Begins a step."""
        assert tokens == 1, "one token at a time"
        self._read += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keeps the token's key and value (B, H, 1, head_dim), and attends to all that are kept."""
        keys, values, weights = self._keys[layer], self._values[layer], self._weights[layer]
        kept = min(self._read, keys.size(2))
        if self._read <= keys.size(2):
            place = torch.full(weights.shape[:2], self._read - 1)
        else:
            place = self._choose(weights, self._tokens[layer])
        at = place[..., None, None].expand(-1, -1, 1, keys.size(3))
        keys.scatter_(2, at, key)
        values.scatter_(2, at, value)
        weights.scatter_(2, place[..., None], 0.0)
        self._tokens[layer].scatter_(2, place[..., None], self._read)
        lengths = torch.full((len(query),), kept)
        out, aux = attention_with_kvcache(query, keys, values, cache_seqlens=lengths, return_aux=WEIGHTS)
        weights += aux.key_weights
        return out


@torch.inference_mode()
def perplexity(
    model: CharTransformer, tokens: Tensor, targets: Tensor, capacity: int, choose: Choice
) -> float:
    """Reads sequences (B, context) token by token with caches of so many keys."""
    cache = EvictingCache(model.size, len(tokens), capacity, choose)
    losses = [
        F.cross_entropy(model(tokens[:, at : at + 1], cache)[:, 0], targets[:, at])
        for at in range(tokens.size(1))
    ]
    return float(torch.stack(losses).mean().exp())


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints the perplexities, and returns them by the names of what chooses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default the texts of Python's help()")
    sizes = {"layers": 2, "heads": 4, "width": 128, "context": 128, "batch": 8, "steps": 300, "sequences": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate")
    parser.add_argument("--keep", type=float, default=0.5, help="the part of the context that fits the cache")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.manual_seed(given.seed)
    source = text.from_file(given.text) if given.text else text.from_python()
    corpus = text.Corpus(source, given.context)
    size = ModelSize(given.layers, given.heads, given.width, given.context)
    model = CharTransformer(len(corpus.symbols), size, extension_attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    drawn = torch.Generator().manual_seed(given.seed)
    for step in range(1, given.steps + 1):
        loss = model.loss(*corpus.batch(given.batch, drawn))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % max(1, given.steps // 5) == 0:
            print(f"step {step:5d}   loss {loss.item():.3f}", flush=True)

    tokens, targets = corpus.held_out_batch(given.sequences)
    capacity = max(1, int(given.keep * given.context))
    found = {"all keys": perplexity(model, tokens, targets, given.context, oldest)}
    ways = {"least weight": least_weight, "oldest": oldest, "by chance": by_chance}
    found |= {name: perplexity(model, tokens, targets, capacity, choose) for name, choose in ways.items()}
    print(f"\n{'given up':<14} keys   perplexity")
    for name, value in found.items():
        keys = given.context if name == "all keys" else capacity
        label = "none" if name == "all keys" else name
        print(f"{label:<14} {keys:4d}   {value:10.3f}   {100 * (value / found['all keys'] - 1):+.1f} %")
    return found


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
