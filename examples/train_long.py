"""A small GPT, trained on one long document that is split over processes.

    python examples/train_long.py                                           # one process has all of it
    torchrun --nproc_per_node 2 examples/train_long.py                      # two, four: the same losses
    torchrun --nproc_per_node 4 examples/train_long.py --method ulysses --shard --checkpoints
    torchrun --nproc_per_node 8 examples/train_long.py --device cuda --tokens 131072 --width 512 --heads 8

What it shows: the model does not depend on processes, except that it is given the positions of its rows.
Under context_parallel its attention sees the whole document, and DistributedDataParallel sums the gradients
of all parts, or FSDP2 (--shard), which also shards the parameters. Memory for activations falls with the
number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import selfattn_ext
from selfattn_ext.demo import text
from selfattn_ext.distributed import bytes_sent, context_parallel, shard_sequence
from selfattn_ext.terminal import CommandError


class Block(nn.Module):
    """A pre-norm layer of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = selfattn_ext.MultiHeadSelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next symbol: logits (1, rows, symbols) for symbols and their positions (1, rows)."""

    def __init__(self, symbols: int, width: int, heads: int, layers: int, checkpoints: bool) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)
        self.checkpoints = checkpoints
        # The wavelengths of the positions, from a few symbols to the longest document.
        self.register_buffer("rates", torch.logspace(0, -5, width // 2), persistent=False)

    def forward(self, symbols: Tensor, positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1) * self.rates
        x = self.symbol(symbols) + torch.cat([angles.sin(), angles.cos()], -1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[int]:
    """Makes a group of the processes that torchrun has started, or of this one alone; yields its rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def document(path: Path | None, tokens: int) -> tuple[Tensor, int, str]:
    """Returns ``tokens`` + 1 symbols of a text as numbers, how many kinds there are, and their source."""
    if path is None:
        root = Path(__file__).resolve().parents[1]
        files = [file.read_text(encoding="utf-8") for file in sorted((root / "docs").glob("*.md"))]
        source = text.Text("\n".join(files), "this repository's documents") if files else text.from_python()
    else:
        source = text.from_file(path)
    content = source.content[: tokens + 1]
    if len(content) <= tokens:
        raise CommandError(f"the text of {source.origin} has {len(content)} characters: give fewer --tokens")
    kinds = sorted(set(content))
    number = {kind: index for index, kind in enumerate(kinds)}
    return torch.tensor([number[each] for each in content]), len(kinds), source.origin


def peak_memory(device: torch.device) -> float:
    """Returns the peak of this process's memory in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, prints progress on the first rank, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default this repository's documents")
    parser.add_argument("--tokens", type=int, default=32768, help="the length of the document")
    for name, default in (("layers", 2), ("heads", 4), ("width", 64), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    parser.add_argument("--method", choices=("ring", "ulysses"), default="ring")
    parser.add_argument("--layout", choices=("zigzag", "contiguous"), default="zigzag")
    parser.add_argument("--rotate", choices=("p2p", "allgather"), default="p2p")
    parser.add_argument("--shard", action="store_true", help="shard the parameters: FSDP2 in place of DDP")
    parser.add_argument(
        "--checkpoints", action="store_true", help="compute activations again in the backward"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with process_group(device) as rank:
        return train(given, device, rank)


def train(given: argparse.Namespace, device: torch.device, rank: int) -> list[float]:
    """Trains on one rank."""
    ranks = dist.get_world_size()
    symbols, kinds, origin = document(given.text, given.tokens)
    rows = (symbols[:-1], symbols[1:], torch.arange(given.tokens))
    mine = [shard_sequence(each.unsqueeze(0), 1, layout=given.layout).to(device) for each in rows]
    inputs, targets, positions = mine
    torch.manual_seed(0)
    model: nn.Module = GPT(kinds, given.width, given.heads, given.layers, given.checkpoints).to(device)
    if given.shard:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    split = context_parallel(method=given.method, layout=given.layout, rotate=given.rotate)
    if rank == 0:
        print(f"text     {given.tokens} symbols for {ranks} process{'es' * (ranks > 1)}: {origin}")
    before, losses = peak_memory(device), []
    for step in range(1, given.steps + 1):
        start, sent = time.perf_counter(), bytes_sent()
        with split:  # the backward is inside, too, as checkpoints attend again there
            logits = model(inputs, positions)
            # Gradients are means over the ranks, which may have different numbers of rows.
            own = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / given.tokens
            optimizer.zero_grad(set_to_none=True)
            (own * ranks).backward()
        optimizer.step()
        loss = own.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
        speed = given.tokens / (time.perf_counter() - start)
        if rank == 0:
            megabytes = (bytes_sent() - sent) / 1e6
            print(f"step {step:5d}   loss {losses[-1]:.5f}   {speed:,.0f} tokens/s   {megabytes:.2f} MB sent")
    memory = torch.tensor([peak_memory(device) - before], device=device)
    of_ranks = [torch.empty_like(memory) for _ in range(ranks)]
    dist.all_gather(of_ranks, memory)
    if rank == 0:
        print(
            "memory   "
            + ", ".join(f"{each.item():.0f}" for each in of_ranks)
            + " MB beyond the start, by rank"
        )
    return losses


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
    if "RANK" in os.environ:
        # gloo's threads may still hold tensors of the last exchange. A thread that releases them while Python
        # shuts down needs the interpreter and aborts the process (torch 2.13), so this skips the shutdown.
        sys.stdout.flush()
        os._exit(0)
