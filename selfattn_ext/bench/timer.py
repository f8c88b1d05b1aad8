"""Timing of calls in turns, A B C A B C, so that all meet the machine in the same state."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

# A sample shorter than this would measure the clock and the scheduler as much as the call.
_SAMPLE_SECONDS = 1e-3


#: A function (call, repetitions) → the mean seconds that the call takes over so many repetitions.
Clock = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True)
class Effort:
    """How long to measure one case: until ``seconds`` are over, within the limits on the number of rounds."""

    seconds: float
    min_rounds: int
    max_rounds: int = 200


FULL = Effort(seconds=2.0, min_rounds=5)
QUICK = Effort(seconds=0.3, min_rounds=3)


@dataclass(frozen=True)
class Timing:
    """Seconds per call in each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return _quartiles(self.samples)


@dataclass(frozen=True)
class Ratio:
    """Time of one call over that of another, round by round, so that a slow round cancels out."""

    samples: tuple[float, ...]

    @classmethod
    def of(cls, numerator: Timing, denominator: Timing) -> Ratio:
        return cls(tuple(a / b for a, b in zip(numerator.samples, denominator.samples, strict=True)))

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return _quartiles(self.samples)


def wall_clock(call: Callable[[], object], repetitions: int) -> float:
    """Times calls that return when they are done, as calls on the CPU do."""
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions


def event_clock(call: Callable[[], object], repetitions: int) -> float:
    """Times calls that return while the GPU still works, between two events in its current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repetitions


def interleave(
    calls: Mapping[str, Callable[[], object]], effort: Effort, clock: Clock = wall_clock
) -> dict[str, Timing]:
    """Times the calls in turns.

    Each is called twice before, so that allocation and lazy initialisation are over; a sample of a short call
    is the mean over as many repetitions as fill a millisecond. Garbage collection is off meanwhile.
    """
    repetitions = {name: _warm_up(call, clock) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.seconds
        for done in range(effort.max_rounds):
            if done >= effort.min_rounds and time.perf_counter() > deadline:
                break
            for name, call in calls.items():
                samples[name].append(clock(call, repetitions[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


def best_seconds(call: Callable[[], object], seconds: float, clock: Clock = wall_clock) -> float:
    """Returns the shortest time of a call among the runs that fit into ``seconds``, at least three."""
    repetitions = _warm_up(call, clock)
    deadline = time.perf_counter() + seconds
    times = [clock(call, repetitions) for _ in range(3)]
    while time.perf_counter() < deadline:
        times.append(clock(call, repetitions))
    return min(times)


def _warm_up(call: Callable[[], object], clock: Clock) -> int:
    """Calls twice, and returns how many repetitions make a sample."""
    clock(call, 1)
    return max(1, math.ceil(_SAMPLE_SECONDS / max(clock(call, 1), 1e-9)))


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high
