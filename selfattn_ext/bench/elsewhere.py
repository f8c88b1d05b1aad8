"""Measurements in a new process, which can have other environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.contenders import Contender
from selfattn_ext.bench.measure import Row, Session
from selfattn_ext.bench.timer import Effort

T = TypeVar("T")

_session: Session | None = None


class Elsewhere:
    """A Session in a process that starts with some environment variables set; it must be closed."""

    def __init__(self, environment: Mapping[str, str], peers: Sequence[Contender], effort: Effort) -> None:
        self._executor = _executor(environment, _open, (list(peers), effort))

    def row(self, case: Case, threads: int) -> Row:
        """Measures a row, as Session.row does."""
        return self._executor.submit(_row, case, threads).result()

    def close(self) -> None:
        """Ends the process."""
        self._executor.shutdown()


def in_new_process(environment: Mapping[str, str], function: Callable[..., T], *arguments: Any) -> T:
    """Calls function(*arguments) in a process that ends afterwards. Both must be picklable."""
    executor = _executor(environment)
    try:
        return executor.submit(function, *arguments).result()
    finally:
        executor.shutdown()


def _executor(
    environment: Mapping[str, str], initializer: Callable[..., None] | None = None, arguments: tuple = ()
) -> ProcessPoolExecutor:
    # A forked process would not do: libraries have read their variables, and threads do not survive a fork.
    executor = ProcessPoolExecutor(1, get_context("spawn"), initializer, arguments)
    with _variables(environment):
        executor.submit(os.getpid).result()  # the process starts with the first task
    return executor


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _open(peers: Sequence[Contender], effort: Effort) -> None:
    global _session
    _session = Session(peers, effort)


def _row(case: Case, threads: int) -> Row:
    assert _session is not None
    return _session.row(case, threads)
