"""A small language model, trained on packed documents of different lengths.

    python examples/train_packed.py                                 # CPU, a few minutes
    python examples/train_packed.py --device cuda --layers 6 --width 384 --heads 6 --tokens 16384
    python examples/train_packed.py --text book.txt --compile

What it shows: each batch has as many whole paragraphs as fit into a number of tokens, packed one after the
other; varlen_attention keeps them apart; positions count from the start of each. There is no padding.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfattn_ext import varlen_attention
from selfattn_ext.demo import text
from selfattn_ext.terminal import CommandError


class Packed(NamedTuple):
    """Packed documents: their symbols (total,), the start of each (B + 1,), and the longest length."""

    symbols: Tensor
    starts: Tensor
    longest: int

    def to(self, device: torch.device) -> Packed:
        """Returns the same documents on a device."""
        return Packed(self.symbols.to(device), self.starts.to(device), self.longest)

    @property
    def padding(self) -> float:
        """Returns the share of padding in a tensor (B, longest) of the same documents."""
        return 1 - len(self.symbols) / ((len(self.starts) - 1) * self.longest)


def packed(documents: Sequence[Tensor]) -> Packed:
    """Packs documents."""
    lengths = [len(document) for document in documents]
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return Packed(torch.cat(list(documents)), starts, max(lengths))


def batches(documents: Sequence[Tensor], tokens: int, seed: int) -> Iterator[Packed]:
    """Yields, without end, batches of whole documents in random order of at most ``tokens`` tokens."""
    shuffle = random.Random(seed)
    waiting: list[Tensor] = []
    while True:
        for document in shuffle.sample(documents, len(documents)):
            if waiting and sum(map(len, waiting)) + len(document) > tokens:
                yield packed(waiting)
                waiting = []
            waiting.append(document)


class Block(nn.Module):
    """A pre-norm layer of a decoder, over packed rows (total, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, starts: Tensor, longest: int) -> Tensor:
        qkv = self.projection(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        mixed = varlen_attention(*qkv.unbind(1), starts, starts, longest, longest, is_causal=True)
        x = x + self.output(mixed.flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Predicts the next symbol of each document."""

    def __init__(self, symbols: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)
        for table in (self.symbol, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def loss(self, symbols: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Returns the mean cross entropy in nats; the last symbol of a document has no next one."""
        place = torch.arange(len(symbols), device=symbols.device)
        document = torch.searchsorted(starts, place, right=True, out_int32=True) - 1
        x = self.symbol(symbols) + self.position(place - starts[document])
        for block in self.blocks:
            x = block(x, starts, longest)
        is_last = place + 1 == starts[document + 1]
        following = symbols.roll(-1).masked_fill(is_last, -100)
        return F.cross_entropy(self.head(self.norm(x)), following, ignore_index=-100)


def repository_text() -> text.Text:
    """Returns the documents of the repository that this file is in."""
    root = Path(__file__).resolve().parents[1]
    found = [file.read_text(encoding="utf-8") for file in sorted((root / "docs").glob("*.md"))]
    return text.Text("\n\n".join(found), "this repository's documents") if found else text.from_python()


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, prints progress, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default this repository's documents")
    for name, default in (("layers", 3), ("heads", 4), ("width", 128), ("tokens", 1024), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device(given.device)
    source = text.from_file(given.text) if given.text else repository_text()
    paragraphs = [part.strip() for part in source.content.split("\n\n") if len(part.strip()) > 1]
    if not paragraphs:
        raise CommandError(f"the text of {source.origin} has no paragraph of two characters or more")
    symbols = sorted(set("".join(paragraphs)))
    number = {symbol: index for index, symbol in enumerate(symbols)}
    documents = [torch.tensor([number[s] for s in part[: given.context]]) for part in paragraphs]
    lengths = sorted(map(len, documents))
    print(f"text     {len(documents)} paragraphs of {lengths[0]} to {lengths[-1]} symbols: {source.origin}")

    model = Model(len(symbols), given.context, given.layers, given.width, given.heads).to(device)
    loss_of = model.loss
    if given.compile:
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=given.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    losses, seen, padding, start = [], 0, 0.0, time.perf_counter()
    for step, batch in zip(range(1, given.steps + 1), batches(documents, given.tokens, seed=0), strict=False):
        loss = loss_of(*batch.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen, padding = seen + len(batch.symbols), padding + batch.padding / given.steps
        if step == 1 or step % max(1, given.steps // 10) == 0:
            speed = seen / (time.perf_counter() - start)
            count = len(batch.starts) - 1
            print(f"step {step:5d}   loss {losses[-1]:.3f}   {count:3d} documents   {speed:,.0f} symbols/s")
    print(f"padded, the same batches would have been {padding:.0%} padding")
    return losses


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
