"""The benchmark machinery: what is timed and counted, in which order, and the results' form."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfattn_ext import bench
from selfattn_ext.bench import cases, peak, report, timer
from selfattn_ext.bench.accuracy import truth
from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import OURS, TORCH, Contender, results, runner
from selfattn_ext.bench.measure import Outcome, Row, measure
from selfattn_ext.commands.cli import main
from selfattn_ext.terminal import CommandError

pytestmark = pytest.mark.usefixtures("nothing_is_collected")

MOMENT = timer.Effort(seconds=0.0, min_rounds=3)
SMALL = Case(2, 4, 70, 16)
VARIANTS = [
    SMALL,
    replace(SMALL, causal=True),
    replace(SMALL, dtype=torch.bfloat16, causal=True),
    replace(SMALL, kv_heads=2),
    replace(SMALL, value_dim=24),
    replace(SMALL, length=1, keys=90, kv_heads=1),
    replace(SMALL, keys=90, causal=True),
    replace(SMALL, window=9, causal=True),
    replace(SMALL, window=9),
    replace(SMALL, length=150, mask="bool"),
    replace(SMALL, length=150, mask="bool", causal=True),
    replace(SMALL, mask="gradient"),
    replace(SMALL, mask="gradient", causal=True),
]


class Clock:
    """A clock that only calls move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


def test_calls_are_timed_in_turns_after_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"a": clock.call("a", 0.3), "b": clock.call("b", 0.1)}
    timings = timer.interleave(calls, timer.Effort(seconds=1.0, min_rounds=2, max_rounds=50))
    assert clock.log == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert timings["a"].samples == pytest.approx([0.3] * 3)
    assert timer.Ratio.of(timings["a"], timings["b"]).median == pytest.approx(3.0)


def test_short_calls_are_repeated_and_rounds_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = timer.interleave({"a": clock.call("a", 3e-4)}, timer.Effort(60.0, min_rounds=2, max_rounds=5))
    assert timings["a"].samples == pytest.approx([3e-4] * 5)
    assert len(clock.log) == 2 + 5 * 4


def test_a_ratio_is_taken_round_by_round() -> None:
    slow_half = timer.Timing((1.0, 1.0, 10.0, 10.0, 10.0))
    other = timer.Timing((2.0, 2.0, 20.0, 20.0, 20.0))
    ratio = timer.Ratio.of(other, slow_half)
    assert ratio.median == 2.0
    assert ratio.quartiles == (2.0, 2.0)
    assert slow_half.quartiles == (1.0, 10.0)


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: f"{case.dtype_name} {case.options()}")
@pytest.mark.parametrize("backward", [False, True])
def test_contenders_compute_the_same_and_errors_are_small(case: Case, backward: bool) -> None:
    case = replace(case, backward=backward)
    tensors = inputs(case)
    exact = truth(case, tensors)
    assert exact is not None
    bound = 2e-2 if case.dtype == torch.bfloat16 else 5e-6
    for contender in (OURS, TORCH):
        found = results(contender.prepare(case, tensors), case, tensors)
        assert len(found) == 1 + len(tensors.leaves())
        assert exact.error(case, found) < bound, contender.name
        spoilt = [*found[:-1], found[-1] + 1.0] if case.mask != "gradient" else [found[0] + 1.0, *found[1:]]
        assert exact.error(case, spoilt) > 0.05


@pytest.mark.parametrize(
    "case", [replace(SMALL, length=600, causal=True), replace(SMALL, length=600, mask="bool")]
)
def test_long_sequences_are_judged_in_chunks(case: Case) -> None:
    case = replace(case, heads=1, backward=True)
    tensors = inputs(case)
    exact = truth(case, tensors)
    assert exact is not None
    assert exact.error(case, results(OURS.prepare(case, tensors), case, tensors)) < 5e-6


def test_dropout_has_no_true_result() -> None:
    case = replace(SMALL, dropout=0.5)
    tensors = inputs(case)
    assert truth(case, tensors) is None
    ours, theirs = (results(one.prepare(case, tensors), case, tensors)[0] for one in (OURS, TORCH))
    assert ours.shape == theirs.shape


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: f"{case.dtype_name} {case.options()}")
def test_operations_are_counted_over_visible_pairs(case: Case) -> None:
    seen = case.visible()
    if seen is None:
        seen = torch.ones(case.length, case.key_count, dtype=torch.bool)
    if case.mask == "bool":
        mask = inputs(case).mask
        assert mask is not None
        seen = seen & mask
    pairs = int(seen.sum())
    per_pair = 2 * (case.head_dim + case.value_dimension)
    assert case.flops() == case.batch * case.heads * pairs * per_pair
    assert replace(case, backward=True).flops() == 3.5 * case.flops()
    assert replace(case, backward=True, graph_kept=True).flops() == 2.5 * case.flops()
    tensors = inputs(case)
    assert case.bytes_read() == sum(t.nbytes for t in (tensors.query, tensors.key, tensors.value))


def test_the_block_mask_hides_half_of_the_blocks() -> None:
    mask = inputs(replace(SMALL, length=256, mask="bool")).mask
    assert mask is not None
    blocks = mask.view(4, 64, 4, 64).permute(0, 2, 1, 3).flatten(2)
    assert blocks.all(-1).sum() == 8
    assert (~blocks).all(-1).sum() == 8


def test_the_standard_table_is_the_one_of_the_documentation() -> None:
    table = cases.standard()
    assert len(table) == len(set(table)) == 4 * 2 * 2 * 2
    assert {case.shape for case in table} == {
        (4, 8, 64, 64),
        (1, 8, 512, 64),
        (1, 8, 2048, 64),
        (1, 4, 4096, 128),
    }
    assert {case.dtype for case in table} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("graph_kept", [False, True])
def test_the_timed_call_gives_all_gradients_every_time(graph_kept: bool) -> None:
    case = replace(SMALL, mask="gradient", backward=True, graph_kept=graph_kept)
    tensors = inputs(case)
    call = OURS.prepare(case, tensors)
    timed = runner(call, case, tensors)
    expected = results(call, case, tensors)[1:]
    assert len(expected) == 4
    for _ in range(2):
        assert all(map(torch.equal, timed(), expected))
    with pytest.raises(ValueError, match="needs backward=True"):
        replace(SMALL, graph_kept=True)


def test_a_contender_that_refuses_is_listed_with_its_reason() -> None:
    def refuse(case: Case, tensors: cases.Inputs) -> Callable[[], torch.Tensor]:
        raise NotImplementedError("no backward pass on CPU")

    rows = measure([replace(SMALL, backward=True)], [TORCH, Contender("peer", refuse)], [1], MOMENT)
    assert rows[0].ratio("peer") is None
    assert rows[0].ratio("torch") is not None
    text = report.text(rows)
    assert "peer: no backward pass on CPU" in text
    assert "peer: nothing to compare" in text
    assert report.data(rows, "test")["rows"][0]["contenders"]["peer"]["refused"] == "no backward pass on CPU"


def test_the_peak_is_measured_and_threads_and_precision_are_restored(one_thread: None) -> None:
    case = replace(SMALL, precision="medium")
    rows = measure([case], [TORCH], [1, 2], MOMENT)
    assert [row.threads for row in rows] == [1, 2]
    for row in rows:
        assert row.ceiling is not None
        assert row.ceiling.gflops > 0
        assert row.ceiling.read_gbs > 0
        share = row.share(OURS.name)
        assert share is not None
        assert share > 0
    assert torch.get_num_threads() == 1
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def tiny_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "QUICK_SHAPES", ((1, 2, 16, 8),))
    monkeypatch.setattr(timer, "QUICK", MOMENT)
    monkeypatch.setattr(peak, "READ_BYTES", 2**20)


@pytest.mark.usefixtures("tiny_bench")
def test_bench_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results" / "bench.json"
    assert main(["bench", "--quick", "--threads", "1", "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "torch / ours" in printed
    assert printed.count("(1, 2, 16, 8)") == 8 + 1  # each row, and the one with the lowest ratio
    assert str(target) in printed
    _check_schema(json.loads(target.read_text(encoding="utf-8")), rows=8)


@pytest.mark.usefixtures("tiny_bench")
def test_bench_json_on_stdout_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--threads", "1", "--json", "-"]) == 0
    printed = capsys.readouterr()
    _check_schema(json.loads(printed.out), rows=8)
    assert "torch / ours" in printed.err


def _check_schema(data: dict[str, Any], rows: int) -> None:
    assert data["schema"] == report.SCHEMA
    assert data["machine"]["torch"] == torch.__version__
    assert {"cpu", "features", "build", "selfattn_ext", "python"} <= set(data["machine"])
    assert len(data["rows"]) == rows
    for row in data["rows"]:
        assert set(row) == {
            *("batch", "heads", "length", "head_dim", "dtype", "causal", "direction", "keys", "kv_heads"),
            *("value_dim", "window", "mask", "dropout", "precision", "isa", "threads", "flops", "bytes_read"),
            *("peak", "bound", "reading", "contenders", "ratios"),
        }
        assert set(row["contenders"]) == {OURS.name, TORCH.name}
        for contender in row["contenders"].values():
            low, high = contender["quartile_seconds"]
            assert 0 < low <= contender["median_seconds"] <= high
            assert contender["rounds"] >= MOMENT.min_rounds
            assert contender["error"] < 0.05
            assert contender["refused"] is None
            assert contender["of_peak"] > 0
        low, high = row["ratios"]["torch"]["quartiles"]
        assert 0 < low <= row["ratios"]["torch"]["median"] <= high


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 9.0, 9.0))
    bench.warn_if_busy()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    bench.warn_if_busy()
    assert "not idle: load average 3.0" in capsys.readouterr().err


def test_threads_are_one_and_all_unless_asked_for() -> None:
    assert bench.thread_counts([1]) == [1]
    assert bench.thread_counts(None)[0] == 1
    assert torch.get_num_threads() in bench.thread_counts(None)
    with pytest.raises(CommandError, match="logical processors"):
        bench.thread_counts([10**6])


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a kilobyte count as too large for the processor's caches."""
    monkeypatch.setattr(peak, "READ_BYTES", 2**10)


@pytest.mark.usefixtures("small_caches")
def test_decoding_is_timed_in_turns_with_reading() -> None:
    decoding = replace(SMALL, length=1, keys=90)
    cached, read, other = (
        measure([case], [TORCH], [1], MOMENT)[0]
        for case in (replace(decoding, batch=1, heads=1, keys=1), decoding, replace(SMALL, length=90))
    )
    assert cached.reading is None
    assert other.reading is None
    assert cached.share_of_reading(OURS.name) is None
    assert read.reading is not None
    ours = read.outcomes[OURS.name].timing
    assert ours is not None
    assert len(read.reading.samples) == len(ours.samples)
    assert read.ceiling is not None
    assert read.ceiling.read_gbs == pytest.approx(decoding.bytes_read() / read.reading.median / 1e9)
    text = report.text([read, other])
    assert "of read" in text
    assert "in turns with the calls" in text
    assert "of read" not in report.text([other])
    data = report.row_data(read)
    assert data["reading"]["rounds"] == len(ours.samples)
    assert data["contenders"][OURS.name]["of_read"] == read.share_of_reading(OURS.name)


def test_what_slows_reading_and_the_call_cancels_out() -> None:
    # In the second half of the rounds the machine gives half the bandwidth.
    outcomes = {OURS.name: Outcome(timer.Timing((1.0, 1.0, 2.0, 2.0, 2.0)), None)}
    reading = timer.Timing((0.8, 0.8, 1.6, 1.6, 1.6))
    row = Row(SMALL, 1, outcomes, peak.Ceiling("avx2", 1e6, SMALL.bytes_read() / 1e9), reading)
    assert row.bound == "read"
    assert row.share_of_reading(OURS.name) == row.share(OURS.name) == pytest.approx(0.8)
    assert "80% read" in report.text([row])  # the other limit, which the line above the table does not name


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize(("size", "passes"), [(100, 1), (1024, 1), (5000, 5)])
def test_reading_takes_about_as_many_bytes_as_the_call(size: int, passes: int) -> None:
    reading = peak.Reading(size)
    assert reading.passes == passes
    reading()
    taken = timer.Timing((passes * 1.0, passes * 2.0))  # a second and two seconds per kilobyte
    assert reading.timing(taken).samples == pytest.approx((size / 1024, 2 * size / 1024))


def test_large_tensors_repeat_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = inputs(SMALL).key.flatten()
    monkeypatch.setattr(cases, "_DRAWN", 101)
    repeated = inputs(SMALL).key.flatten()
    assert torch.equal(repeated[:101], repeated[101:202])
    assert not torch.equal(drawn[:101], drawn[101:202])
    assert len(inputs(SMALL).key.flatten(0, 2).unique(dim=0)) == 101  # rows repeat only after all of these


def _row(ratio: float, case: Case = SMALL) -> Row:
    outcomes = {
        OURS.name: Outcome(timer.Timing((1.0,) * 3), 1e-7),
        "torch": Outcome(timer.Timing((ratio,) * 3), 2e-7),
    }
    return Row(case, 1, outcomes, peak.Ceiling("avx2", gflops=2 * case.flops() / 1e9, read_gbs=1e9))


def test_the_summary_names_median_and_lowest_ratio() -> None:
    text = report.text([_row(2.0), _row(0.5, replace(SMALL, causal=True)), _row(3.0)])
    assert (
        "torch / ours: median 2.00 of 3 rows, over 1 in 2;\n  lowest 0.50 (float32 (2, 4, 70, 16) causal"
        in text
    )


def test_the_table_has_a_part_for_each_dtype_and_fits_a_terminal() -> None:
    slow = Case(1, 8, 2048, 128, causal=True, backward=True)
    found = [_row(1.5, replace(slow, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    lines = report.text(found).splitlines()
    assert [line for line in lines if line.endswith("peak of avx2")] == [
        "bfloat16, 1 thread, peak of avx2",
        "float32, 1 thread, peak of avx2",
    ]
    assert [line.split()[:6] for line in lines if line.startswith("(1, 8")] == [
        ["(1,", "8,", "2048,", "128)", "causal", "f+b"]
    ] * 2
    assert max(map(len, lines)) <= 100
