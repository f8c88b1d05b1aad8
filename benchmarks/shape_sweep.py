"""Random shapes against torch's scaled_dot_product_attention: no shape should be slower.

    python benchmarks/shape_sweep.py --seed 1 --count 700 --threads 1,2
    python benchmarks/shape_sweep.py --seed 1 --only "few queries"        the kinds whose names contain this
    python benchmarks/shape_sweep.py --again "1,2,1,2048,8 float32 f+b"   a printed line, measured again

The exit status is 1 if the target is missed: at most 1 % of the shapes may have a ratio (torch's time over
ours) under 0.95, and none may have one under 0.85. A ratio under 0.95 is measured again, longer and in a
process of its own, and the second one counts. Run it on an otherwise idle machine. swept_shapes.py draws the
shapes and says which kind they are of.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import swept_shapes
import torch
import torch.nn.functional as F
from swept_shapes import Shape, kind
from torch import Tensor

from selfattn_ext import backends, bench, scaled_dot_product_attention
from selfattn_ext.bench import report, varlen
from selfattn_ext.bench.cases import Inputs, inputs
from selfattn_ext.bench.contenders import OURS, TORCH, runner
from selfattn_ext.bench.elsewhere import in_new_process
from selfattn_ext.bench.timer import Effort, Ratio, interleave
from selfattn_ext.commands.cli import parse_threads
from selfattn_ext.terminal import CommandError, Progress, table

#: A ratio under this is measured again, and at most MOST_UNDER of the shapes may have one.
LIMIT, MOST_UNDER = 0.95, 0.01
#: No shape may have a ratio under this.
NEVER = 0.85
_COUNTED = (1.0, LIMIT, 0.9, NEVER)

IN_THE_SWEEP = Effort(seconds=0.12, min_rounds=3, max_rounds=100_000)
ALONE = Effort(seconds=1.0, min_rounds=7, max_rounds=100_000)


@dataclass(frozen=True)
class Measured:
    """One shape with one number of threads."""

    shape: Shape
    threads: int
    torch_seconds: float
    our_seconds: float
    ratio: float  # torch's time over ours: above 1 we are faster
    quartiles: tuple[float, float]  # of the ratio over the rounds
    rounds: int
    free: bool = False  # drawn freely, and not from a family
    first: float | None = None  # the ratio in the sweep, if it was measured again


def one_call(call: Callable[[], object], repetitions: int) -> float:
    """Times one call, however many are asked for.

    So torch's calls and ours alternate one by one, and each meets the caches as the other leaves them.
    """
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(shape: Shape, threads: int, effort: Effort) -> Measured:
    """Times torch and this package in turns, on ``threads`` threads."""
    torch.set_num_threads(threads)
    with torch.set_grad_enabled(shape.backward):
        timings = interleave(calls(shape), effort, one_call)
    theirs, ours = timings[TORCH.name], timings[OURS.name]
    ratio, rounds = Ratio.of(theirs, ours), len(ours.samples)
    return Measured(shape, threads, theirs.median, ours.median, ratio.median, ratio.quartiles, rounds)


def calls(shape: Shape) -> dict[str, Callable[[], object]]:
    """Returns what is timed, by the contender's name.

    Both get the same tensors and the same keywords: further keywords, at their defaults, would take torch a
    twentieth of a tiny call. Only for packed sequences torch gets a padded batch with a mask, as in the other
    benchmarks.
    """
    case = shape.case()
    drawn = inputs(case)
    if shape.layout == "packed":
        found = {}
        for contender in varlen.CONTENDERS:
            if contender.name in (OURS.name, TORCH.name):
                own = contender.form(case, drawn)
                found[contender.name] = runner(contender.prepare(case, own), case, own)
        return found
    tensors = _jagged(shape, drawn) if shape.layout == "jagged" else _laid_out(shape, drawn)
    options: dict[str, Any] = {"is_causal": shape.causal}
    if shape.mask != "none":
        options["attn_mask"] = _mask(shape)
    if shape.group != 1:
        options["enable_gqa"] = True
    functions: dict[str, Callable[..., Tensor]] = {
        OURS.name: scaled_dot_product_attention,
        TORCH.name: F.scaled_dot_product_attention,
    }
    return {
        name: runner(partial(function, tensors.query, tensors.key, tensors.value, **options), case, tensors)
        for name, function in functions.items()
    }


def _each(tensors: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Changes every tensor, and makes leaves of those that get a gradient."""

    def leaf(tensor: Tensor) -> Tensor:
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    query, key, value = (leaf(tensor) for tensor in (tensors.query, tensors.key, tensors.value))
    return Inputs(query, key, value, leaf(tensors.grad_out), mask=None)


def _laid_out(shape: Shape, tensors: Inputs) -> Inputs:
    if shape.layout == "bhld":
        return tensors
    return _each(tensors, lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))


def _jagged(shape: Shape, tensors: Inputs) -> Inputs:
    """Returns nested tensors (B, H, j, E), which are made once, as a model's layers hand them on."""
    case = shape.case()
    assert isinstance(case, varlen.VarlenCase)
    starts, real = case.starts().long(), case.is_real()
    shortest, longest = min(case.lengths), max(case.lengths)

    def nested(tensor: Tensor) -> Tensor:
        made = torch.nested.nested_tensor_from_jagged(
            tensor.transpose(1, 2)[real], starts, min_seqlen=shortest, max_seqlen=longest
        )
        return made.transpose(1, 2)

    return _each(tensors, nested)


def _mask(shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if shape.mask == "bool":
        return torch.rand(shape.queries, shape.keys, generator=generator) > 0.2
    if shape.mask == "float":
        sizes = 1, shape.heads, shape.queries, shape.keys
        return torch.randn(sizes, generator=generator).to(swept_shapes.DTYPES[shape.dtype])
    seen = torch.ones(shape.batch, 1, 1, shape.keys, dtype=torch.bool)
    seen[..., shape.keys - shape.keys // 4 :] = False
    return seen


def sweep(shapes: Sequence[tuple[Shape, bool]], threads: Sequence[int]) -> list[Measured]:
    """Measures shapes, of which each is told whether it was drawn freely, and those under the limit again."""
    rows = []
    with Progress("measuring", len(threads) * len(shapes)) as progress:
        for count in threads:
            for shape, free in shapes:
                rows.append(replace(measure(shape, count, IN_THE_SWEEP), free=free))
                progress.update(len(rows), str(shape))
    under = [index for index, row in enumerate(rows) if row.ratio < LIMIT]
    with Progress("again", len(under)) as progress:
        for done, index in enumerate(under, 1):
            before = rows[index]
            again = measure_alone(before.shape, before.threads)
            rows[index] = replace(again, free=before.free, first=before.ratio)
            progress.update(done, str(before.shape))
    return rows


def measure_alone(shape: Shape, threads: int) -> Measured:
    """Measures longer, in a process that has computed nothing else."""
    return in_new_process({}, measure, shape, threads, ALONE)


def misses(rows: Sequence[Measured]) -> dict[int, list[str]]:
    """Returns, by the number of threads, which parts of the target are missed."""
    found: dict[int, list[str]] = {}
    for threads in dict.fromkeys(row.threads for row in rows):
        ratios = [row.ratio for row in rows if row.threads == threads]
        under, far = (sum(ratio < bound for ratio in ratios) for bound in (LIMIT, NEVER))
        found[threads] = []
        if under > MOST_UNDER * len(ratios):
            most = f"at most {100 * MOST_UNDER:g} %"
            found[threads].append(f"{under} of {len(ratios)} shapes under {LIMIT} ({most})")
        if far:
            found[threads].append(f"{far} of {len(ratios)} shapes under {NEVER} (none)")
    return found


def text(rows: Sequence[Measured], worst: int) -> str:
    """Returns the tables of each number of threads, and the verdicts."""
    parts, verdicts = [], []
    for threads, missed in misses(rows).items():
        found = sorted((row for row in rows if row.threads == threads), key=lambda row: row.ratio)
        under = ", ".join(f"{sum(row.ratio < bound for row in found)} under {bound:g}" for bound in _COUNTED)
        name = f"{threads} thread{'s' * (threads > 1)}"
        parts.append(f"{name}: {len(found)} shapes, {under}")
        parts += [_by_dtype(found), _by_kind(found), _worst(found[:worst])]
        verdicts.append(f"{name}: the target is {'missed: ' + ', '.join(missed) if missed else 'met'}")
    return "\n\n".join([*parts, "\n".join(verdicts)])


def _by_dtype(rows: Sequence[Measured]) -> str:
    cells = []
    for dtype in swept_shapes.DTYPES:
        ratios = [row.ratio for row in rows if row.shape.dtype == dtype]
        free = [row.ratio for row in rows if row.shape.dtype == dtype and row.free]
        if ratios:
            cells.append([dtype, str(len(ratios)), _median(ratios), str(len(free)), _median(free)])
    return table(["dtype", "shapes", "median", "drawn freely", "median of these"], cells)


def _median(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _by_kind(rows: Sequence[Measured]) -> str:
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(kind(row.shape), []).append(row.ratio)
    cells = []
    for name, ratios in sorted(kinds.items()):
        under = [str(sum(ratio < bound for ratio in ratios) or "") for bound in _COUNTED]
        cells.append([name, str(len(ratios)), _median(ratios), f"{min(ratios):.2f}", *under])
    header = ["kind", "shapes", "median", "lowest", *(f"under {bound:g}" for bound in _COUNTED)]
    return table(header, cells)


def _worst(rows: Sequence[Measured]) -> str:
    cells = [
        [
            str(row.shape),
            kind(row.shape),
            f"{row.torch_seconds * 1e6:.1f}",
            f"{row.our_seconds * 1e6:.1f}",
            "" if row.first is None else f"{row.first:.2f}",
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    sizes = "batch,heads,queries,keys,head_dim"
    return table([f"lowest: {sizes}", "kind", "torch µs", "our µs", "first", "ratio"], cells, left=2)


def header(head: dict[str, Any]) -> str:
    """Returns command, machine, versions and date, and what a ratio is."""
    machine = head["machine"]
    kernels = []
    for name in ("float32", "bfloat16"):
        probe = torch.zeros(1, 1, 8, 64, dtype=swept_shapes.DTYPES[name])
        kernels.append(f"{name} on {backends.explain(probe, probe, probe).isa}")
    return (
        f"{head['command']}\n"
        f"{machine['cpu']}, {', '.join(kernels)}; torch {machine['torch']}, {head['date']}\n"
        f"ratio: torch's time / ours, the median over rounds of one call each. A ratio under {LIMIT} is\n"
        f'measured again, in a process of its own, and that counts; "first" is what it was in the sweep.'
    )


def data(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Returns the rows as plain data."""
    return [
        {**asdict(row), "shape": {**asdict(row.shape), "line": str(row.shape), "kind": kind(row.shape)}}
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="the shapes of a seed are the same everywhere")
    parser.add_argument("--count", type=int, default=700, help="how many shapes to draw (default: 700)")
    parser.add_argument(
        "--threads", type=parse_threads, metavar="N,N", help="numbers of threads (default: 1 and all)"
    )
    parser.add_argument(
        "--only", metavar="KIND", default="", help="only drawn shapes whose kinds contain this"
    )
    parser.add_argument(
        "--again",
        metavar="LINE",
        action="append",
        help="this shape, alone, and none that is drawn; repeatable",
    )
    parser.add_argument("--worst", type=int, default=40, help="how many of the lowest ratios to print")
    parser.add_argument("--json", metavar="FILE", help="also write the results here; - is standard output")
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(parsed: argparse.Namespace) -> int:
    bench.check_json(parsed.json)
    threads = bench.thread_counts(parsed.threads)
    asked = [swept_shapes.parse(line) for line in parsed.again or []]
    drawn = swept_shapes.draw(parsed.seed, parsed.count)
    chosen = [
        (shape, swept_shapes.is_free(index))
        for index, shape in enumerate(drawn)
        if parsed.only in kind(shape)
    ]
    if not asked and not chosen:
        kinds = "; ".join(sorted({kind(shape) for shape in drawn}))
        raise CommandError(
            f"--count {parsed.count} --only {parsed.only!r}: no shape is left of {kinds or 'none'}"
        )
    bench.warn_if_busy()
    head = report.head(" ".join(["benchmarks/shape_sweep.py", *sys.argv[1:]]))
    if asked:
        rows = [measure_alone(shape, count) for count in threads for shape in asked]
    else:
        rows = sweep(chosen, threads)
    missed = misses(rows)
    dumped = report.dump({**head, "missed": missed, "rows": data(rows)})
    bench.emit(f"{header(head)}\n\n{text(rows, parsed.worst)}", dumped, parsed.json)
    return 1 if any(missed.values()) else 0


if __name__ == "__main__":
    # Each measurement collects garbage first. What lives longer than all of them need not be looked at again.
    gc.freeze()
    sys.exit(main())
