"""Measurement of the classes of classes.py, printed as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from classes import Line

from selfattn_ext import backends
from selfattn_ext.bench import report
from selfattn_ext.bench.cases import Case, as_json
from selfattn_ext.bench.contenders import OURS, TORCH, Contender
from selfattn_ext.bench.elsewhere import Elsewhere
from selfattn_ext.bench.measure import Row, Session, note
from selfattn_ext.bench.memory import Memory, available, measure_memory
from selfattn_ext.bench.timer import Effort
from selfattn_ext.terminal import Progress, table


@dataclass(frozen=True)
class Measured:
    """A line and its measurement."""

    line: Line
    row: Row

    @property
    def value(self) -> float | None:
        """The number that is compared with target and goal; None if it could not be measured."""
        if self.line.judged == "of read":
            return self.row.share_of_reading(OURS.name)
        ratio = self.row.ratio(self.line.peer)
        if ratio is None:
            return None
        return 1 / ratio.median if self.line.judged == "speed" else ratio.median

    @property
    def verdict(self) -> str:
        """The best that the value reaches, "goal" or "target"; else "MISS", or "-" without a value."""
        if self.value is None:
            return "-"
        if self.value >= self.line.goal:
            return "goal"
        return "target" if self.value >= self.line.target else "MISS"


@dataclass(frozen=True)
class Results:
    """The results of one run."""

    measured: list[Measured]
    memory: list[Memory]
    peaks: list[dict[str, object]]


def measure_classes(
    lines: Sequence[Line],
    memory_cases: Sequence[Case],
    peers: Sequence[Contender],
    threads: Sequence[int],
    effort: Effort,
) -> Results:
    """Measures every line with each number of threads, with a progress bar on stderr.

    torch is always among the contenders, as the ratios compare with it. Neighbouring lines that have the same
    case are measured once.
    """
    peers = [TORCH, *(peer for peer in peers if peer.name != TORCH.name)]
    sessions: dict[tuple[tuple[str, str], ...], Session | Elsewhere] = {}
    here = sessions[()] = Session(peers, effort)
    measured: list[Measured] = []
    memory: list[Memory] = []
    weighed = memory_cases if available() else []
    with Progress("measuring", len(threads) * len(lines) + len(weighed)) as progress:
        try:
            for count in threads:
                for line in lines:
                    if line.environment not in sessions:
                        sessions[line.environment] = Elsewhere(dict(line.environment), peers, effort)
                    row = _same(measured[-1:], line, count)
                    row = row or sessions[line.environment].row(line.case, count)
                    measured.append(Measured(line, row))
                    progress.update(len(measured), note(line.case))
        finally:
            for session in sessions.values():
                if isinstance(session, Elsewhere):
                    session.close()
        for case in weighed:
            memory.append(measure_memory(case, [TORCH], max(threads)))
            progress.update(len(measured) + len(memory), f"memory: {note(case)}")
    return Results(measured, memory, here.meter.measured())


def _same(before: Sequence[Measured], line: Line, threads: int) -> Row | None:
    """Returns the row that a line needs if it has been measured for the line before, else None."""
    for found in before:
        if (found.line.case, found.line.environment, found.row.threads) == (
            line.case,
            line.environment,
            threads,
        ):
            return found.row
    return None


def text(results: Results) -> str:
    """Returns the tables, a legend of their columns, and how many lines reach target and goal."""
    tables: dict[tuple[str, ...], list[Measured]] = {}
    for measured in results.measured:
        tables.setdefault(tuple(report.peer_names([measured.row])), []).append(measured)
    parts = [
        *(_table(peers, found) for peers, found in tables.items()),
        report.legend([measured.row for measured in results.measured]),
        "target, goal, value: torch / ours; over padding: our own call on padded tensors / ours;\n"
        "percentages: of the bandwidth of reading; pages: the speed with pages as a share of that in slots.",
        _peaks(results.peaks),
        _memory(results.memory),
        "\n".join([*report.refusals([found.row for found in results.measured]), _count(results.measured)]),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(peers: Sequence[str], found: Sequence[Measured]) -> str:
    """Returns the table of lines that were compared with the same peers."""
    reads = report.any_reads([measured.row for measured in found])
    header = ["class", "threads", "(B, H, T, D)", "options", "pass", "target", "goal", "value", "reached"]
    headings = report.headings(peers, reads)
    cells = []
    for index, measured in enumerate(found):
        # If several lines share a row, only the first shows it.
        known = index > 0 and found[index - 1].row is measured.row
        cells.append(
            [
                measured.line.name,
                str(measured.row.threads),
                str(measured.row.case.shape),
                measured.row.case.options(),
                report.short_direction(measured.row),
                _limit(measured.line, measured.line.target),
                _limit(measured.line, measured.line.goal),
                "-" if measured.value is None else _limit(measured.line, round(measured.value, 2)),
                measured.verdict,
                *([""] * len(headings) if known else report.cells(measured.row, peers, reads)),
            ]
        )
    return table([*header, *headings], cells, left=5)


def data(results: Results, command: str) -> dict[str, Any]:
    """Returns all results as plain data."""
    return {
        **report.head(command),
        "peaks": results.peaks,
        "lines": [
            {
                "class": measured.line.name,
                "target": measured.line.target,
                "goal": measured.line.goal,
                "judged": measured.line.judged,
                "peer": measured.line.peer,
                "value": measured.value,
                "reached": measured.verdict,
                "environment": dict(measured.line.environment),
                **report.row_data(measured.row),
            }
            for measured in results.measured
        ],
        "memory": [
            {
                **as_json(memory.case),
                "extra_bytes": memory.extra,
                "extra_bytes_at_twice_the_length": memory.doubled,
                "linear": memory.linear,
            }
            for memory in results.memory
        ],
    }


def _limit(line: Line, value: float) -> str:
    return f"{value:.0%}" if line.judged == "of read" else f"{value:g}"


def _peaks(found: Sequence[dict[str, object]]) -> str:
    cells = [
        [
            str(peak["threads"]),
            str(peak.get("isa", "read")),
            f"{peak['gflops']:.0f} GFLOP/s" if "gflops" in peak else f"{peak['read_gbs']:.1f} GB/s",
        ]
        for peak in found
    ]
    return table(["threads", "peak of", "measured"], cells, left=2)


def _memory(found: Sequence[Memory]) -> str:
    if not found:
        return ""
    header = ["extra memory", "pass", "torch MB", "our MB", "ours, twice the length", "O(L + S)"]
    cells = [
        [
            f"{memory.case.shape} {memory.case.options()}",
            memory.case.direction,
            f"{memory.extra[TORCH.name] / 1e6:.1f}",
            f"{memory.extra[OURS.name] / 1e6:.1f}",
            f"{memory.doubled / 1e6:.1f} MB",
            "yes" if memory.linear else "NO",
        ]
        for memory in found
    ]
    return table(header, cells, left=2)


def _count(measured: Sequence[Measured]) -> str:
    verdicts = [found.verdict for found in measured]
    lines = [
        f"{verdicts.count('goal')} of {len(verdicts)} rows reach their goal, "
        f"{verdicts.count('target')} their target, {verdicts.count('MISS')} miss it, "
        f"{verdicts.count('-')} could not be measured"
    ]
    lines += [
        f"  misses: {found.line.name}: {note(found.row.case)}, threads {found.row.threads}: "
        f"{_limit(found.line, round(found.value or 0.0, 2))} of {_limit(found.line, found.line.target)}"
        for found in measured
        if found.verdict == "MISS"
    ]
    if "amx" not in backends.cpu_isas():
        lines.append("This machine has no AMX; targets of lines without an instruction set are set for AMX.")
    return "\n".join(lines)
