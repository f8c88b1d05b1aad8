"""Measurement of cases: times of all contenders in turns, errors, the peaks of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from selfattn_ext import backends
from selfattn_ext.bench import derivatives, functions, kv_cache, peak, varlen
from selfattn_ext.bench.accuracy import Truth, truth
from selfattn_ext.bench.cases import Case, Precision, inputs
from selfattn_ext.bench.contenders import OURS, Contender, results, runner
from selfattn_ext.bench.peak import Ceiling, Meter, Reading
from selfattn_ext.bench.timer import Effort, Ratio, Timing, interleave
from selfattn_ext.terminal import Progress, describe


@dataclass(frozen=True)
class Outcome:
    """One contender on one case: a timing and an error, or the reason why there is none."""

    timing: Timing | None
    error: float | None
    reason: str | None = None


#: The outcome of a contender that does not exist for this kind of case.
NOT_ASKED = Outcome(None, None)


@dataclass(frozen=True)
class Row:
    """One case with one number of threads."""

    case: Case
    threads: int
    outcomes: dict[str, Outcome]  # by name of the contender, this package's first
    ceiling: Ceiling | None  # None where the machine cannot run the case
    reading: Timing | None = None  # of the inputs' bytes, in turns with the calls; only for decoding

    def ratio(self, peer: str) -> Ratio | None:
        """Returns the time of a peer over that of this package: above 1 this package is faster.

        It is None if one of the two has not been timed.
        """
        ours, other = (self.outcomes.get(name, NOT_ASKED).timing for name in (OURS.name, peer))
        return None if ours is None or other is None else Ratio.of(other, ours)

    def gflops(self, name: str) -> float | None:
        """Returns the speed of a contender by the case's count of operations."""
        timing = self.outcomes[name].timing
        return None if timing is None else self.case.flops() / timing.median / 1e9

    def read_gbs(self, name: str) -> float | None:
        """Returns the bytes of the inputs over the time of a contender."""
        timing = self.outcomes[name].timing
        return None if timing is None else self.case.bytes_read() / timing.median / 1e9

    def share(self, name: str) -> float | None:
        """Returns the time that the machine needs at least over the time that a contender took."""
        timing = self.outcomes[name].timing
        if timing is None or self.ceiling is None:
            return None
        if self.bound == "read" and self.reading is not None:
            return self.share_of_reading(name)
        return self.ceiling.seconds(self.case.flops(), self.case.bytes_read()) / timing.median

    def share_of_reading(self, name: str) -> float | None:
        """Returns the time of reading the inputs over that of a contender, round by round.

        It is None if the two were not timed in turns.
        """
        timing = self.outcomes[name].timing
        return None if timing is None or self.reading is None else Ratio.of(self.reading, timing).median

    @property
    def bound(self) -> str:
        """Returns what limits the case: an instruction set, or "read"; "" if it cannot run here."""
        return "" if self.ceiling is None else self.ceiling.bound(self.case.flops(), self.case.bytes_read())


def contenders_for(case: Case, peers: Sequence[Contender]) -> Sequence[Contender]:
    """Returns the contenders of a case: this package and the peers, or those that its kind defines."""
    return _OF_KINDS.get(type(case), [OURS, *peers])


def reads_memory(case: Case) -> bool:
    """Tells whether a case decodes from keys and values too large for the processor's caches.

    Its time is then compared with that of reading them.
    """
    return case.length == 1 and case.bytes_read() >= peak.READ_BYTES / 4


_OF_KINDS: dict[type[Case], Sequence[Contender]] = {
    varlen.VarlenCase: varlen.CONTENDERS,
    kv_cache.CacheCase: kv_cache.CONTENDERS,
    functions.FunctionCase: functions.CONTENDERS,
    derivatives.DerivativeCase: derivatives.CONTENDERS,
}


class Session:
    """Measures rows, and keeps what they share: exact results and peaks."""

    def __init__(self, peers: Sequence[Contender], effort: Effort) -> None:
        self._peers = peers
        self._effort = effort
        self._exact: dict[Case, Truth | None] = {}
        self.meter = Meter(min(0.2, effort.seconds / 3))

    def row(self, case: Case, threads: int) -> Row:
        """Measures one case, every contender in turns."""
        if case.isa and case.isa not in backends.cpu_isas():
            reason = f"this machine cannot run the instruction set {case.isa}"
            contenders = contenders_for(case, self._peers)
            refused = {contender.name: Outcome(None, None, reason) for contender in contenders}
            return Row(case, threads, refused, None)
        forced = backends.use_cpu_isa(case.isa) if case.isa else nullcontext()
        with forced, _state(threads, case.precision):
            return self._row(case, threads)

    def _row(self, case: Case, threads: int) -> Row:
        tensors = inputs(case)
        isa = backends.explain(tensors.query, tensors.key, tensors.value, enable_gqa=True).isa
        ceiling = self.meter.ceiling(isa, case.dtype, case.precision)
        judge = self._truth(case)
        outcomes: dict[str, Outcome] = {}
        calls = {}
        for contender in contenders_for(case, self._peers):
            try:
                own = contender.form(case, tensors)
                call = contender.prepare(case, own)
                found = [contender.padded(case, result) for result in results(call, case, own)]
                calls[contender.name] = runner(call, case, own)
            except NotImplementedError as refusal:
                outcomes[contender.name] = Outcome(None, None, describe(refusal))
                continue
            outcomes[contender.name] = Outcome(None, None if judge is None else judge.error(case, found))
        reading = Reading(case.bytes_read()) if reads_memory(case) else None
        timings = interleave(calls if reading is None else {**calls, "": reading}, self._effort)
        outcomes |= {name: replace(outcomes[name], timing=timings[name]) for name in calls}
        if reading is None:
            return Row(case, threads, outcomes, ceiling)
        read = reading.timing(timings[""])
        ceiling = replace(ceiling, read_gbs=case.bytes_read() / read.median / 1e9)
        return Row(case, threads, outcomes, ceiling, read)

    def _truth(self, case: Case) -> Truth | None:
        plain = replace(case, graph_kept=False, precision="highest", isa="")
        # The truth with a backward pass begins with the truth without one, so it serves both.
        for key in (replace(plain, backward=True), plain):
            if key in self._exact:
                return self._exact[key]
        self._exact[plain] = truth(plain, inputs(plain))
        return self._exact[plain]


def measure(
    cases: Sequence[Case], peers: Sequence[Contender], threads: Sequence[int], effort: Effort
) -> list[Row]:
    """Measures a row for each number of threads and case, with a progress bar on stderr."""
    session = Session(peers, effort)
    rows = []
    with Progress("measuring", len(threads) * len(cases)) as progress:
        for count in threads:
            for case in cases:
                rows.append(session.row(case, count))
                progress.update(len(rows), note(case))
    return rows


def note(case: Case) -> str:
    """Returns a case in a few words, for the progress bar."""
    return " ".join(filter(None, (case.dtype_name, str(case.shape), case.options(), case.direction)))


@contextmanager
def _state(threads: int, precision: Precision) -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
