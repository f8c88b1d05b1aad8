"""Processes of one torch.distributed group that run functions for tests."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOADED = ["torch.testing", "torch._dynamo.backends.debugging", "selfattn_ext.distributed"]
#: How many seconds the processes wait for each other.
TIMEOUT = 60


class Processes:
    """``count`` ranks. A call passes (function, arguments) to all of them and returns their results."""

    def __init__(self, count: int, folder: Path, timeout: float = TIMEOUT) -> None:
        # All are forks of a process that has done the slow imports and computed nothing.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ends, others = zip(*(context.Pipe() for _ in range(count)), strict=True)
        self._processes = [
            context.Process(target=_serve, args=(rank, count, folder / "store", timeout, end), daemon=True)
            for rank, end in enumerate(others)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the ranks' results, or raises the error of the first rank that fails."""
        answers = self.outcomes(function, *arguments)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns each rank's result or error."""
        for end in self._ends:
            end.send((function, arguments))
        return [_answer(end) for end in self._ends]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _answer(end: Connection) -> Any:
    """Returns a rank's answer, or EOFError if the rank has ended."""
    try:
        return end.recv()
    except EOFError as error:
        return error


def _serve(rank: int, count: int, store: Path, timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        function, arguments = end.recv()
        try:
            answer = function(*arguments)
        except Exception as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            answer = error
        end.send(answer)


@contextlib.contextmanager
def group_of(count: int, timeout: float = TIMEOUT) -> Iterator[Processes]:
    """Gives one test ``count`` ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Processes(count, Path(folder), timeout)
        try:
            yield ranks
        finally:
            ranks.close()


@cache
def ranks(count: int) -> Processes:
    """Returns ``count`` ranks that tests of one process share, because starting ranks takes seconds."""
    return Processes(count, Path(tempfile.mkdtemp()))


def both_raise(
    error: type[Exception] | tuple[type[Exception], ...],
    says: str,
    function: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Asserts that a function raises such an error on each of two ranks."""
    for outcome in ranks(2).outcomes(function, *arguments):
        with pytest.raises(error, match=says):
            raise outcome
