"""Measurement of cases on a GPU: this package and torch's backends in turns, errors and peaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gpu_cases import Aim, Line
from gpu_peak import Ceiling, Meter
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfattn_ext import backends
from selfattn_ext.bench import kv_cache, timer, varlen
from selfattn_ext.bench.accuracy import truth
from selfattn_ext.bench.cases import Case, Inputs, as_json, inputs
from selfattn_ext.bench.contenders import OURS, TORCH, Contender, results, runner
from selfattn_ext.bench.measure import contenders_for, note
from selfattn_ext.bench.timer import Effort, Ratio, Timing
from selfattn_ext.terminal import Progress, describe

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

#: torch.nn.attention.varlen, for the kinds of cases that it computes.
VARLEN: dict[type[Case], Contender] = {
    varlen.VarlenCase: varlen.TORCH_VARLEN,
    kv_cache.CacheCase: kv_cache.TORCH_VARLEN,
}
PEERS = (*BACKENDS, "varlen")

Setting = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Call:
    """A call, and the setting under which it is made, whose set-up is not timed."""

    function: Callable[[], object]
    setting: Setting = nullcontext

    def __call__(self) -> object:
        return self.function()


@dataclass(frozen=True)
class Row:
    """The measurements of one case."""

    line: Line
    kernel: str  # the kernel of this package that ran
    timings: dict[str, Timing]  # by name: torch's backends and this package
    refused: dict[str, str]  # by backend, the reason why it has no timing
    error: float | None
    ceiling: Ceiling
    memory: dict[str, int]  # bytes at the peak beyond the inputs, results included; empty on a CPU

    @property
    def ours(self) -> Timing:
        return self.timings[OURS.name]

    def ratio(self, backend: str) -> float | None:
        """Returns the time of a backend, or of the fastest, over ours; above 1 this package is faster."""
        if backend == "best":
            backend = self.fastest or ""
        return Ratio.of(self.timings[backend], self.ours).median if backend in self.timings else None

    @property
    def fastest(self) -> str | None:
        """The name of torch's fastest backend, None if none takes the case."""
        names = [name for name in PEERS if name in self.timings]
        ratios = {name: Ratio.of(self.timings[name], self.ours).median for name in names}
        return min(ratios, key=lambda name: ratios[name], default=None)

    @property
    def tflops(self) -> float:
        return self.line.case.flops() / self.ours.median / 1e12

    @property
    def reached(self) -> str:
        """Whether the aim is reached: "yes", "no", or "" without an aim or anything to compare with."""
        aim: Aim | None = self.line.aim
        if aim is None:
            return ""
        value = self.tflops if aim.of == "TFLOP/s" else self.ratio(aim.of)
        return "" if value is None else "yes" if value >= aim.value else "no"


class Session:
    """Measures rows on one device; they share its peaks."""

    def __init__(self, device: str, effort: Effort, meter: Meter | None = None) -> None:
        self._device, self._effort = device, effort
        self._clock = timer.event_clock if device == "cuda" else timer.wall_clock
        self.meter = meter or Meter(device, self._clock)

    def measure(self, lines: Sequence[Line]) -> list[Row]:
        """Measures a row for each line, with a progress bar on stderr."""
        rows = []
        with Progress("measuring", len(lines)) as progress:
            for line in lines:
                rows.append(self.row(line))
                progress.update(len(rows), note(line.case))
        return rows

    def row(self, line: Line) -> Row:
        """Measures one case."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(line.case.precision)
        try:
            with torch.set_grad_enabled(line.case.backward):
                return self._row(line)
        finally:
            torch.set_float32_matmul_precision(before)

    def _row(self, line: Line) -> Row:
        case = line.case
        ceiling = self.meter.ceiling(case.dtype, case.precision)
        tensors = inputs(case, device=self._device)
        contenders = {contender.name: contender for contender in contenders_for(case, [TORCH])}
        ours = contenders[OURS.name]
        own = ours.form(case, tensors)
        call = ours.prepare(case, own)
        judge = truth(case, tensors)
        found = [ours.padded(case, result) for result in results(call, case, own)]
        error = None if judge is None else judge.error(case, found)
        kernel = backends.explain(tensors.query, tensors.key, tensors.value, enable_gqa=True).kernel
        calls, refused = {OURS.name: Call(runner(call, case, own))}, {}
        asked = dict.fromkeys(BACKENDS, contenders[TORCH.name])
        if type(case) in VARLEN:
            asked["varlen"] = VARLEN[type(case)]
        for name, contender in asked.items():
            try:
                calls[name] = _call_of(name, contender, case, tensors)
            except NotImplementedError as reason:
                refused[name] = str(reason)
        memory = {name: self._peak(call) for name, call in calls.items()} if self._device == "cuda" else {}
        timings = timer.interleave(calls, self._effort, self._timed)
        return Row(line, kernel, timings, refused, error, ceiling, memory)

    def _peak(self, call: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with call.setting():
            call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _timed(self, call: Callable[[], object], repetitions: int) -> float:
        assert isinstance(call, Call)
        with call.setting():
            return self._clock(call, repetitions)


def _call_of(peer: str, contender: Contender, case: Case, tensors: Inputs) -> Call:
    """Returns a call of torch's attention by one of PEERS.

    Raises:
        NotImplementedError: the backend does not take the case.
    """

    def setting() -> AbstractContextManager[object]:
        return sdpa_kernel(BACKENDS[peer]) if peer in BACKENDS else nullcontext()

    with warnings.catch_warnings(), setting():
        warnings.simplefilter("ignore")  # torch warns once for each reason of a refusal
        try:
            own = contender.form(case, tensors)
            call = Call(runner(contender.prepare(case, own), case, own), setting)
            call()
        except RuntimeError as error:  # lack of memory is one, too
            raise NotImplementedError(describe(error)) from error
    return call


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and lines."""
    header = ["dtype", "(B, H, T, D)", "options", "pass", "kernel", *(f"{name} ms" for name in PEERS)]
    header += ["our ms", "best / ours", "TFLOP/s", "of product", "of copy", "best MB", "our MB", "error"]
    header += ["aim", "reached"]
    return header, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    case, best = row.line.case, row.ratio("best")
    seconds = row.ours.median
    return [
        case.dtype_name,
        str(case.shape),
        case.options(),
        case.direction.replace("forward+backward", "f+b"),
        row.kernel,
        *(f"{row.timings[n].median * 1e3:.3f}" if n in row.timings else "-" for n in PEERS),
        f"{seconds * 1e3:.3f}",
        "-" if best is None else f"{best:.2f}",
        f"{row.tflops:.1f}",
        f"{row.ceiling.of_product(case, seconds):.0%}",
        f"{row.ceiling.of_copy(case, seconds):.0%}",
        *(f"{row.memory[n] / 1e6:.0f}" if n in row.memory else "-" for n in (row.fastest, OURS.name)),
        "-" if row.error is None else f"{row.error:.1e}",
        "" if row.line.aim is None else str(row.line.aim),
        row.reached,
    ]


def notes(rows: Sequence[Row], peaks: dict[str, float]) -> str:
    """Returns what the columns mean, the peaks, and how many aims are reached."""
    judged = [row for row in rows if row.reached]
    measured = ", ".join(f"{value:.0f} {name}" for name, value in peaks.items())
    return "\n".join(
        [
            "ms: medians by CUDA events, contenders in turns; - where a backend of torch refuses the case.",
            "best / ours: time of torch's fastest backend over ours; above 1 this package is faster.",
            "f+b: forward and backward; TFLOP/s count two products forward and five backward.",
            "of product, of copy: of the speed of a large matrix product and of a large copy in this run.",
            "MB: at the peak beyond the inputs, results included; best is torch's fastest backend.",
            "error: of our output and gradients against float64, relative to the largest value of each.",
            f"Peaks: {measured}.",
            f"{sum(row.reached == 'yes' for row in judged)} of {len(judged)} aims reached.",
        ]
    )


def row_data(row: Row) -> dict[str, Any]:
    """Returns a row as plain data."""
    return {
        **as_json(row.line.case),
        "kernel": row.kernel,
        "aim": None if row.line.aim is None else asdict(row.line.aim),
        "reached": row.reached,
        "tflops": row.tflops,
        "error": row.error,
        "peak": asdict(row.ceiling),
        "refused": row.refused,
        "memory": row.memory,
        "contenders": {
            name: {
                "median_seconds": timing.median,
                "quartile_seconds": timing.quartiles,
                "rounds": len(timing.samples),
            }
            for name, timing in row.timings.items()
        },
        "ratios": {name: row.ratio(name) for name in (*PEERS, "best")},
    }
