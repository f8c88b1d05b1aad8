"""A small decoder generates text for prompts of different lengths, with a cache of keys and values.

    python examples/generate.py
    python examples/generate.py --page-size 16 --pages 24 "Once upon a time" "The"
    python examples/generate.py --compare

It shows what a decoder needs besides attention: rotary positions, grouped heads, and a KVCache. The prompts
are packed, without padding between them. Then each step computes one token of every sequence. When a sequence
ends, its place in the cache and its pages are given to the next prompt. The weights are random, so this needs
no network, and its text has no meaning. A token is a byte; only printable ones are generated.
--compare generates once more without a cache, each prompt alone, with everything computed again for each
token, and prints whether the tokens are the same. In 16 bits they may differ: a step of one token rounds
differently from a pass over all of them, and random weights make many tokens nearly as likely as the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfattn_ext import KVCache, apply_rotary, rotary_factors, varlen_attention
from selfattn_ext.nn.rotary import RotaryFactors

FIRST, PRINTABLE = ord(" "), 95  # the printable characters of ASCII
PROMPTS = ("Attention is", "The quick brown fox jumps over", "A", "Sequences come and go", "One more")


@dataclass(frozen=True)
class Size:
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Step:
    """The packed tokens of a step, as all layers see them: their positions, offsets and cache."""

    def __init__(self, size: Size, positions: Tensor, cu_seqlens: Tensor, cache: KVCache | None) -> None:
        self.rotary: RotaryFactors = rotary_factors(positions, size.head_dim)
        self.cu_seqlens = cu_seqlens
        self.cache = cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rotates packed queries and keys (total, heads, head_dim) and attends."""
        query, key = (apply_rotary(tensor, self.rotary) for tensor in (query, key))
        if self.cache is not None:
            return self.cache.attend(layer, query, key, value)
        starts, longest = self.cu_seqlens, len(query)
        return varlen_attention(
            query, key, value, starts, starts, longest, longest, is_causal=True, enable_gqa=True
        )


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, (size.heads + 2 * size.kv_heads) * size.head_dim, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.up = nn.Linear(size.width, 3 * size.width, bias=False)
        self.down = nn.Linear(3 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, layer: int, step: Step) -> Tensor:
        size = self.size
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, size.head_dim))
        query, key, value = heads.split((size.heads, size.kv_heads, size.kv_heads), dim=1)
        x = x + self.out(step.attend(layer, query, key, value).flatten(1))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Computes logits (total, PRINTABLE) of packed tokens (total,)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, PRINTABLE, bias=False)

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, step)
        return self.head(self.norm(x))


def generate(model: Decoder, prompts: Sequence[Tensor], count: int, cache: KVCache) -> list[Tensor]:
    """Generates ``count`` tokens for each prompt, greedily, as many prompts at a time as the cache holds."""
    device = cache.device
    waiting = list(range(len(prompts)))
    results: list[list[Tensor]] = [[] for _ in prompts]
    at: dict[int, int] = {}  # sequence of the cache → number of its prompt
    while waiting or at:
        arrived = []
        while waiting and len(at) < len(cache.lengths):
            sequence = cache.allocate()
            at[sequence] = waiting.pop(0)
            arrived.append(sequence)
        # One packed step takes the last token of old sequences and the whole prompt of new ones.
        given = {
            sequence: prompts[prompt] if sequence in arrived else results[prompt][-1]
            for sequence, prompt in at.items()
        }
        cache.extend([len(tokens) for tokens in given.values()], given)
        step = Step(model.size, cache.packed_positions, cache.cu_seqlens, cache)
        logits = model(torch.cat(list(given.values())).to(device), step)
        drawn = FIRST + logits[cache.cu_seqlens[1:] - 1].argmax(-1)
        for sequence, token in zip(given, drawn.split(1), strict=True):
            results[at[sequence]].append(token)
            if len(results[at[sequence]]) == count:
                del at[sequence]
                cache.free(sequence)
    return [torch.cat(tokens) for tokens in results]


def generate_anew(model: Decoder, prompt: Tensor, count: int, device: str) -> Tensor:
    """Generates for one prompt without a cache."""
    tokens = prompt.to(device)
    for _ in range(count):
        positions = torch.arange(len(tokens), device=device)
        starts = torch.tensor([0, len(tokens)], device=device)
        logits = model(tokens, Step(model.size, positions, starts, None))
        tokens = torch.cat([tokens, FIRST + logits[-1:].argmax(-1)])
    return tokens[len(prompt) :]


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description="Generate from a batch of prompts with a KVCache.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="the texts to continue")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate for each (%(default)s)")
    parser.add_argument("--at-a-time", type=int, default=3, help="sequences in the cache (%(default)s)")
    parser.add_argument("--page-size", type=int, help="keep the cache in pages of this many tokens")
    parser.add_argument("--pages", type=int, help="pages of the pool; by default enough for all sequences")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (%(default)s)")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="dtype of weights and cache")
    parser.add_argument("--device", default="cpu", help="where it runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="generate without a cache, too")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or not all(options.prompts):
        parser.error("no prompt may be empty, and --tokens must be at least 1")

    torch.manual_seed(options.seed)
    size, dtype = Size(layers=options.layers), getattr(torch, options.dtype)
    model = Decoder(size).to(options.device, dtype)
    prompts = [torch.tensor(list(prompt.encode())) for prompt in options.prompts]
    capacity = max(map(len, prompts)) + options.tokens
    cache = KVCache(
        size.layers, options.at_a_time, size.kv_heads, size.head_dim, capacity,
        page_size=options.page_size, pages=options.pages, dtype=dtype, device=options.device,
    )  # fmt: skip

    start = time.perf_counter()
    new = generate(model, prompts, options.tokens, cache)
    milliseconds = 1000 * (time.perf_counter() - start)
    print(f"with a cache: {milliseconds / options.tokens / len(prompts):.2f} ms per token")
    texts = [bytes(tokens.tolist()).decode() for tokens in new]
    for prompt, text in zip(options.prompts, texts, strict=True):
        print(f"  {prompt!r} -> {text!r}")
    if options.compare:
        start = time.perf_counter()
        anew = [generate_anew(model, prompt, options.tokens, options.device) for prompt in prompts]
        milliseconds = 1000 * (time.perf_counter() - start)
        print(f"without: {milliseconds / options.tokens / len(prompts):.2f} ms per token")
        same = all(torch.equal(*pair) for pair in zip(new, anew, strict=True))
        print("the tokens are the same" if same else "the tokens are not the same")
    return texts


if __name__ == "__main__":
    main()
