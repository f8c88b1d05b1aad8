"""benchmarks/gpu_run.py without a GPU: rows measured on the CPU, the table, the cases."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import torch

from selfattn_ext.bench import timer
from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.timer import Timing
from selfattn_ext.bench.varlen import VarlenCase
from selfattn_ext.build import library
from selfattn_ext.terminal import table

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("gpu_cases", "gpu_peak", "gpu_measure", "gpu_run")
MOMENT = timer.Effort(seconds=0.0, min_rounds=3)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules that benchmarks/gpu_run.py uses."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gpu_cases
    import gpu_measure
    import gpu_peak

    yield SimpleNamespace(cases=gpu_cases, measure=gpu_measure, peak=gpu_peak)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def session(modules: SimpleNamespace) -> SimpleNamespace:
    meter = modules.peak.Meter("cpu", timer.wall_clock, size=64, copy_bytes=2**20)
    return modules.measure.Session("cpu", MOMENT, meter)


def test_rows_on_the_cpu(modules: SimpleNamespace, session: SimpleNamespace) -> None:
    plain, masked = Case(1, 2, 16, 8), Case(1, 2, 16, 8, mask="bool", causal=True, precision="high")
    lines = [
        modules.cases.Line(plain, modules.cases.Aim(1e6, "TFLOP/s")),
        modules.cases.Line(masked, modules.cases.Aim(1e-6, "math")),
        modules.cases.Line(Case(1, 2, 1, 8, keys=40, dropout=0.5), modules.cases.Aim(1.0, "cudnn")),
        modules.cases.Line(Case(1, 2, 16, 8, mask="gradient", backward=True)),
        modules.cases.Line(Case(1, 2, 16, 8, backward=True, graph_kept=True)),
    ]
    rows = session.measure(lines)
    assert [row.reached for row in rows] == ["no", "yes", "", "", ""]
    assert set(rows[0].timings) == {"selfattn_ext", "flash", "math"}
    assert set(rows[0].refused) == {"cudnn", "efficient"}
    assert rows[0].error < 1e-5
    assert rows[1].error < 1e-2
    assert rows[2].error is None
    assert all(row.error < 1e-5 for row in rows[3:])
    assert all("math" in row.timings for row in rows)
    assert not any(row.memory for row in rows)
    assert len(rows[0].ours.samples) >= MOMENT.min_rounds
    header, cells = modules.measure.cells(rows)
    text = table(header, cells, left=3)
    assert all(len(line) == len(header) for line in cells)
    assert cells[1][2] == "causal mask=bool precision=high"
    assert [line[3] for line in cells] == ["forward", "forward", "forward", "f+b", "backward"]
    assert cells[0][-2:] == ["1e+06 TFLOP/s", "no"]
    assert "cudnn ms" in text
    assert "1 of 2 aims reached" in modules.measure.notes(rows, session.meter.measured())
    data = json.loads(json.dumps([modules.measure.row_data(row) for row in rows]))
    assert data[0]["ratios"]["cudnn"] is None
    assert data[0]["ratios"]["best"] > 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_batches_of_several_lengths_on_the_cpu(modules: SimpleNamespace, session: SimpleNamespace) -> None:
    cached = CacheCase.of((20, 9), 2, 8, layout="blhd")
    cases = [VarlenCase.of((20, 9), 2, 8, backward=True), cached, replace(cached, page_size=4)]
    packed, contiguous, paged = session.measure([modules.cases.Line(case) for case in cases])
    assert packed.error < 1e-5
    assert contiguous.error < 1e-5
    assert paged.error < 1e-5
    assert set(packed.timings) >= {"selfattn_ext", "math"}
    assert set(contiguous.timings) >= {"selfattn_ext", "math"}
    assert set(paged.timings) == {"selfattn_ext"}
    for row in (packed, contiguous, paged):
        assert row.refused["varlen"] == "torch.nn.attention.varlen computes only on CUDA"
    # Query, key, value and output are moved once for each of three passes.
    assert modules.peak.moved_bytes(packed.line.case) == 3 * 4 * (20 + 9) * 2 * 8 * 4


def test_ratios_and_shares(modules: SimpleNamespace) -> None:
    case = Case(2, 4, 1024, 64, dtype=torch.bfloat16)
    times = {"selfattn_ext": 1e-3, "flash": 2e-3, "cudnn": 1.5e-3}
    row = modules.measure.Row(
        modules.cases.Line(case, modules.cases.Aim(1.5, "best")),
        "sm80",
        {name: Timing((seconds,) * 3) for name, seconds in times.items()},
        {},
        None,
        modules.peak.Ceiling(tflops=100.0, copy_gbs=1000.0),
        {"cudnn": 3_000_000, "flash": 2_000_000, "selfattn_ext": 1_000_000},
    )
    assert row.ratio("best") == pytest.approx(1.5)
    assert row.ratio("flash") == pytest.approx(2.0)
    assert row.ratio("math") is None
    assert row.fastest == "cudnn"
    header, (line,) = modules.measure.cells([row])
    assert dict(zip(header, line, strict=True)).items() >= {("best MB", "3"), ("our MB", "1")}
    assert row.reached == "yes"
    flops = 4 * 2 * 4 * 1024 * 1024 * 64
    assert row.tflops == pytest.approx(flops / 1e9)
    assert row.ceiling.of_product(case, 1e-3) == pytest.approx(flops / 1e9 / 100)
    assert row.ceiling.of_copy(case, 1e-3) == pytest.approx(4 * 2 * 4 * 1024 * 64 * 2 / 1e9)
    for options, times_as_many in (({"backward": True}, 3), ({"backward": True, "graph_kept": True}, 2)):
        moved = modules.peak.moved_bytes(replace(case, **options))
        assert moved == times_as_many * modules.peak.moved_bytes(case)


def test_peaks(modules: SimpleNamespace) -> None:
    meter = modules.peak.Meter("cpu", timer.wall_clock, size=128, copy_bytes=2**20)
    highest = meter.ceiling(torch.float32, "highest")
    high = meter.ceiling(torch.float32, "high")
    assert highest.tflops >= high.tflops / 3
    meter.ceiling(torch.bfloat16, "highest")
    assert set(meter.measured()) == {
        "tf32 TFLOP/s",
        "float32 TFLOP/s",
        "bfloat16 TFLOP/s",
        "copy GB/s",
    }
    assert all(value > 0 for value in meter.measured().values())
    assert torch.get_float32_matmul_precision() == "highest"


def test_cases(modules: SimpleNamespace) -> None:
    lines = modules.cases.lines()
    assert len({line.case for line in lines}) == len(lines) > 30
    quick = modules.cases.lines(quick=True)
    assert 5 < len(quick) < len(lines)
    for line in lines:
        assert line.case.flops() > 0
    kinds = {type(line.case) for line in lines}
    assert kinds == {type(line.case) for line in quick} == {Case, VarlenCase, CacheCase}
    for aim, backward in ((modules.cases.LONG, False), (modules.cases.LONG_BACKWARD, True)):
        (long,) = (line for line in lines if line.aim == aim)
        assert (long.case.length, long.case.head_dim) == (8192, 128)
        assert (long.case.backward, long.case.graph_kept) == (backward, backward)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        training = [line.case for line in lines if line.case.backward and line.case.dtype == dtype]
        assert {case.mask for case in training} >= {"none", "gradient"}


def test_needs_a_gpu(modules: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.missing() is None:
        pytest.skip("there is a GPU")
    import gpu_run

    assert gpu_run.main([]) == 1
    with_kernels = library.extension().build_info()["cuda"]
    reason = "torch finds no GPU" if with_kernels else "this build of selfattn_ext has no CUDA kernels"
    assert f"error: {reason}" in capsys.readouterr().err
