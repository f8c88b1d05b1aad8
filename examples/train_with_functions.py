"""A small language model with functions of attention: a learned bias, documents kept apart.

    python examples/train_with_functions.py                                   # CPU
    python examples/train_with_functions.py --text book.txt --steps 1000
    python examples/train_with_functions.py --bias bias.png --mask mask.png   # pictures; need the extra viz

What it shows: rows of equal length hold paragraphs one after the other; a mask function lets a token see
only earlier tokens of its own paragraph, and a BlockMask skips blocks that no query sees; a score function
adds a number for each head and distance, which is learned with the model. There are no other positions.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from selfattn_ext import flex_attention, viz
from selfattn_ext.demo import text
from selfattn_ext.terminal import CommandError


def packed(
    documents: Sequence[Tensor], batch: int, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, without end, rows of documents in random order, and the number of each symbol's document.

    Both are (batch, length). If a row is full, its last document continues in the next row.
    """
    shuffle = random.Random(seed)
    symbols, numbers = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    while True:
        order = shuffle.sample(documents, len(documents))
        symbols = torch.cat([symbols, *order])
        lengths = torch.tensor([len(document) for document in order])
        numbers = torch.cat([numbers, torch.repeat_interleave(torch.arange(len(order)), lengths)])
        while len(symbols) >= batch * length:
            yield symbols[: batch * length].view(batch, length), numbers[: batch * length].view(batch, length)
            symbols, numbers = symbols[batch * length :], numbers[batch * length :]


def mask_of(document: Tensor) -> BlockMask:
    """Returns the mask in which a token sees earlier tokens of its document; document (B, T) numbers them."""

    def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[batch, q_idx] == document[batch, kv_idx])

    batch, length = document.shape
    return create_block_mask(mask_mod, batch, None, length, length, device="cpu", BLOCK_SIZE=64)


class Block(nn.Module):
    """A pre-norm layer of a decoder."""

    def __init__(self, width: int, heads: int, distances: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        #: The number added to the score of a query and a key, by distance; the last one is for all beyond.
        self.bias = nn.Parameter(torch.zeros(heads, distances))

    def biased(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Adds the bias to a score; this is the score function."""
        distance = (q_idx - kv_idx).clamp(0, self.bias.size(1) - 1)
        return score + self.bias[head, distance]

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        qkv = self.projection(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        mixed = flex_attention(*qkv.permute(2, 0, 3, 1, 4), self.biased, mask)  # (B, heads, T, width / heads)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Predicts the next symbol of each document."""

    def __init__(self, symbols: int, layers: int, width: int, heads: int, distances: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, heads, distances) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)
        nn.init.normal_(self.symbol.weight, std=0.1)

    def loss(self, symbols: Tensor, document: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats; the last symbol of a document has no next one."""
        x, mask = self.symbol(symbols), mask_of(document)  # one mask for all layers
        for block in self.blocks:
            x = block(x, mask)
        following = symbols[:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
        return F.cross_entropy(
            self.head(self.norm(x))[:, :-1].flatten(0, 1), following.flatten(), ignore_index=-100
        )


def repository_text() -> text.Text:
    """Returns the documents of the repository that this file is in."""
    root = Path(__file__).resolve().parents[1]
    found = [file.read_text(encoding="utf-8") for file in sorted((root / "docs").glob("*.md"))]
    return text.Text("\n\n".join(found), "this repository's documents") if found else text.from_python()


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, prints progress, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default this repository's documents")
    for name, default in (("layers", 2), ("heads", 4), ("width", 64), ("length", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--distances", type=int, default=32, help="the number of distances that have their own bias"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--rate", type=float, default=5e-3, help="the learning rate; ten times that for biases"
    )
    parser.add_argument("--bias", type=Path, help="draw the learned bias of each distance to this file")
    parser.add_argument("--mask", type=Path, help="draw the mask of the first row to this file")
    given = parser.parse_args(argv)
    if given.bias or given.mask:
        viz.require()  # before training
    torch.manual_seed(0)
    source = text.from_file(given.text) if given.text else repository_text()
    paragraphs = [part.strip() for part in source.content.split("\n\n") if len(part.strip()) > 1]
    if not paragraphs:
        raise CommandError(f"the text of {source.origin} has no paragraph of two characters or more")
    known = sorted(set("".join(paragraphs)))
    number = {symbol: index for index, symbol in enumerate(known)}
    documents = [torch.tensor([number[symbol] for symbol in part]) for part in paragraphs]
    print(f"text     {len(documents)} paragraphs, {len(known)} different symbols: {source.origin}")

    model = Model(len(known), given.layers, given.width, given.heads, given.distances)
    # A bias must reach several units to matter in a softmax, so it gets larger steps and no weight decay.
    biases = [block.bias for block in model.blocks]
    others = [parameter for parameter in model.parameters() if all(parameter is not bias for bias in biases)]
    faster = {"params": biases, "lr": 10 * given.rate, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": others}, faster], lr=given.rate)
    batches = packed(documents, given.batch, given.length, seed=0)
    losses: list[float] = []
    start = time.perf_counter()
    for step, (symbols, document) in zip(range(1, given.steps + 1), batches, strict=False):
        if step == 1 and given.mask:
            picture = viz.plot_mask(mask_of(document), title="who sees whom in the first row")
            print(f"mask     {viz.save(picture, given.mask)}")
        loss = model.loss(symbols, document)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, given.steps // 10) == 0:
            print(f"step {step:5d}   loss {losses[-1]:.3f}   {time.perf_counter() - start:.1f} s")

    learned = model.blocks[0].bias.detach()
    shown = [distance for distance in (0, 1, 2, 3, 4, 8, 16, 31) if distance < given.distances]
    print("learned bias of the first layer, by distance\n        " + "".join(f"{each:7d}" for each in shown))
    for head, row in enumerate(learned[:, shown].tolist()):
        print(f"head {head:3d}" + "".join(f"{value:7.2f}" for value in row))
    if given.bias:
        largest = learned.abs().max().item()
        names = [f"head {head}" for head in range(given.heads)]
        picture = viz.plot_attention(
            learned,
            names,
            key_tokens=[str(distance) for distance in range(given.distances)],
            title="learned bias of the first layer",
            cmap="PuOr",
            vmin=-largest,
            vmax=largest,
            colorbar=False,
            annotate=False,
        )
        picture.set(xlabel="distance from the query back to the key", ylabel="")
        print(f"bias     {viz.save(picture, given.bias)}")
    return losses


if __name__ == "__main__":
    try:
        main()
    except (CommandError, ImportError) as error:
        sys.exit(f"error: {error}")
