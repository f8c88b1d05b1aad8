"""Processes of one group of torch.distributed, which compute what tests ask them for."""

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

import torch
import torch.distributed as dist

PRELOADED = ["torch", "torch.testing", "torch.distributed.tensor", "selfattn_ext.distributed"]
#: How long they wait for each other.
TIMEOUT = 60


class Processes:
    """So many ranks. A call gives (function, arguments) to all of them, and returns what each returns."""

    def __init__(self, count: int, folder: Path, timeout: float = TIMEOUT) -> None:
        # All are forks of a process that has imported what takes seconds, and computed nothing.
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
        """The results of the ranks. Raises what the first of them that fails raises."""
        answers = self.outcomes(function, *arguments)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns or raises."""
        for end in self._ends:
            end.send((function, arguments))
        return [_answer(end) for end in self._ends]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _answer(end: Connection) -> Any:
    """What a rank sends, or EOFError of one that is gone."""
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
    """So many ranks for a test of their own."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Processes(count, Path(folder), timeout)
        try:
            yield ranks
        finally:
            ranks.close()


@cache
def ranks(count: int) -> Processes:
    """So many ranks that tests of one process share: starting them takes seconds."""
    return Processes(count, Path(tempfile.mkdtemp()))
