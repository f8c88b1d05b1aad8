"""The cost of splitting a sequence over processes, in time and in memory per process.

    python benchmarks/split_cost.py                           # 16384 tokens, two processes of one thread each
    python benchmarks/split_cost.py --length 2048 --rounds 3

It times forward and backward pass of causal attention. "kernels" is the time in the operators of the rank
that spends most there, and "cost" the additional time of the whole call: exchanges, merging, and waiting for
each other. The same call in one process with as many threads is timed in turns with it. Memory is each rank's
peak beyond what it had before its inputs, measured in separate processes.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from selfattn_ext import distributed, ops, scaled_dot_product_attention
from selfattn_ext.bench import memory
from selfattn_ext.bench.memory import growth
from selfattn_ext.distributed import shard_sequence
from selfattn_ext.terminal import table


class Call(NamedTuple):
    """The computation, on tensors of shape (1, heads, length, head_dim)."""

    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    method: str

    def inputs(self, part: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[Tensor]:
        """Draws query, key, value and the gradient of out, or a part of each."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.heads, self.length, self.head_dim)
        drawn = [part(torch.randn(shape, generator=generator).to(self.dtype)) for _ in range(4)]
        return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(drawn)]


class Spent:
    """Sums the seconds spent in operators."""

    seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def step(attention: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
    """Computes forward and backward pass."""
    query, key, value, grad = tensors
    torch.autograd.grad(attention(query, key, value, is_causal=True), (query, key, value), grad)


def split_attention(call: Call) -> Callable[..., Any]:
    return distributed.ring_attention if call.method == "ring" else distributed.ulysses_attention


def serve(rank: int, count: int, store: str, call: Call, end: Connection) -> None:
    """Runs a rank: sends its memory, then makes a step for each message and sends the time that it took."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout
    )
    attention = split_attention(call)
    small = call._replace(length=64 * count)
    step(attention, small.inputs(lambda tensor: shard_sequence(tensor, 2)))
    dist.barrier()
    tensors: list[Tensor] = call.inputs(lambda tensor: shard_sequence(tensor, 2))
    held = sum(tensor.nbytes for tensor in tensors)
    _, grown = growth(lambda: step(attention, tensors))
    end.send(held + grown)
    spent = Spent()
    ops.attention_forward = spent.timed(ops.attention_forward)
    ops.attention_backward = spent.timed(ops.attention_backward)
    while end.recv():
        spent.seconds = 0.0
        dist.barrier()
        start = time.perf_counter()
        step(attention, tensors)
        end.send((time.perf_counter() - start, spent.seconds))


@contextmanager
def ranks_of(count: int, call: Call) -> Iterator[list[Connection]]:
    """Starts ``count`` ranks; each sends its memory when it is ready."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, others = zip(*(context.Pipe() for _ in range(count)), strict=True)
        processes = [
            context.Process(target=serve, args=(rank, count, f"{folder}/store", call, end), daemon=True)
            for rank, end in enumerate(others)
        ]
        for process in processes:
            process.start()
        try:
            yield list(ends)
        finally:
            for process in processes:
                process.kill()
                process.join()


def times(call: Call, count: int, rounds: int) -> tuple[float, float, float]:
    """Returns the medians of a split step, of a rank's longest time in operators, of one process's step."""
    torch.set_num_threads(count)
    tensors = call.inputs()
    step(scaled_dot_product_attention, tensors)
    found = []
    with ranks_of(count, call) as ends:
        for end in ends:
            end.recv()
        for _ in range(rounds):
            for end in ends:
                end.send(True)
            whole, kernels = (max(each) for each in zip(*(end.recv() for end in ends), strict=True))
            start = time.perf_counter()
            step(scaled_dot_product_attention, tensors)
            found.append((whole, kernels, time.perf_counter() - start))
    whole, kernels, alone = (median(each) for each in zip(*found, strict=True))
    return whole, kernels, alone


def memory_of_ranks(call: Call, count: int) -> list[int]:
    """Returns each rank's bytes at the peak of a step. Freed memory is returned at once, which is slow, so
    this times nothing.
    """
    os.environ.update(memory.ALLOCATOR)
    with ranks_of(count, call) as ends:
        return [end.recv() for end in ends]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("length", 16384), ("heads", 8), ("head-dim", 64), ("rounds", 5), ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="*", default=["ring", "ulysses"], choices=["ring", "ulysses"])
    parser.add_argument("--memory-at", type=int, nargs="*", default=[1, 2, 4], help="numbers of processes")
    given = parser.parse_args(arguments)
    if not memory.available():
        print(f"{parser.prog}: error: this system reports no peak that can be reset", file=sys.stderr)
        return 1
    calls = [
        Call(given.length, given.heads, given.head_dim, getattr(torch, dtype), method)
        for dtype in given.dtypes
        for method in given.methods
    ]
    rows = []
    for call in calls:
        whole, kernels, alone = times(call, given.processes, given.rounds)
        milliseconds = [f"{each * 1e3:.1f}" for each in (whole, kernels, alone)]
        rows.append(
            [call.method, str(call.dtype).removeprefix("torch."), *milliseconds, f"{whole / kernels - 1:.1%}",
             f"{whole / alone:.2f}"]
        )  # fmt: skip
    count = f"{given.processes} process{'es' * (given.processes > 1)}"
    print(f"{count} of one thread each, {given.length} tokens, causal, both passes")
    print("one: a process with as many threads")
    header = ["method", "dtype", "ms", "ms in kernels", "ms of one", "cost", "over one"]
    print(table(header, rows, left=2))
    rows = []
    for call in calls:
        peaks = [max(memory_of_ranks(call, count)) / 1e6 for count in given.memory_at]
        rows.append([call.method, str(call.dtype).removeprefix("torch."), *(f"{peak:.1f}" for peak in peaks)])
    print(table(["method", "dtype", *(f"MB per rank of {count}" for count in given.memory_at)], rows, left=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
