"""The cost of the statistics that attention returns beside its output (return_aux), as shares of a forward.

    python benchmarks/statistics_cost.py                    # ten shapes in float32 and bfloat16, one thread
    python benchmarks/statistics_cost.py --quick --dtypes float32

It times the operators, without the Python code around them. "rows" is the time of the forward that also gives
log-sum-exp, largest score, entropy and mean score, over that of the forward alone. "keys" is the time of the
additional pass that sums up the weights of each key, over that of the same forward. All three are called in
turns; the figures are medians over the rounds, and quartiles stand beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfattn_ext import ops
from selfattn_ext.bench.timer import FULL, QUICK, Effort, Ratio, interleave
from selfattn_ext.terminal import table


class Shape(NamedTuple):
    """Queries (batch, heads, queries, head_dim) on keys and values (batch, kv_heads, keys, head_dim)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Draws query, key and value."""
        generator = torch.Generator().manual_seed(0)

        def drawn(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return torch.randn(shape, generator=generator).to(dtype)

        key, value = (drawn(self.kv_heads, self.keys) for _ in range(2))
        return drawn(self.heads, self.queries), key, value


SHAPES = [
    Shape(1, 8, 8, 2048, 2048, 64),
    Shape(1, 8, 8, 2048, 2048, 128),
    Shape(1, 8, 8, 512, 512, 64),
    Shape(1, 4, 4, 2048, 2048, 16),
    Shape(4, 12, 12, 64, 64, 64),
    Shape(2, 8, 8, 17, 1024, 64),
    Shape(4, 8, 8, 4, 2048, 64),
    # Decoding: a query for each sequence.
    Shape(8, 8, 8, 1, 4096, 128),
    Shape(1, 32, 8, 1, 16384, 128),
    Shape(32, 4, 4, 1, 256, 64),
]


def calls_of(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns what is timed, by name; keyword arguments that the operators have are at their defaults."""
    query, key, value = shape.inputs(dtype)
    scale = shape.head_dim**-0.5
    _, row_max, row_sum, _ = ops.attention_forward(query, key, value, scale)
    return {
        "forward": lambda: ops.attention_forward(query, key, value, scale),
        "rows": lambda: ops.attention_statistics(query, key, value, scale),
        "keys": lambda: ops.attention_weight_sums(query, key, row_max, row_sum, scale),
    }


def line(shape: Shape, dtype: torch.dtype, effort: Effort) -> list[str]:
    """Measures a shape, and returns its cells."""
    times = interleave(calls_of(shape, dtype), effort)
    cells = [*map(str, shape), str(dtype).removeprefix("torch."), f"{times['forward'].median * 1e3:.3f}"]
    for name in ("rows", "keys"):
        ratio = Ratio.of(times[name], times["forward"])
        low, high = ratio.quartiles
        cells += [f"{ratio.median:.2f}", f"{low:.2f} to {high:.2f}"]
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of torch, by name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few rounds of each shape")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    effort = QUICK if given.quick else FULL
    dtypes = [getattr(torch, name) for name in given.dtypes]
    with torch.inference_mode():
        rows = [line(shape, dtype, effort) for shape in SHAPES for dtype in dtypes]
    header = ["B", "heads", "kv", "L", "S", "D", "dtype", "forward ms", "rows", "", "keys", ""]
    print(table(header, rows, left=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
