"""Training of copies of one model in turns, with the same initial weights and the same batches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfattn_ext.demo.model import CausalAttention, CharTransformer, ModelSize
from selfattn_ext.demo.text import Corpus
from selfattn_ext.terminal import Progress

# Twice the rate trains equally well, but then rounding errors grow a thousandfold within 100 steps, and the
# losses would no longer show that the contenders compute the same. So it is with an Adam epsilon of 1e-8.
LEARNING_RATE = 3e-3
ADAM_EPSILON = 1e-5
WARM_UP_FRACTION = 0.1
HELD_OUT_SEQUENCES = 64


class Budget:
    """The seconds that the whole command may take, counted from when this is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._start

    def left(self, kept: float = 0.0) -> float:
        """Returns the seconds left after those kept for something else; negative if there are too few."""
        return self.seconds - kept - self.spent()


@dataclass
class Contender:
    """A copy of the model, its optimizer, and its losses and times."""

    name: str
    model: CharTransformer
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        """Makes one optimizer step, timed from the batch to the new weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        self.seconds.append(time.perf_counter() - start)

    def step_seconds(self) -> float:
        """Returns the median over the steps, so that the slow first one does not count."""
        return statistics.median(self.seconds)


@torch.no_grad()
def held_out_loss(model: CharTransformer, corpus: Corpus, device: torch.device) -> float:
    """Returns the model's loss on a fixed part of the text that no training batch contains."""
    tokens, targets = (part.to(device) for part in corpus.held_out_batch(HELD_OUT_SEQUENCES))
    return model.loss(tokens, targets).item()


def with_attention(model: CharTransformer, symbols: int, attention: CausalAttention) -> CharTransformer:
    """Returns a copy of the model, weights included, that attends by another function."""
    twin = CharTransformer(symbols, model.size, attention).to(model.head.weight.device)
    twin.load_state_dict(model.state_dict())
    return twin


def line_up(
    attentions: Sequence[tuple[str, CausalAttention]], symbols: int, size: ModelSize, device: torch.device
) -> list[Contender]:
    """Returns a contender for each (name, attention function), all with the same initial weights."""
    first = CharTransformer(symbols, size, attentions[0][1]).to(device)
    contenders = []
    for name, attention in attentions:
        model = with_attention(first, symbols, attention)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), eps=ADAM_EPSILON, fused=True
        )
        contenders.append(Contender(name, model, optimizer))
    return contenders


def train(
    contenders: Sequence[Contender],
    corpus: Corpus,
    steps: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    budget: Budget,
    kept: float = 0.0,
) -> int:
    """Runs ``steps`` steps of every contender, A B C A B C, so that all meet the machine in the same state.

    Returns the number of steps done, at least 1. It is less than ``steps`` if the budget, less the seconds
    ``kept`` for what follows, does not suffice for another step.
    """
    generator = torch.Generator().manual_seed(seed)
    with Progress("training", steps) as progress:
        for step in range(steps):
            before = budget.spent()
            tokens, targets = (part.to(device) for part in corpus.batch(batch_size, generator))
            for contender in contenders:
                contender.step(tokens, targets, _learning_rate(step, steps))
            speed = tokens.numel() / contenders[0].step_seconds()
            left = budget.left(kept)
            note = f"loss {contenders[0].losses[-1]:.3f}  {speed:,.0f} tokens/s"
            progress.update(step + 1, note, most=left)
            if left < budget.spent() - before:
                return step + 1
    return steps


def largest_difference(a: Contender, b: Contender) -> float:
    """Returns the largest absolute difference of two contenders' losses over all steps, NaN if one is NaN."""
    differences = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _learning_rate(step: int, steps: int) -> float:
    """Returns the rate of a step: a linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, round(WARM_UP_FRACTION * steps))
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
