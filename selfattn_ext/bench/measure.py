"""Runs cases: every contender in turns, errors beside the times, the matmul speed of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from selfattn_ext.bench import peak
from selfattn_ext.bench.accuracy import Truth, truth
from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import OURS, Contender, results, runner
from selfattn_ext.bench.timer import Effort, Ratio, Timing, interleave
from selfattn_ext.terminal import Progress, describe


@dataclass(frozen=True)
class Outcome:
    """One contender on one case: a timing and an error, or the reason why there is none."""

    timing: Timing | None
    error: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """One case with one number of threads."""

    case: Case
    threads: int
    outcomes: dict[str, Outcome]  # by name of the contender, this package's first
    matmul_gflops: float

    def ratio(self, peer: str) -> Ratio | None:
        """Time of a peer over the time of this package; above 1 this package is faster."""
        ours, other = self.outcomes[OURS.name].timing, self.outcomes[peer].timing
        return None if ours is None or other is None else Ratio.of(other, ours)

    def gflops(self, name: str) -> float | None:
        """Speed of a contender by the case's count of operations."""
        timing = self.outcomes[name].timing
        return None if timing is None else self.case.flops() / timing.median / 1e9


def measure(
    cases: Sequence[Case],
    peers: Sequence[Contender],
    threads: Sequence[int],
    effort: Effort,
    matmul_size: int = peak.SIZE,
) -> list[Row]:
    """One row for each number of threads and case; a progress bar on stderr meanwhile."""
    rows = []
    exact: dict[Case, Truth | None] = {}
    with Progress("measuring", len(threads) * len(cases)) as progress:
        for count in threads:
            with _threads(count):
                speed = {
                    dtype: peak.matmul_gflops(dtype, matmul_size, effort.seconds / 2)
                    for dtype in dict.fromkeys(case.dtype for case in cases)
                }
                for case in cases:
                    rows.append(_row(case, [OURS, *peers], count, effort, speed[case.dtype], exact))
                    progress.update(
                        len(rows), f"{case.dtype_name} {case.shape} {case.options()} {case.direction}"
                    )
    return rows


def _row(
    case: Case,
    contenders: Sequence[Contender],
    threads: int,
    effort: Effort,
    matmul_gflops: float,
    exact: dict[Case, Truth | None],
) -> Row:
    tensors = inputs(case)
    # Without a backward pass the truth is the beginning of what it is with one.
    key = replace(case, backward=True)
    if key not in exact:
        exact[key] = truth(key, inputs(key))
    outcomes: dict[str, Outcome] = {}
    calls = {}
    for contender in contenders:
        try:
            found = results(contender, case, tensors)
            calls[contender.name] = runner(contender, case, tensors)
        except NotImplementedError as refusal:
            outcomes[contender.name] = Outcome(None, None, describe(refusal))
            continue
        judge = exact[key]
        outcomes[contender.name] = Outcome(None, None if judge is None else judge.error(case, found))
    for name, timing in interleave(calls, effort).items():
        outcomes[name] = replace(outcomes[name], timing=timing)
    return Row(case, threads, outcomes, matmul_gflops)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
