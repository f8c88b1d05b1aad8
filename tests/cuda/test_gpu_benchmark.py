"""benchmarks/gpu_run.py without a GPU: rows measured on the CPU, the table, the cases."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu
import gpu_cases
import gpu_measure
import gpu_peak
import gpu_run
import pytest
import torch

from selfattn_ext.bench import timer
from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.timer import Timing
from selfattn_ext.bench.varlen import VarlenCase
from selfattn_ext.build import library
from selfattn_ext.terminal import table

MOMENT = timer.Effort(seconds=0.0, min_rounds=3)


@pytest.fixture(autouse=True)
def _short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_peak, "best_seconds", lambda call, seconds, clock: timer.best_seconds(call, 0.0, clock)
    )


@pytest.fixture
def session() -> gpu_measure.Session:
    return gpu_measure.Session("cpu", MOMENT, gpu_peak.Meter("cpu", timer.wall_clock, 64, 2**20))


def test_rows_on_the_cpu(session: gpu_measure.Session) -> None:
    plain, masked = Case(1, 2, 16, 8), Case(1, 2, 16, 8, mask="bool", causal=True, precision="high")
    lines = [
        gpu_cases.Line(plain, gpu_cases.Aim(1e6, "TFLOP/s")),
        gpu_cases.Line(masked, gpu_cases.Aim(1e-6, "math")),
        gpu_cases.Line(Case(1, 2, 1, 8, keys=40, dropout=0.5), gpu_cases.Aim(1.0, "cudnn")),
        gpu_cases.Line(Case(1, 2, 16, 8, mask="gradient", backward=True)),
        gpu_cases.Line(Case(1, 2, 16, 8, backward=True, graph_kept=True)),
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
    header, cells = gpu_measure.cells(rows)
    text = table(header, cells, left=3)
    assert all(len(line) == len(header) for line in cells)
    assert cells[1][2] == "causal mask=bool precision=high"
    assert [line[3] for line in cells] == ["forward", "forward", "forward", "f+b", "backward"]
    assert cells[0][-2:] == ["1e+06 TFLOP/s", "no"]
    assert "cudnn ms" in text
    assert "1 of 2 aims reached" in gpu_measure.notes(rows, session.meter.measured())
    data = json.loads(json.dumps([gpu_measure.row_data(row) for row in rows]))
    assert data[0]["ratios"]["cudnn"] is None
    assert data[0]["ratios"]["best"] > 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_batches_of_several_lengths_on_the_cpu(session: gpu_measure.Session) -> None:
    cached = CacheCase.of((20, 9), 2, 8, layout="blhd")
    cases = [VarlenCase.of((20, 9), 2, 8, backward=True), cached, replace(cached, page_size=4)]
    packed, contiguous, paged = session.measure([gpu_cases.Line(case) for case in cases])
    assert set(packed.timings) >= {"selfattn_ext", "math"}
    assert set(contiguous.timings) >= {"selfattn_ext", "math"}
    assert set(paged.timings) == {"selfattn_ext"}
    for row in (packed, contiguous, paged):
        assert row.error < 1e-5
        assert row.refused["varlen"] == "torch.nn.attention.varlen computes only on CUDA"
    # Query, key, value and output are moved once for each of three passes.
    assert gpu_peak.moved_bytes(packed.line.case) == 3 * 4 * (20 + 9) * 2 * 8 * 4


def test_ratios_and_shares() -> None:
    case = Case(2, 4, 1024, 64, dtype=torch.bfloat16)
    times = {"selfattn_ext": 1e-3, "flash": 2e-3, "cudnn": 1.5e-3}
    row = gpu_measure.Row(
        gpu_cases.Line(case, gpu_cases.Aim(1.5, "best")),
        "sm80",
        {name: Timing((seconds,) * 3) for name, seconds in times.items()},
        {},
        None,
        gpu_peak.Ceiling(tflops=100.0, copy_gbs=1000.0),
        {"cudnn": 3_000_000, "flash": 2_000_000, "selfattn_ext": 1_000_000},
    )
    assert row.ratio("best") == pytest.approx(1.5)
    assert row.ratio("flash") == pytest.approx(2.0)
    assert row.ratio("math") is None
    assert row.fastest == "cudnn"
    header, (line,) = gpu_measure.cells([row])
    assert dict(zip(header, line, strict=True)).items() >= {("best MB", "3"), ("our MB", "1")}
    assert row.reached == "yes"
    flops = 4 * 2 * 4 * 1024 * 1024 * 64
    assert row.tflops == pytest.approx(flops / 1e9)
    assert row.ceiling.of_product(case, 1e-3) == pytest.approx(flops / 1e9 / 100)
    assert row.ceiling.of_copy(case, 1e-3) == pytest.approx(4 * 2 * 4 * 1024 * 64 * 2 / 1e9)
    for options, times_as_many in (({"backward": True}, 3), ({"backward": True, "graph_kept": True}, 2)):
        moved = gpu_peak.moved_bytes(replace(case, **options))
        assert moved == times_as_many * gpu_peak.moved_bytes(case)


def test_peaks() -> None:
    meter = gpu_peak.Meter("cpu", timer.wall_clock, size=128, copy_bytes=2**20)
    highest = meter.ceiling(torch.float32, "highest")
    high = meter.ceiling(torch.float32, "high")
    assert highest.tflops >= high.tflops / 3
    meter.ceiling(torch.bfloat16, "highest")
    speeds = {f"{name} TFLOP/s" for name in ("tf32", "float32", "bfloat16")}
    assert set(meter.measured()) == {*speeds, "copy GB/s"}
    assert all(value > 0 for value in meter.measured().values())
    assert torch.get_float32_matmul_precision() == "highest"


def test_cases() -> None:
    lines = gpu_cases.lines()
    assert len({line.case for line in lines}) == len(lines) > 30
    quick = gpu_cases.lines(quick=True)
    assert 5 < len(quick) < len(lines)
    for line in lines:
        assert line.case.flops() > 0
    kinds = {type(line.case) for line in lines}
    assert kinds == {type(line.case) for line in quick} == {Case, VarlenCase, CacheCase}
    for aim, backward in ((gpu_cases.LONG, False), (gpu_cases.LONG_BACKWARD, True)):
        (long,) = (line for line in lines if line.aim == aim)
        assert (long.case.length, long.case.head_dim) == (8192, 128)
        assert (long.case.backward, long.case.graph_kept) == (backward, backward)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        training = [line.case for line in lines if line.case.backward and line.case.dtype == dtype]
        assert {case.mask for case in training} >= {"none", "gradient"}


def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.missing() is None:
        pytest.skip("there is a GPU")
    assert gpu_run.main([]) == 1
    with_kernels = library.extension().build_info()["cuda"]
    reason = "torch finds no GPU" if with_kernels else "this build of selfattn_ext has no CUDA kernels"
    assert f"error: {reason}" in capsys.readouterr().err
