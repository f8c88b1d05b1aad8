"""A small character-level GPT that takes its attention function as an argument.

It is a pre-norm decoder whose initialisation suits a run of seconds: residual branches begin at zero and
positions enter by rotation (Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864). In 400 steps this
reaches a loss for which the usual initialisation with learned positions needs over a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfattn_ext.functional import scaled_dot_product_attention
from selfattn_ext.kv_cache import KVCache

CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def extension_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes causal attention by this package; all tensors are (batch, heads, length, head_dim)."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes the same by torch.nn.functional.scaled_dot_product_attention."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def formula_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes the same as textbooks write it, softmax(Q K^T / sqrt(d) + mask) V, operation by operation."""
    length = query.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ value


@dataclass(frozen=True)
class ModelSize:
    layers: int = 2
    heads: int = 2
    width: int = 128
    context: int = 128

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rotary_angles(size: ModelSize) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (context, head_dim / 2) of the angles that rotate pairs of features."""
    pairs = size.head_dim // 2
    frequency = 1000.0 ** (-torch.arange(pairs) / pairs)
    angle = torch.arange(size.context)[:, None] * frequency
    return angle.cos(), angle.sin()


class SelfAttention(nn.Module):
    cosine: Tensor
    sine: Tensor

    def __init__(self, size: ModelSize, attention: CausalAttention) -> None:
        super().__init__()
        self._heads = size.heads
        self._attention = attention
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        nn.init.zeros_(self.out.weight)
        cosine, sine = rotary_angles(size)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        if cache is None:
            result = self._attention(*self._project(x))
        else:
            result = cache.attend(layer, *self._project(x, cache.positions[0]))
        return self.out(result.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor) -> Tensor:
        """Returns the attention weights that forward() applies, (batch, heads, length, length)."""
        _, weights = scaled_dot_product_attention(*self._project(x), is_causal=True, return_weights=True)
        return weights

    def _project(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query and key, rotated by position, and value, (batch, heads, length, head_dim) each."""
        projected = self.qkv(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        places = slice(x.shape[1]) if positions is None else positions
        cosine, sine = self.cosine[places], self.sine[places]
        first, second = projected[:2].chunk(2, dim=-1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned[0], turned[1], projected[2]


class Block(nn.Module):
    def __init__(self, size: ModelSize, attention: CausalAttention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = SelfAttention(size, attention)
        self.mlp_norm = nn.LayerNorm(size.width)
        last = nn.Linear(4 * size.width, size.width, bias=False)
        nn.init.zeros_(last.weight)
        self.mlp = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(), last)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, layer)
        return x + self.mlp(self.mlp_norm(x))


class CharTransformer(nn.Module):
    """Predicts the next symbol.

    Args:
        symbols: size of the vocabulary.
        size: layers, heads, width, context.
        attention: causal attention on (batch, heads, length, head_dim); see the functions above.
    """

    def __init__(self, symbols: int, size: ModelSize, attention: CausalAttention) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(symbols, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, symbols, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns logits (batch, length, symbols) for int64 tokens (batch, length <= context).

        With a cache, the tokens continue its sequence.
        """
        x = self.embedding(tokens)
        if cache is not None:
            cache.extend(tokens.shape[1])
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats per symbol, a scalar."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Returns attention weights (layers, heads, length, length) for one sequence of tokens (length,)."""
        x = self.embedding(tokens[None])
        maps = []
        for block in self.blocks:
            assert isinstance(block, Block)
            maps.append(block.attention.weights(block.attention_norm(x))[0])
            x = block(x)
        return torch.stack(maps)

    @torch.no_grad()
    def sample(
        self,
        prompt: Tensor,
        count: int,
        generator: torch.Generator,
        temperature: float = 0.8,
        cached: bool = True,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Tensor:
        """Draws ``count`` symbols one by one; returns the prompt (length,) with them, (length + count,).

        ``may_go_on`` is called before each symbol, and sampling stops if it returns False. Each symbol is
        drawn given a window of those before it. If the window would be longer than the context, its later
        half becomes the new window. With ``cached`` the keys and values of a window are kept, so that each
        new symbol is computed alone; without, the whole window is computed again, with the same text.
        """
        size, weight = self.size, self.head.weight
        cache = None
        if cached:
            cache = KVCache(
                size.layers,
                1,
                size.heads,
                size.head_dim,
                size.context,
                dtype=weight.dtype,
                device=weight.device,
            )
        tokens = prompt
        window = new = prompt[-size.context :]
        for _ in range(count):
            if not may_go_on():
                break
            if len(window) > size.context:
                window = new = window[-max(1, size.context // 2) :]
                if cache is not None:
                    cache.reset()
            seen = window if cache is None else new
            logits = self(seen[None], cache)[0, -1] / temperature
            # Symbols are drawn on the CPU for every device of the model, so that one seed gives one text.
            drawn = torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)
            new = drawn.to(tokens.device)
            tokens, window = torch.cat([tokens, new]), torch.cat([window, new])
        return tokens
