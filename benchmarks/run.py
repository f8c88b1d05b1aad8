"""The full benchmark: more cases and more peers than ``python -m selfattn_ext bench``, and a picture.

    python benchmarks/run.py --classes                       the cases that have a target and a goal
    python benchmarks/run.py --classes --only varlen         some of them
    python benchmarks/run.py                                 every table, against torch
    python benchmarks/run.py --tables lengths --png t.png    ratios over the sequence length, drawn
    python benchmarks/run.py --tables tiny --peers torch,formula,loops --threads 1

Run it on an otherwise idle machine. tables.py holds the cases, classes.py those with targets and goals,
peers/ the peers; selfattn_ext/bench/ does timing, errors and printing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import class_table
import classes
from peers import PEERS
from tables import TABLES

from selfattn_ext import bench
from selfattn_ext.bench import report, timer
from selfattn_ext.bench.contenders import Contender
from selfattn_ext.bench.measure import Row, measure
from selfattn_ext.commands.cli import parse_threads
from selfattn_ext.terminal import PICTURE_FORMATS, CommandError, check_output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--classes", action="store_true", help="the classes that have a target and a goal, instead of tables"
    )
    chosen.add_argument(
        "--tables",
        type=_names(TABLES),
        default=list(TABLES),
        metavar="NAME,NAME",
        help=f"the tables, of {', '.join(TABLES)} (default: all)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="only classes whose names contain this, without the extra memory"
    )
    parser.add_argument(
        "--peers",
        type=_names(PEERS),
        default=["torch"],
        metavar="NAME,NAME",
        help=f"the peers to compare with, of {', '.join(PEERS)} (default: torch)",
    )
    parser.add_argument(
        "--threads", type=parse_threads, metavar="N,N", help="numbers of threads (default: 1 and all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="short runs of fewer cases (in tables, those up to 20 GFLOP)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results here; - is standard output")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the ratios over the sequence length (classes, or table lengths)",
    )
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except (CommandError, ImportError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else 1


def _run(parsed: argparse.Namespace) -> int:
    bench.check_json(parsed.json)
    if parsed.only is not None and not (parsed.classes and classes.lines(parsed.quick, parsed.only)):
        names = ", ".join(dict.fromkeys(line.name for line in classes.lines(parsed.quick)))
        raise CommandError(f"--only {parsed.only} needs --classes; the classes are {names}")
    if parsed.png is not None:
        import picture

        check_output("--png", parsed.png, PICTURE_FORMATS)
        if not parsed.classes and "lengths" not in parsed.tables:
            raise CommandError("--png draws the table lengths, which --tables leaves out")
    bench.warn_if_busy()
    command = " ".join(["benchmarks/run.py", *sys.argv[1:]])
    rows = _classes(parsed, command) if parsed.classes else _tables(parsed, command)
    if parsed.png is not None:
        peer = "torch" if parsed.classes else parsed.peers[0]
        message = f"ratios over the sequence length: {picture.draw(rows, peer, parsed.png)}"
        print(message, file=sys.stderr if parsed.json == "-" else sys.stdout)
    return 0


def _tables(parsed: argparse.Namespace, command: str) -> list[Row]:
    cases = list(dict.fromkeys(case for name in parsed.tables for case in TABLES[name]()))
    if parsed.quick:
        cases = [case for case in cases if case.flops() <= 20e9]
    rows = measure(cases, _peers(parsed), bench.thread_counts(parsed.threads), _effort(parsed))
    bench.publish(rows, parsed.json, command)
    return rows


def _classes(parsed: argparse.Namespace, command: str) -> list[Row]:
    results = class_table.measure_classes(
        classes.lines(parsed.quick, parsed.only or ""),
        classes.memory_cases(parsed.quick) if parsed.only is None else [],
        _peers(parsed),
        bench.thread_counts(parsed.threads),
        _effort(parsed),
    )
    bench.emit(class_table.text(results), report.dump(class_table.data(results, command)), parsed.json)
    return [measured.row for measured in results.measured]


def _peers(parsed: argparse.Namespace) -> list[Contender]:
    return [PEERS[name] for name in parsed.peers]


def _effort(parsed: argparse.Namespace) -> timer.Effort:
    return timer.QUICK if parsed.quick else timer.FULL


def _names(known: dict[str, object]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there is {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


if __name__ == "__main__":
    sys.exit(main())
