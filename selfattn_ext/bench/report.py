"""Rows of measurements as a table for people and as plain data for programs."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from typing import Any

from selfattn_ext import info
from selfattn_ext.bench.cases import as_json
from selfattn_ext.bench.contenders import OURS
from selfattn_ext.bench.measure import Outcome, Row
from selfattn_ext.terminal import table

#: Raised whenever a field of the JSON changes its meaning or goes away.
SCHEMA = 1


def text(rows: Sequence[Row]) -> str:
    """The table, what its columns are, and the median ratios."""
    peers = _peers(rows)
    header = ["threads", "dtype", "(B, H, T, D)", "options", "pass"]
    header += [f"{name} ms" for name in (*peers, "our")]
    header += [f"{name} / ours" for name in peers]
    header += ["of matmul", *(f"{name} error" for name in (*peers, "our"))]
    lines = [_cells(row, peers) for row in rows]
    parts = [table(header, lines, left=5)]
    parts.append(
        "ms: median of interleaved runs; f+b is forward and backward.\n"
        "/ ours: median over the rounds of peer time / our time; above 1 we are faster.\n"
        "of matmul: our speed over that of a large torch.mm of the same dtype, threads and run.\n"
        "error: against float64, relative to the largest value, the worst of output and gradients."
    )
    parts.append("\n".join([*_refusals(rows), *(_summary(rows, peer) for peer in peers)]))
    return "\n\n".join(part for part in parts if part)


def _peers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.outcomes if name != OURS.name))


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    names = [*peers, OURS.name]
    ratios = [row.ratio(peer) for peer in peers]
    speed = row.gflops(OURS.name)
    return [
        str(row.threads),
        row.case.dtype_name,
        str(row.case.shape),
        row.case.options(),
        "f+b" if row.case.backward else "forward",
        *(_milliseconds(row.outcomes[name]) for name in names),
        *("-" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios),
        "-" if speed is None else f"{speed / row.matmul_gflops:.0%}",
        *(_error(row.outcomes[name]) for name in names),
    ]


def _milliseconds(outcome: Outcome) -> str:
    return "-" if outcome.timing is None else f"{outcome.timing.median * 1e3:.3f}"


def _error(outcome: Outcome) -> str:
    return "-" if outcome.error is None else f"{outcome.error:.1e}"


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Why a peer has no time, once for each reason."""
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
    return (
        f"{peer} / ours: median {middle:.2f} of {len(found)} rows, over 1 in {sum(r > 1 for r, _ in found)}; "
        f"lowest {lowest:.2f} ({where}, {row.threads} threads)"
    )


def data(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Everything as plain data: machine, versions, and for each row all that was measured."""
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": info.facts(),
        "rows": [_row_data(row) for row in rows],
    }


def dump(rows: Sequence[Row], command: str) -> str:
    """``data`` as JSON text."""
    return json.dumps(data(rows, command), indent=1) + "\n"


def _row_data(row: Row) -> dict[str, Any]:
    ratios = {peer: row.ratio(peer) for peer in row.outcomes if peer != OURS.name}
    return {
        **as_json(row.case),
        "threads": row.threads,
        "flops": row.case.flops(),
        "matmul_gflops": row.matmul_gflops,
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
        "median_seconds": None if timing is None else timing.median,
        "quartile_seconds": None if timing is None else timing.quartiles,
        "rounds": 0 if timing is None else len(timing.samples),
        "gflops": row.gflops(name),
        "error": outcome.error,
        "refused": outcome.reason,
    }
