"""A small GPT, trained with torch.compile and autocast on this repository's documents.

    python examples/train_gpt.py                                    # CPU, bfloat16, a few minutes
    python examples/train_gpt.py --device cuda --layers 6 --width 384 --heads 6 --context 512 --batch 32
    python examples/train_gpt.py --text book.txt --dtype float32 --no-compile

What it shows: the attention layer and its gradient are part of one compiled graph (fullgraph=True would
refuse to compile otherwise), autocast reaches them, and the same graph serves sequences of other lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfattn_ext
from selfattn_ext.demo import text
from selfattn_ext.terminal import CommandError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Size:
    """The options of the command line for the model."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128


class Block(nn.Module):
    """A pre-norm layer of a decoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = selfattn_ext.MultiHeadSelfAttention(size.width, size.heads)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next symbol: logits (batch, length, symbols) for tokens (batch, length <= context)."""

    def __init__(self, symbols: int, size: Size) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, symbols)
        nn.init.normal_(self.symbol.weight, std=0.1)
        nn.init.normal_(self.position, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbol(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats per symbol."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


def repository_text() -> text.Text:
    """Returns the documents of the repository that this file is in."""
    root = Path(__file__).resolve().parents[1]
    files = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    found = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return text.Text("\n\n".join(found), "this repository's documents") if found else text.from_python()


def kernel_of(size: Size, batch: int, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the name of the kernel that the model's attention takes."""
    query = torch.zeros(batch, size.heads, size.context, size.width // size.heads, dtype=dtype, device=device)
    taken = selfattn_ext.backends.explain(query, query, query, is_causal=True)
    return f"{taken.kernel}/{taken.isa}"


@torch.no_grad()
def sample(logits: Callable[[Tensor], Tensor], prompt: Tensor, count: int, context: int) -> Tensor:
    """Draws ``count`` symbols one by one, with another length at each call; returns the prompt with them."""
    tokens = prompt
    for _ in range(count):
        likely = logits(tokens[None, -context:])[0, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1)])
    return tokens


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default this repository's documents")
    for name, default in (("layers", 4), ("heads", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of autocast")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    if given.width % given.heads:
        parser.error("--heads must divide --width")
    return given


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, prints progress, and returns the losses."""
    given = arguments(argv)
    device, dtype = torch.device(given.device), DTYPES[given.dtype]
    size = Size(given.layers, given.heads, given.width, given.context)
    torch.manual_seed(given.seed)
    source = text.from_file(given.text) if given.text else repository_text()
    corpus = text.Corpus(source, size.context)
    model = GPT(len(corpus.symbols), size).to(device)
    loss_of, logits_of = model.loss, model.forward
    if given.compile:
        loss_of = torch.compile(loss_of, fullgraph=True, backend=given.backend)
        logits_of = torch.compile(logits_of, fullgraph=True, backend=given.backend, dynamic=True)

    def autocast() -> contextlib.AbstractContextManager[None]:
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"text     {len(source.content):,} characters, {len(corpus.symbols)} symbols: {source.origin}")
    print(f"model    {size.layers} layers, {size.heads} heads, width {size.width}, {parameters:,} parameters")
    how = f"torch.compile ({given.backend})" if given.compile else "eager"
    print(f"compute  {how}, {given.dtype} on {device}, {torch.get_num_threads()} CPU threads")
    print(f"kernel   {kernel_of(size, given.batch, device, dtype)}\n", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    # float16 has too small a range of exponents for small gradients; the other dtypes need no scaling.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    drawn = torch.Generator().manual_seed(given.seed)
    losses: list[float] = []
    report = max(1, given.steps // 10)
    start, tokens_since = time.perf_counter(), 0
    for step in range(1, given.steps + 1):
        tokens, targets = (part.to(device) for part in corpus.batch(given.batch, drawn))
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = loss_of(tokens, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        tokens_since += tokens.numel()
        if step == 1 or step % report == 0:
            seconds = time.perf_counter() - start
            speed = f"first step {seconds:.1f} s" if step == 1 else f"{tokens_since / seconds:,.0f} tokens/s"
            print(f"step {step:5d}   loss {losses[-1]:.3f}   {speed}", flush=True)
            start, tokens_since = time.perf_counter(), 0

    with torch.no_grad(), autocast():
        tokens, targets = (part.to(device) for part in corpus.held_out_batch(32))
        print(f"\nheld-out loss {model.loss(tokens, targets).item():.3f}")
        written = sample(logits_of, corpus.prompt(16).to(device), 200, size.context)
    print("sample:", *corpus.decode(written.cpu()).splitlines(), sep="\n  | ")
    return losses


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
