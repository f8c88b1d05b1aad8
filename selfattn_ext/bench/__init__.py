"""The subcommand ``bench``: this package against torch's scaled_dot_product_attention.

cases describes the calls, contenders the ways to compute them, timer the clock; measure runs them, report
prints. The benchmarks/ folder of a checkout adds more cases and more peers to the same machinery.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from selfattn_ext.bench import cases, report, timer
from selfattn_ext.bench.contenders import TORCH
from selfattn_ext.bench.measure import Row, measure
from selfattn_ext.terminal import CommandError, check_output


@dataclass(frozen=True)
class Options:
    """The options of the command line; see ``python -m selfattn_ext bench --help``."""

    threads: Sequence[int] | None = None  # None: 1, and as many as torch would use
    quick: bool = False
    json: str | None = None  # a file, or - for standard output


_IDLE = 0.7  # processes at work in the last minute, on average


def run(options: Options) -> int:
    """Measures, prints the table, writes the JSON. Returns 0."""
    check_json(options.json)
    warn_if_busy()
    rows = measure(
        cases.standard(cases.QUICK_SHAPES if options.quick else cases.SHAPES),
        [TORCH],
        thread_counts(options.threads),
        timer.QUICK if options.quick else timer.FULL,
    )
    publish(rows, options.json, "bench --quick" if options.quick else "bench")
    return 0


def thread_counts(asked: Sequence[int] | None) -> list[int]:
    """Returns the numbers of threads to measure with.

    Raises:
        CommandError: more threads are asked for than there are processors, which would time the scheduler.
    """
    available = os.cpu_count() or 1
    if asked is None:
        return list(dict.fromkeys([1, torch.get_num_threads()]))
    for count in asked:
        if count > available:
            raise CommandError(f"--threads {count}: this machine has {available} logical processors")
    return list(asked)


def check_json(target: str | None) -> None:
    """Raises CommandError when the JSON cannot be written there."""
    if target not in (None, "-"):
        check_output("--json", Path(str(target)))


def warn_if_busy() -> None:
    """Warns on stderr if other programs use the processors, as they would distort the times."""
    load = os.getloadavg()[0]
    if load > _IDLE:
        print(
            f"this machine is not idle: load average {load:.1f}; times will be of little use", file=sys.stderr
        )


def publish(rows: Sequence[Row], target: str | None, command: str) -> None:
    """Prints the table and writes the JSON."""
    emit(report.text(rows), report.dump(report.data(rows, command)), target)


def emit(text: str, dumped: str, target: str | None) -> None:
    """Prints a text and writes JSON; if the JSON goes to stdout, the text goes to stderr."""
    print(text, file=sys.stderr if target == "-" else sys.stdout, flush=True)
    if target == "-":
        print(dumped, end="")
    elif target is not None:
        path = Path(target).expanduser().absolute()
        try:
            path.write_text(dumped, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--json {target}: cannot be written: {error.strerror or error}") from error
        print(f"\nresults: {path}")
