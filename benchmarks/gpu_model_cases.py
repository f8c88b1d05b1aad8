"""The calls of gpu_model.py, and the smaller calls that the PTX machine counts for each.

Run as a program, it makes these calls; gpu_model_counts.py runs it with a torch whose GPU is the PTX machine.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from selfattn_ext import backends
from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import TORCH, runner
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.measure import contenders_for, note
from selfattn_ext.bench.varlen import VarlenCase, draw_lengths
from selfattn_ext.terminal import Progress

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

#: Lengths at which calls are counted if their own length would take the machine minutes. Counts of whole
#: tiles are polynomials of the second degree in the length, which CHECKED_LENGTH verifies.
LENGTHS = (512, 1024, 1536)
CHECKED_LENGTH = 2048
#: kv heads at which they are counted. A count is linear in the heads: a number per head, and a constant for
#: what all heads share, such as the sectors of a mask. CHECKED_HEADS heads, or batch elements, verify that.
HEADS = (1, 2)
CHECKED_HEADS = 3
#: For one query, a block that joins splits has this many heads, so fewer heads would make one block, too.
HEADS_OF_ONE_QUERY = 4


@dataclass(frozen=True)
class Run:
    """A smaller call: its length (queries and keys), and its kv heads over the whole batch."""

    length: int
    heads: int

    def __str__(self) -> str:
        return f"{self.length}x{self.heads}"


@dataclass(frozen=True)
class Shape:
    """A call and the kernel to force; `extrapolated` if its counts follow from those of LENGTHS."""

    case: Case
    kernel: str = ""
    extrapolated: bool = True

    @property
    def heads(self) -> int:
        """kv heads over the whole batch, or in one batch element if elements differ in length."""
        return self.case.kv_head_count * (1 if self.has_lengths else self.case.batch)

    @property
    def has_lengths(self) -> bool:
        return isinstance(self.case, (VarlenCase, CacheCase))

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS if self.extrapolated else (self.case.length,)

    @property
    def few_heads(self) -> tuple[int, ...]:
        """HEADS, then CHECKED_HEADS, all times HEADS_OF_ONE_QUERY for one query."""
        times = HEADS_OF_ONE_QUERY if self.case.length == 1 else 1
        return tuple(times * heads for heads in (*HEADS, CHECKED_HEADS))

    def counted(self) -> list[Run]:
        """Returns the runs that the call's counts are derived from."""
        return [Run(length, heads) for length in self.lengths for heads in self.few_heads[:-1]]

    def checked(self) -> list[Run]:
        """Returns the runs that verify the derivation."""
        other = [Run(CHECKED_LENGTH, HEADS[0])] if self.extrapolated else []
        return [*other, Run(self.lengths[0], self.few_heads[-1])]

    def call(self, run: Run) -> Case:
        """Returns the case of a run. CHECKED_HEADS become batch elements if all have the same length."""
        as_batch = run.heads == self.few_heads[-1] and not self.has_lengths
        kv_heads = 1 if as_batch else run.heads
        return replace(
            self.case,
            length=run.length,
            batch=self.case.batch if self.has_lengths else run.heads if as_batch else 1,
            heads=kv_heads * self.case.heads // self.case.kv_head_count,
            kv_heads=None if self.case.kv_heads is None else kv_heads,
        )


def _case(length: int, head_dim: int, dtype: torch.dtype = BF16) -> Case:
    """Returns a case as in gpu_cases.py, of 16384 tokens and a width of 2048."""
    return Case(16384 // length, 2048 // head_dim, length, head_dim, dtype=dtype)


def shapes() -> list[Shape]:
    """Returns lines of gpu_cases.py; in those of training, kernels tell the passes apart."""
    training = [
        Shape(replace(_case(length, head_dim), causal=causal, backward=True))
        for length in (2048, 8192)
        for head_dim in (64, 128)
        for causal in ((False, True) if length == 8192 else (False,))
    ]
    lengths = draw_lengths(16, 16, 1024)
    return [
        *training,
        Shape(replace(_case(2048, 64), mask="bool")),
        Shape(replace(_case(2048, 128), dropout=0.1)),
        Shape(_case(2048, 64, FP32)),
        Shape(replace(_case(2048, 64, FP32), backward=True), "simt"),
        Shape(_case(2048, 64, FP64)),
        Shape(Case(8, 16, 1, 128, dtype=BF16, keys=8192), extrapolated=False),
        Shape(Case(32, 32, 1, 128, dtype=BF16, keys=8192, kv_heads=8), extrapolated=False),
        Shape(
            VarlenCase.of(lengths, 16, 128, dtype=BF16, causal=True, backward=True),
            extrapolated=False,
        ),
        Shape(
            CacheCase.of((8192,) * 8, 32, 128, dtype=BF16, kv_heads=8, page_size=64, layout="blhd"),
            extrapolated=False,
        ),
    ]


def call(case: Case, kernel: str) -> None:
    """Makes this package's call of a case, as the benchmarks do."""
    tensors = inputs(case, device="cuda")
    ours = contenders_for(case, [TORCH])[0]
    own = ours.form(case, tensors)
    with backends.use(kernel) if kernel else nullcontext():
        runner(ours.prepare(case, own), case, own)()
    torch.cuda.synchronize()


def main(numbers: list[str]) -> None:
    """Calls the shapes of these numbers, and writes a line before each call into the file of counts."""
    file = Path(os.environ["SELFATTN_PTX_COUNTS"])
    chosen = {int(number): shapes()[int(number)] for number in numbers}
    runs = [(number, run) for number, shape in chosen.items() for run in (*shape.counted(), *shape.checked())]
    with Progress("counting", len(runs)) as progress:
        for done, (number, run) in enumerate(runs):
            case = chosen[number].call(run)
            progress.update(done, note(case))
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"shape": number, "run": str(run)}) + "\n")
            with torch.set_grad_enabled(case.backward):
                call(case, chosen[number].kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
