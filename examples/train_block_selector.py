"""A small transformer whose queries see a few blocks of keys, chosen by a selector that is trained beside it.

    python examples/train_block_selector.py
    python examples/train_block_selector.py --selected 2 --warm-up 400

The text has to be looked up: it is made of pairs of a letter and a digit, such as q3f8z0q3, and in each text
a letter always has the same digit. If a letter comes again, its digit stands anywhere before. In a warm-up
every query sees all keys. Then copies of the model are trained further in four ways, on the same texts: each
query sees all keys as before, or the blocks that the selector chooses, or the most recent blocks, or blocks
by chance. A query's own block is always among them.

The selector multiplies a projection of each query with the sum of the projected keys of each block. As no
gradient flows through a choice, it has a loss of its own: how far its softmax over blocks is from the
attention weight that each block received. In the warm-up it learns from all blocks, and then from those that
it has chosen. docs/sparse.md explains the parts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfattn_ext import sparse_attention

LETTERS = torch.arange(ord("a"), ord("z") + 1)

#: A function (the selector's products (B, Hk, L, blocks), blocks per query) -> block_indices (B, Hk, L, K).
Choice = Callable[[Tensor, int], Tensor]


def texts(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws texts (count, length) as bytes, and where the next byte is the digit of an earlier letter."""
    letters = torch.randint(26, (count, length // 2), generator=generator)
    digits = torch.randint(10, (count, 26), generator=generator).gather(1, letters)
    tokens = torch.stack([LETTERS[letters], ord("0") + digits], -1).flatten(1)
    known = (letters[:, :, None] == letters[:, None]).tril(-1).any(-1)
    return tokens, torch.stack([known, torch.zeros_like(known)], -1).flatten(1)


def own_block(products: Tensor, size: int) -> Tensor:
    """Returns the number of each query's block (L, 1)."""
    return torch.arange(products.size(2))[:, None] // size


def chosen(values: Tensor, count: int, size: int) -> Tensor:
    """Returns the blocks with the largest values (B, Hk, L, blocks): the query's own, and others before it;
    -1 where there are fewer.
    """
    own, block = own_block(values, size), torch.arange(values.size(-1))
    values = values.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    best = values.topk(min(count, values.size(-1)), -1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def everything(products: Tensor, count: int) -> Tensor:
    """Chooses all blocks; the causal rule hides the later ones."""
    return torch.arange(products.size(-1)).expand_as(products)


@torch.no_grad()
def weights_of_blocks(query: Tensor, key: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Returns the attention weight of each listed block (B, H, L, K): the softmax of their lse."""
    lses = []
    for n in range(blocks.size(-1)):
        one = sparse_attention(
            query,
            key,
            key[..., :1],  # the lse does not depend on the value
            block_indices=blocks[..., n : n + 1],
            block_size=size,
            is_causal=True,
            enable_gqa=True,
            return_lse=True,
        )
        lses.append(one[1])
    return torch.stack(lses, -1).softmax(-1)


def selector_loss(weights: Tensor, products: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Returns how far the softmax of the selector's products is from the weights of the listed blocks: the
    Kullback-Leibler divergence, in nats.
    """
    hidden = (blocks < 0) | (blocks > own_block(products, size))
    listed = products.gather(-1, blocks.clamp(min=0)).masked_fill(hidden, -torch.inf)
    predicted = listed.log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.xlogy(weights, weights) - weights * predicted).sum(-1).mean()


class Selector(nn.Module):
    """Gives each query and block a number (B, Hk, L, blocks): what share of the weight it expects."""

    def __init__(self, width: int, kv_heads: int, dim: int, size: int) -> None:
        super().__init__()
        self.kv_heads, self.size = kv_heads, size
        self.query = nn.Linear(width, kv_heads * dim, bias=False)
        self.key = nn.Linear(width, kv_heads * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (
            projected(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for projected in (self.query, self.key)
        )
        # A key that matches is one of many in its block: in a mean its product would be small, in a sum it is
        # as large as for the key alone.
        return query @ key.unflatten(2, (-1, self.size)).sum(3).mT


class SparseSelfAttention(nn.Module):
    """Causal attention to the blocks that a choice makes of the selector's numbers."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        head_dim = width // heads
        self.project = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.selector = Selector(width, kv_heads, head_dim, size)

    def forward(self, x: Tensor, choice: Choice, count: int, learns: bool) -> tuple[Tensor, Tensor]:
        """Returns the output, and the selector's loss if the selector learns, else 0."""
        projected = self.project(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        query, key, value = projected.split([self.heads, self.kv_heads, self.kv_heads], 1)
        # Detached, so that the selector's loss trains the selector alone.
        products = self.selector(x.detach())
        blocks = choice(products.detach(), count)
        out = sparse_attention(
            query, key, value, block_indices=blocks, block_size=self.size, is_causal=True, enable_gqa=True
        )
        out = self.out(out.transpose(1, 2).flatten(2))
        if not learns:
            return out, x.new_zeros(())
        # The query heads of a group select together, and so the selector learns the mean of their weights.
        weights = weights_of_blocks(query, key, blocks, self.size)
        weights = weights.unflatten(1, (self.kv_heads, -1)).mean(2)
        return out, selector_loss(weights, products, blocks, self.size)


class Layer(nn.Module):
    """A pre-norm layer of a decoder."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SparseSelfAttention(width, heads, kv_heads, size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, choice: Choice, count: int, learns: bool) -> tuple[Tensor, Tensor]:
        attended, divergence = self.attention(self.attention_norm(x), choice, count, learns)
        x = x + attended
        return x + self.mlp(x), divergence


class Model(nn.Module):
    """Predicts the next byte: logits (B, L, 128), and the sum of the selectors' losses.

    A token's vector is made of its byte and the one before, so that a digit's key can tell its letter.
    """

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.byte, self.before = nn.Embedding(128, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, size) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, tokens: Tensor, choice: Choice, count: int, learns: bool) -> tuple[Tensor, Tensor]:
        x = self.byte(tokens) + self.before(F.pad(tokens[:, :-1], (1, 0)))
        divergences = []
        for layer in self.layers:
            x, divergence = layer(x, choice, count, learns)
            divergences.append(divergence)
        return self.head(x), torch.stack(divergences).sum()


def choices(size: int, generator: torch.Generator) -> dict[str, Choice]:
    """Returns the four ways, by name."""

    def recent(products: Tensor, count: int) -> Tensor:
        return chosen(torch.arange(float(products.size(-1))).expand_as(products), count, size)

    def by_chance(products: Tensor, count: int) -> Tensor:
        return chosen(torch.rand(products.shape, generator=generator), count, size)

    def by_selector(products: Tensor, count: int) -> Tensor:
        return chosen(products, count, size)

    return {"all keys": everything, "selector": by_selector, "most recent": recent, "by chance": by_chance}


def train(
    name: str,
    model: Model,
    optimizer: torch.optim.Optimizer,
    choice: Choice,
    steps: int,
    given: argparse.Namespace,
) -> float:
    """Trains a model with a choice, and returns its loss on new texts: of the digits that stand before."""
    drawn = torch.Generator().manual_seed(given.seed + 1)
    learns = name in ("warm-up", "selector")

    def losses(count: int) -> tuple[Tensor, Tensor]:
        tokens, known = texts(count, given.context, drawn)
        logits, divergence = model(tokens, choice, given.selected, learns)
        return F.cross_entropy(logits[known], tokens.roll(-1, 1)[known]), divergence

    for step in range(1, steps + 1):
        loss, divergence = losses(given.batch)
        optimizer.zero_grad(set_to_none=True)
        (loss + divergence).backward()
        optimizer.step()
        if step % max(1, steps // 3) == 0:
            of_selector = f"   selector {divergence.item():.3f}" if learns else ""
            print(f"{name:12} step {step:5d}   loss {loss.item():.3f}{of_selector}", flush=True)
    with torch.no_grad():
        return losses(64)[0].item()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains in all ways, prints the losses on new texts, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"layers": 1, "width": 64, "heads": 4, "kv-heads": 2, "context": 256, "batch": 8}
    sizes |= {"block-size": 16, "selected": 4, "warm-up": 200, "steps": 200, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate")
    given = parser.parse_args(argv)
    if given.context % given.block_size or given.context % 2:
        parser.error("--context must be even, and a multiple of --block-size")
    sample, _ = texts(1, given.context, torch.Generator().manual_seed(given.seed))
    print(f"a text: {bytes(sample[0, :48].tolist()).decode()} ...")
    torch.manual_seed(given.seed)
    model = Model(given.layers, given.width, given.heads, given.kv_heads, given.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    train("warm-up", model, optimizer, everything, given.warm_up, given)
    found = {}
    for name, choice in choices(given.block_size, torch.Generator().manual_seed(given.seed)).items():
        copies = copy.deepcopy(
            (model, optimizer)
        )  # together, so that the optimizer has the copied parameters
        found[name] = train(name, *copies, choice, given.steps, given)
    blocks = given.context // given.block_size
    selected = min(given.selected, blocks)
    print(f"\nloss of known digits in new texts, with {selected} of {blocks} blocks per query")
    for name, loss in found.items():
        print(f"{name:12} {loss:.3f}")
    return found


if __name__ == "__main__":
    main()
