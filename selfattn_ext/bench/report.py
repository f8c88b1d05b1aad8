"""Reports of measurements: a table for people, plain data for programs."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from selfattn_ext import info
from selfattn_ext.bench.cases import as_json
from selfattn_ext.bench.contenders import OURS
from selfattn_ext.bench.measure import NOT_ASKED, Row
from selfattn_ext.bench.timer import Timing
from selfattn_ext.terminal import table

#: Raised whenever a field of the JSON changes its meaning or goes away.
SCHEMA = 3

_LEGEND = (
    "ms: median of interleaved runs; f+b is forward and backward.\n"
    "/ ours: median over the rounds of peer time / our time; above 1 we are faster.\n"
    "our speed: operations of the products, or bytes of query, key and value where reading limits.\n"
    "of peak: the time that the machine needs at least over ours. It is limited by the multiply-adds\n"
    'of the named instruction set, or, where "read" is named, by reading memory, both as measured in\n'
    "this run.\n"
)
_LEGEND_OF_READING = (
    "read, of read: the bandwidth of reading alone, in turns with the calls, and our share of it.\n"
)
_LEGEND_OF_ERRORS = (
    "error: against float64, relative to the largest value, the worst of output and gradients."
)


def text(rows: Sequence[Row]) -> str:
    """Returns a table for each number of threads and dtype, a legend of the columns, and the median ratios.

    With one peer the lines have at most 100 columns.
    """
    peers = peer_names(rows)
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.threads, row.case.dtype_name), []).append(row)
    parts = [*(_table(found, peers, any_reads(rows)) for found in groups.values()), legend(rows)]
    parts.append("\n".join([*refusals(rows), *(_summary(rows, peer) for peer in peers)]))
    return "\n\n".join(part for part in parts if part)


def _table(rows: Sequence[Row], peers: Sequence[str], reads: bool) -> str:
    """Returns the table of rows with the same number of threads and dtype, under a line that names both."""
    limit = next((row.ceiling.isa for row in rows if row.ceiling is not None), "")
    header = ["(B, H, T, D)", "options", "pass", *headings(peers, reads)]
    lines = [
        [str(row.case.shape), row.case.options(), short_direction(row), *cells(row, peers, reads, limit)]
        for row in rows
    ]
    title = f"{rows[0].case.dtype_name}, {_threads(rows[0])}" + (f", peak of {limit}" if limit else "")
    return f"{title}\n\n{table(header, lines, left=3)}"


def _threads(row: Row) -> str:
    return f"{row.threads} {'thread' if row.threads == 1 else 'threads'}"


def peer_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of all contenders but this package."""
    return list(dict.fromkeys(name for row in rows for name in row.outcomes if name != OURS.name))


def short_direction(row: Row) -> str:
    """Returns "forward", "backward", or "f+b" for both."""
    return row.case.direction.replace("forward+backward", "f+b")


def any_reads(rows: Sequence[Row]) -> bool:
    """Tells whether a table of these rows has columns of reading."""
    return any(row.reading is not None for row in rows)


def legend(rows: Sequence[Row]) -> str:
    """Returns the explanation of the columns."""
    return _LEGEND + (_LEGEND_OF_READING if any_reads(rows) else "") + _LEGEND_OF_ERRORS


def headings(peers: Sequence[str], reads: bool) -> list[str]:
    """Returns the headings of the columns of :func:`cells`."""
    names = [*peers, "our"]
    return [
        *(f"{name}\nms" for name in names),
        *(f"{name}\n/ ours" for name in peers),
        "our\nspeed",
        *(["read", "of\nread"] if reads else []),
        "of\npeak",
        *(f"{name}\nerror" for name in names),
    ]


def cells(row: Row, peers: Sequence[str], reads: bool, limit: str = "") -> list[str]:
    """Returns a row's measurements: times, ratios, our share of reading and of the peak, errors.

    Args:
        row: the measurements.
        peers: the names of those that it is compared with.
        reads: whether there are columns of reading.
        limit: what bounds the call if nothing else is named beside its share of the peak.
    """
    outcomes = [row.outcomes.get(name, NOT_ASKED) for name in (*peers, OURS.name)]
    ratios = [row.ratio(peer) for peer in peers]
    share = row.share(OURS.name)
    return [
        *("-" if outcome.timing is None else f"{outcome.timing.median * 1e3:.3f}" for outcome in outcomes),
        *("-" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios),
        _speed(row),
        *(_reading(row) if reads else []),
        "-" if share is None else f"{share:.0%}" + (f" {row.bound}" if row.bound != limit else ""),
        *("-" if outcome.error is None else f"{outcome.error:.1e}" for outcome in outcomes),
    ]


def _speed(row: Row) -> str:
    read, computed = row.read_gbs(OURS.name), row.gflops(OURS.name)
    if read is None or computed is None:
        return "-"
    by_bytes = row.reading is not None or row.bound == "read"
    return f"{read:.1f} GB/s" if by_bytes else f"{computed:.0f} GF/s"


def _reading(row: Row) -> list[str]:
    share = row.share_of_reading(OURS.name)
    if share is None or row.ceiling is None:
        return ["-", "-"]
    return [f"{row.ceiling.read_gbs:.1f} GB/s", f"{share:.0%}"]


def refusals(rows: Sequence[Row]) -> list[str]:
    """Returns the reasons why peers have no time, each reason once."""
    reasons = {
        f"{name}: {outcome.reason}"
        for row in rows
        for name, outcome in row.outcomes.items()
        if outcome.reason
    }
    return sorted(reasons)


def _summary(rows: Sequence[Row], peer: str) -> str:
    found = [(ratio.median, row) for row in rows if (ratio := row.ratio(peer)) is not None]
    if not found:
        return f"{peer}: nothing to compare"
    lowest, row = min(found, key=lambda pair: pair[0])
    middle = statistics.median(ratio for ratio, _ in found)
    where = f"{row.case.dtype_name} {row.case.shape} {row.case.options()} {row.case.direction}".replace(
        "  ", " "
    )
    faster = sum(ratio > 1 for ratio, _ in found)
    return (
        f"{peer} / ours: median {middle:.2f} of {len(found)} rows, over 1 in {faster};\n"
        f"  lowest {lowest:.2f} ({where}, {_threads(row)})"
    )


def head(command: str) -> dict[str, Any]:
    """Returns the beginning of every command's JSON."""
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": info.facts(),
    }


def data(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Returns everything as plain data: machine, versions, and all measurements of each row."""
    return {**head(command), "rows": [row_data(row) for row in rows]}


def dump(found: dict[str, Any]) -> str:
    """Returns plain data as JSON text."""
    return json.dumps(found, indent=1) + "\n"


def row_data(row: Row) -> dict[str, Any]:
    """Returns one row as plain data."""
    ratios = {peer: row.ratio(peer) for peer in row.outcomes if peer != OURS.name}
    return {
        **as_json(row.case),
        "threads": row.threads,
        "flops": row.case.flops(),
        "bytes_read": row.case.bytes_read(),
        "peak": None if row.ceiling is None else asdict(row.ceiling),
        "bound": row.bound,
        "reading": None if row.reading is None else _timing_data(row.reading),
        "contenders": {name: _outcome_data(row, name) for name in row.outcomes},
        "ratios": {
            peer: None if ratio is None else {"median": ratio.median, "quartiles": ratio.quartiles}
            for peer, ratio in ratios.items()
        },
    }


def _outcome_data(row: Row, name: str) -> dict[str, Any]:
    outcome = row.outcomes[name]
    timing = outcome.timing
    return {
        **_timing_data(timing),
        "gflops": row.gflops(name),
        "read_gbs": row.read_gbs(name),
        "of_peak": row.share(name),
        "of_read": row.share_of_reading(name),
        "error": outcome.error,
        "refused": outcome.reason,
    }


def _timing_data(timing: Timing | None) -> dict[str, Any]:
    return {
        "median_seconds": None if timing is None else timing.median,
        "quartile_seconds": None if timing is None else timing.quartiles,
        "rounds": 0 if timing is None else len(timing.samples),
    }
