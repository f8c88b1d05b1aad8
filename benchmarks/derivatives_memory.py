"""Memory of forward mode and second derivatives: ours measured, the formula's computed.

    python benchmarks/derivatives_memory.py                         # 16384 tokens
    python benchmarks/derivatives_memory.py --length 4096 --at 1024

The formula's matrices would not fit into memory, so it is measured at the length --at, and scaled with the
square of the length. Each figure comes from a process of its own and excludes inputs and direction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from selfattn_ext.bench import derivatives, memory
from selfattn_ext.bench.cases import inputs
from selfattn_ext.bench.contenders import OURS
from selfattn_ext.bench.derivatives import DerivativeCase
from selfattn_ext.terminal import table


def extra_bytes(name: str, case: DerivativeCase, threads: int) -> int:
    """Returns this process's peak memory beyond inputs and direction while a contender computes a case once.

    In second order this includes both passes before it. A call of a few queries before it loads what is
    loaded only once.
    """
    torch.set_num_threads(threads)
    (contender,) = (each for each in derivatives.CONTENDERS if each.name == name)
    small = replace(case, length=64)
    contender.prepare(small, inputs(small))()
    tensors = inputs(case)
    _, grown = memory.growth(lambda: contender.prepare(case, tensors)())
    return max(0, grown - sum(each.nbytes for each in (tensors.query, tensors.key, tensors.value)))


def rows(length: int, at: int, threads: int) -> list[tuple[DerivativeCase, int, float]]:
    """Returns cases with the bytes of this package, and those of the formula, scaled from length ``at``."""
    found = []
    orders: tuple[derivatives.Order, ...] = ("jvp", "second order")
    for dtype in (torch.float32, torch.bfloat16):
        for order in orders:
            case = DerivativeCase(1, 8, length, 64, dtype=dtype, order=order)
            ours = memory.alone(extra_bytes, OURS.name, case, threads)
            shorter = replace(case, length=at)
            formula = memory.alone(extra_bytes, derivatives.FORMULA.name, shorter, threads)
            found.append((case, ours, formula * (length / at) ** 2))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--at", type=int, default=2048, help="the length at which the formula is measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(arguments)
    if not memory.available():
        print(f"{parser.prog}: error: this system reports no peak that can be reset", file=sys.stderr)
        return 1
    header = [
        "(B, H, T, D)",
        "dtype",
        "pass",
        "our MB, measured",
        f"formula GB, computed from T = {given.at}",
    ]
    cells = [
        [str(case.shape), case.dtype_name, case.direction, f"{ours / 1e6:.1f}", f"{formula / 1e9:.2f}"]
        for case, ours, formula in rows(given.length, given.at, given.threads)
    ]
    print(table(header, cells, left=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
