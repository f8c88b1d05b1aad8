"""The command line: ``python -m selfattn_ext demo | info | check | bench | heatmap``.

This module handles only arguments. Each subcommand has a module of its own, which is imported on use.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from selfattn_ext.terminal import CommandError, quiet

PROGRAM = "python -m selfattn_ext"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; ``arguments`` are those of the process by default.

    Returns:
        The exit code: 0; 1 if the command found something wrong or this machine lacks something that it
        needs; 130 after Ctrl-C. Mistakes in the arguments end the process with 2, as argparse does.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without Unicode gets question marks, not a traceback
    parsed = _parser().parse_args(arguments)
    try:
        with quiet(getattr(parsed, "quiet", False)):
            code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (CommandError, ImportError) as error:
        print(f"{PROGRAM} {parsed.command}: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python's flush at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Exact attention for PyTorch: demo, self-test, benchmarks."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_info(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_heatmap(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small transformer with this package's attention and with torch's",
        description="Trains three copies of a small character-level transformer in turns, with this "
        "package's attention, torch's fused attention and the formula; compares losses and speed, samples "
        "text, draws a heatmap of the attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="train on this text file (UTF-8)"
    )
    parser.add_argument(
        "--steps", type=_positive_int, default=400, help="optimizer steps of each of the three copies"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="the seed of weights, batches and sampling")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("demo_attention.png"), help="the heatmap"
    )
    parser.add_argument(
        "--max-seconds",
        type=_positive_float,
        default=60.0,
        help="limit for everything after torch is imported: the training of all three copies, the "
        "comparison, the sample and the picture. A slow machine trains fewer steps and samples less text; "
        "one step of each copy, the comparison and the picture are always made, however long they take",
    )
    _add_quiet(parser)
    parser.set_defaults(run=_run_demo)


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress, only results")


def _run_demo(parsed: argparse.Namespace) -> int:
    from selfattn_ext import demo

    return demo.run(
        demo.Options(
            text=getattr(parsed, "text", None),
            steps=parsed.steps,
            seed=parsed.seed,
            device=parsed.device,
            out=parsed.out,
            max_seconds=parsed.max_seconds,
        )
    )


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "print versions, CPU features, kernels and which kernel is chosen"
    parser = commands.add_parser("info", help=text, description=text.capitalize() + ".")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    parser.set_defaults(run=_run_info)


def _run_info(parsed: argparse.Namespace) -> int:
    from selfattn_ext import info

    return info.run(as_json=parsed.json)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="test every kernel on this machine against the formula",
        description="Runs every kernel for the CPU and for a GPU, with every instruction set and dtype, "
        "forward and backward, with a few combinations of options, and compares the results with the formula "
        "in float64. The exit code is 1 if any result is wrong.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=_seed, default=0, help="the seed of the inputs")
    _add_quiet(parser)
    parser.set_defaults(run=_run_check)


def _run_check(parsed: argparse.Namespace) -> int:
    from selfattn_ext.commands import check

    return check.run(parsed.seed)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="print the table of speed ratios against torch",
        description="Times this package and torch's scaled_dot_product_attention in turns, forward and "
        "forward+backward, and prints the ratio of the times (above 1: this package is faster), the share of "
        "the machine's peak as measured in the same run, and the error of each against float64.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--threads",
        type=parse_threads,
        metavar="N,N",
        default=argparse.SUPPRESS,
        help="numbers of threads, one table each (default: 1 and all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the two small shapes and short runs, about 20 seconds"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="also write the results to this file; - is standard output",
    )
    _add_quiet(parser)
    parser.set_defaults(run=_run_bench)


def _run_bench(parsed: argparse.Namespace) -> int:
    from selfattn_ext import bench

    return bench.run(
        bench.Options(
            threads=getattr(parsed, "threads", None), quick=parsed.quick, json=getattr(parsed, "json", None)
        )
    )


def _add_heatmap(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "heatmap",
        help="draw saved attention weights, or an example",
        description="Draws attention weights of shape (L, S), (heads, L, S) or (layers, heads, L, S) from a "
        "file of torch.save or numpy.save. Without a file: a small example.",
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help=".pt, .pth or .npy")
    parser.add_argument("--tokens", type=str.split, metavar='"A B C"', help="labels, separated by spaces")
    parser.add_argument("--layer", type=int, help="draw this layer only")
    parser.add_argument("--head", type=int, help="draw this head only")
    parser.add_argument("--title", help="written above the picture")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("attention.png"),
        help="the picture (default: %(default)s)",
    )
    parser.set_defaults(run=_run_heatmap)


def _run_heatmap(parsed: argparse.Namespace) -> int:
    from selfattn_ext.commands import heatmap

    return heatmap.run(
        heatmap.Options(
            file=parsed.file,
            tokens=parsed.tokens,
            layer=parsed.layer,
            head=parsed.head,
            title=parsed.title,
            out=parsed.out,
        )
    )


def _positive_int(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _seed(text: str) -> int:
    # torch.manual_seed takes this range without wrapping.
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def parse_threads(text: str) -> tuple[int, ...]:
    """Parses "1,2" to (1, 2), for argparse."""
    return tuple(dict.fromkeys(_positive_int(part) for part in text.split(",")))
