"""A small GPT whose attention is watched while it trains, and kept from growing too sure of itself.

    python examples/train_qk_clip.py                       # all scores stay below 10, as --bound says
    python examples/train_qk_clip.py --bound inf           # the same without, to compare
    python examples/train_qk_clip.py --entropy 0.05        # the loss rewards weights that are spread

It shows two uses of the statistics that attention returns beside its output. The largest score of each head
(max_scores) is what QK-clip needs (Kimi Team 2025, "Kimi K2"): after each step, the projections of a head's
queries and keys are both scaled down by the same factor, so that no score of the batch would have been larger
than four fifths of the bound; the rest is for what one step adds. The entropy of each query's weights has a
gradient, so that a loss may reward it. Neither makes a matrix of (length, length).

The learning rate is high on purpose: without the bound, scores grow beyond 15 within 150 steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfattn_ext import AuxOutput, AuxRequest, MultiHeadSelfAttention
from selfattn_ext.demo import text
from selfattn_ext.terminal import CommandError

WATCHED = AuxRequest(max_scores=True, entropy=True)
#: The part of the bound that heads are scaled down to. A step may add the rest before they are again.
CLIPPED_TO = 0.8


class Block(nn.Module):
    """A pre-norm layer of a decoder, which returns the statistics of its attention, too."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiHeadSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> tuple[Tensor, AuxOutput]:
        attended, aux = self.attention(self.attention_norm(x), is_causal=True, return_aux=WATCHED)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), aux


class GPT(nn.Module):
    """Predicts the next symbol: logits (batch, length, symbols), and the statistics of every layer."""

    def __init__(self, symbols: int, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[AuxOutput]]:
        x = self.symbol(tokens) + self.position[: tokens.shape[1]]
        statistics = []
        for block in self.blocks:
            x, aux = block(x)
            statistics.append(aux)
        return self.head(self.norm(x)), statistics


@torch.no_grad()
def clip(model: GPT, statistics: Sequence[AuxOutput], bound: float) -> Tensor:
    """Scales down the projections of heads whose scores come close to the bound, and returns the largest
    scores of all heads (layers, heads), as they were before.

    Over several processes, torch.distributed.all_reduce of these with MAX comes first.
    """
    largest = torch.stack([aux.max_scores.amax((0, 2)) for aux in statistics])
    for block, of_heads in zip(model.blocks, largest, strict=True):
        # A score is a product of two projections, each of which takes the square root of the factor.
        allowed = CLIPPED_TO * bound
        factor = torch.where(of_heads > allowed, allowed / of_heads, 1.0).sqrt()
        for projection in (block.attention.Wq, block.attention.Wk):
            rows = factor.repeat_interleave(block.attention.head_dim)
            projection.weight.mul_(rows[:, None])
            projection.bias.mul_(rows)
    return largest


class History(NamedTuple):
    """Numbers of each step: the loss, the largest score of any head, and the mean entropy in nats."""

    loss: list[float]
    largest: list[float]
    entropy: list[float]


def main(argv: Sequence[str] | None = None) -> History:
    """Trains, prints progress, and returns what has been seen on the way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default the texts of Python's help()")
    sizes = {"layers": 2, "heads": 4, "width": 64, "context": 96, "batch": 8, "steps": 150}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-3, help="the learning rate")
    parser.add_argument("--bound", type=float, default=10.0, help="of the scores; inf for none")
    parser.add_argument("--entropy", type=float, default=0.0, help="how much the loss rewards entropy")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.manual_seed(given.seed)
    source = text.from_file(given.text) if given.text else text.from_python()
    corpus = text.Corpus(source, given.context)
    model = GPT(len(corpus.symbols), given.layers, given.heads, given.width, given.context).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    drawn = torch.Generator().manual_seed(given.seed)
    history = History([], [], [])
    for step in range(1, given.steps + 1):
        tokens, targets = (part.to(given.device) for part in corpus.batch(given.batch, drawn))
        logits, statistics = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        entropy = torch.stack([aux.entropy.mean() for aux in statistics]).mean()
        optimizer.zero_grad(set_to_none=True)
        (loss - given.entropy * entropy).backward()
        optimizer.step()
        largest = clip(model, statistics, given.bound)
        for numbers, new in zip(history, (loss, largest.max(), entropy), strict=True):
            numbers.append(new.item())
        if step == 1 or step % max(1, given.steps // 10) == 0:
            print(
                f"step {step:5d}   loss {history.loss[-1]:.3f}   largest score {history.largest[-1]:7.2f}   "
                f"entropy {history.entropy[-1]:.3f}",
                flush=True,
            )
    return history


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
