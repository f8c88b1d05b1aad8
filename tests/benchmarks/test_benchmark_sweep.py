"""benchmarks/shape_sweep.py: which shapes are drawn, what they are called, and how a run is judged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import shape_sweep
import swept_shapes
import torch
from shape_sweep import Measured, main
from swept_shapes import Shape, draw, is_free, kind, parse

from selfattn_ext.bench import timer
from selfattn_ext.bench.varlen import VarlenCase
from selfattn_ext.terminal import CommandError

pytestmark = pytest.mark.usefixtures("nothing_is_collected")

MOMENT = timer.Effort(seconds=0.0, min_rounds=3)
DRAWN = draw(1, 1400)


def test_a_seed_draws_the_same_shapes_on_every_machine() -> None:
    assert [str(shape) for shape in DRAWN[:4]] == [
        "32,1,4,77,40 bfloat16 f+b",
        "8,1,128,77,256 float32 forward mask=float",
        "1,4,1,1,8 bfloat16 f+b mask=padding",
        "8,8,4,2048,128 bfloat16 f+b mask=float group=2",
    ]
    assert draw(1, 100) == DRAWN[:100]
    assert not set(draw(2, 100)) & set(DRAWN[:100])


def test_all_that_the_sweep_is_about_is_drawn() -> None:
    for name, values in {
        "dtype": swept_shapes.DTYPES,
        "causal": (False, True),
        "backward": (False, True),
        "mask": get_args(swept_shapes.Mask),
        "layout": get_args(swept_shapes.Layout),
        "group": (1, 2, 3, 4, 8),
    }.items():
        assert {getattr(shape, name) for shape in DRAWN} == set(values), name
    assert {shape.layout for index, shape in enumerate(DRAWN) if is_free(index)} == {"bhld", "blhd"}
    assert parse("8,2,2,2,32 causal layout=packed") in DRAWN
    assert sum(map(is_free, range(len(DRAWN)))) == 0.75 * len(DRAWN)
    for shape in DRAWN:
        assert shape.products() <= 3e9
        case = shape.case()
        rows = shape.heads * shape.queries + case.kv_head_count * shape.keys
        assert shape.batch * rows * shape.head_dim <= 2e7


def test_a_printed_line_is_the_shape() -> None:
    for shape in DRAWN:
        assert parse(str(shape)) == shape
    assert parse("1,2,3,4,8") == Shape(1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must begin with five sizes"),
        ("1,2,3,4 float32", "must begin with five sizes"),
        ("1,2,3,4,8 float8", "float8 is none of float32"),
        ("1,2,3,4,8 mask=blhd", "mask=blhd is none of"),
        ("1,2,3,4,0", "sizes must be at least 1"),
        ("1,3,3,4,8 group=2", "group=2 must divide 3 heads"),
        ("1,2,3,4,8 causal", "as many keys as queries"),
        ("1,2,3,3,8 causal mask=bool", "no mask"),
        ("1,2,3,3,8 layout=packed", "two or more"),
        ("2,2,3,3,8 layout=jagged causal", "neither causal nor grouped"),
    ],
)
def test_lines_that_are_no_shapes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match=message):
        parse(line)
    assert main(["--again", line]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("4,1,8,8,16 f+b", "tiny f+b"),
        ("1,12,1,1,40 mask=float", "tiny masked"),
        ("8,12,1,1,256 f+b", "few keys f+b"),
        ("1,8,512,4,64", "few keys"),
        ("2,2,1,512,128 mask=bool f+b", "few queries masked f+b"),
        ("1,2,4,2048,32", "few queries"),
        ("1,2,1,2048,8", "few queries, narrow head"),
        ("1,8,1,2048,64 group=4", "grouped heads"),
        ("1,8,5,1024,64", "cache"),
        ("1,8,64,2048,24", "cache"),
        ("1,8,256,77,64", "cross 77"),
        ("1,8,77,77,64", "middle"),
        ("1,12,197,197,64 f+b", "ViT f+b"),
        ("1,12,257,257,24", "ViT"),
        ("4,8,64,64,24", "short"),
        ("4,8,65,64,24", "narrow head"),
        ("4,8,65,1024,64", "long"),
        ("4,8,65,1023,64", "middle"),
        ("8,8,1,1,64 layout=packed", "packed"),
        ("8,8,2,2,64 layout=jagged f+b", "jagged f+b"),
    ],
)
def test_kinds(line: str, name: str) -> None:
    assert kind(parse(line)) == name


class Machine:
    """Stands in for measuring: made-up ratios by the index of the shape, 2 unless they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: dict[int, float] = {}
        self.alone: dict[int, float] = {}
        self.again: list[int] = []
        monkeypatch.setattr(shape_sweep, "measure", self._measure)
        monkeypatch.setattr(shape_sweep, "measure_alone", self._measure_alone)

    def _measure(self, shape: Shape, threads: int, effort: timer.Effort) -> Measured:
        assert effort == shape_sweep.IN_THE_SWEEP
        return self._row(shape, threads, self.first)

    def _measure_alone(self, shape: Shape, threads: int) -> Measured:
        self.again.append(DRAWN.index(shape))
        return self._row(shape, threads, self.alone)

    def _row(self, shape: Shape, threads: int, ratios: dict[int, float]) -> Measured:
        ratio = ratios.get(DRAWN.index(shape), 2.0)
        return Measured(shape, threads, ratio * 1e-3, 1e-3, ratio, (ratio, ratio), 3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("alone", "count", "verdict"),
    [
        ([], 100, "met"),
        ([0.95, 0.99, 1.3], 100, "met"),
        ([0.949], 100, "met"),
        ([0.85], 100, "met"),
        ([0.94, 0.86], 200, "met"),
        ([0.949], 99, "missed: 1 of 99 shapes under 0.95 (at most 1 %)"),
        ([0.849], 100, "missed: 1 of 100 shapes under 0.85 (none)"),
        (
            [0.94, 0.5, 0.6],
            200,
            "missed: 3 of 200 shapes under 0.95 (at most 1 %), 2 of 200 shapes under 0.85 (none)",
        ),
    ],
)
def test_the_ratios_measured_alone_are_judged(
    alone: list[float], count: int, verdict: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.first = dict.fromkeys(range(len(alone)), 0.3) | {50: 0.95}
    machine.alone = dict(enumerate(alone))
    assert main(["--count", str(count), "--threads", "1"]) == (verdict != "met")
    assert capsys.readouterr().out.splitlines()[-1] == f"1 thread: the target is {verdict}"
    assert machine.again == list(range(len(alone)))


def test_the_report(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.first = {2: 0.8, 3: 0.7, 7: 0.94}
    machine.alone = {2: 0.9, 3: 0.6, 7: 0.99}
    file = tmp_path / "sweep.json"
    arguments = ["--count", "100", "--threads", "1", "--worst", "3", "--json", str(file)]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    for fact in (torch.__version__, "float32 on ", "bfloat16 on "):
        assert fact in printed.splitlines()[1]
    assert "1 thread: 100 shapes, 3 under 1, 2 under 0.95, 1 under 0.9, 1 under 0.85" in printed
    lines = printed.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("lowest"))
    for place, (index, ratios) in enumerate(
        [(3, ["0.70", "0.60"]), (2, ["0.80", "0.90"]), (7, ["0.94", "0.99"])]
    ):
        line = lines[start + 2 + place]
        assert line.startswith(f"{DRAWN[index]} ")
        assert kind(DRAWN[index]) in line
        assert line.split()[-2:] == ratios
    assert lines[start + 5] == ""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [parse(row["shape"]["line"]) for row in rows] == DRAWN[:100]
    assert (rows[3]["first"], rows[3]["ratio"]) == (0.7, 0.6)
    assert rows[4]["first"] is None
    assert [row["free"] for row in rows[:5]] == [True, True, True, False, True]


def test_medians_of_dtypes_and_kinds(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.first = {index: 1 + index for index in range(8)}
    assert main(["--count", "8", "--threads", "1"]) == 0
    cells = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    # Of the eight shapes, those of index 0, 2 and 3 are in bfloat16, and 3 is of a family.
    assert cells["bfloat16"][1:] == ["3", "3.00", "2", "2.00"]
    names = [kind(shape) for shape in DRAWN[:8]]
    for index, name in enumerate(names):
        if names.count(name) == 1:
            assert cells[name][len(name.split()) :] == ["1", f"{1 + index}.00", f"{1 + index}.00"]


def test_some_kinds_only(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.first = dict.fromkeys(range(200), 0.9)
    machine.alone = machine.first
    assert main(["--count", "200", "--threads", "1,1", "--only", "tiny"]) == 1
    tiny = [index for index, shape in enumerate(DRAWN[:200]) if kind(shape).startswith("tiny")]
    assert machine.again == tiny
    assert main(["--count", "200", "--only", "huge"]) == 2
    assert "no shape is left of ViT" in capsys.readouterr().err


SMALL = [
    "2,4,5,9,16 float64 f+b mask=bool group=2 layout=blhd",
    "2,2,7,7,8 float64 f+b causal",
    "2,2,3,8,16 float64 mask=padding",
    "2,2,3,8,16 float64 mask=float layout=blhd",
    "3,2,2,2,8 float64 f+b layout=packed causal",
    "3,2,2,2,8 float64 f+b layout=jagged",
]


@pytest.mark.parametrize("line", SMALL)
def test_torch_and_we_compute_the_same(line: str) -> None:
    shape = parse(line)
    ours, theirs = (_results(shape, name) for name in ("selfattn_ext", "torch"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def _results(shape: Shape, name: str) -> list[torch.Tensor]:
    """Returns the output or the gradients; those of sequences of several lengths as (total, H, E)."""
    result = shape_sweep.calls(shape)[name]()
    results = result if isinstance(result, tuple) else (result,)
    assert len(results) == (3 if shape.backward else 1)
    if shape.layout == "jagged":
        return [each.transpose(1, 2).values() for each in results]
    case = shape.case()
    if isinstance(case, VarlenCase) and name == "torch":
        return [each.transpose(1, 2)[case.is_real()] for each in results]
    return list(results)


def test_both_get_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    for module in (shape_sweep, shape_sweep.F):
        monkeypatch.setattr(
            module,
            "scaled_dot_product_attention",
            lambda *tensors, **options: given.append((tensors, options)),
        )

    def called(line: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        given.clear()
        for call in shape_sweep.calls(parse(line)).values():
            call()
        assert len(given) == 2
        (tensors, options), (other_tensors, other_options) = given
        assert list(map(id, tensors)) == list(map(id, other_tensors))
        assert options.keys() == other_options.keys()
        assert all(options[name] is other_options[name] for name in options)
        return tensors, options

    tensors, options = called("2,4,5,5,16 bfloat16 causal group=2")
    assert [tuple(each.shape) for each in tensors] == [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]
    assert all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)
    assert options == {"is_causal": True, "enable_gqa": True}
    tensors, options = called("2,4,5,9,16 layout=blhd mask=bool")
    assert all(each.transpose(1, 2).is_contiguous() and not each.is_contiguous() for each in tensors)
    mask = options.pop("attn_mask")
    assert options == {"is_causal": False}
    assert (mask.dtype, mask.shape) == (torch.bool, (5, 9))
    mask = called("2,4,5,9,16 float64 mask=float")[1]["attn_mask"]
    assert (mask.dtype, mask.shape) == (torch.float64, (1, 4, 5, 9))
    mask = called("2,4,5,9,16 mask=padding")[1]["attn_mask"]
    assert mask.shape == (2, 1, 1, 9)
    assert mask[0].flatten().tolist() == [True] * 7 + [False] * 2
    nested = called("3,2,2,2,8 layout=jagged")[0][0]
    assert nested.is_nested
    assert nested.offsets().diff().tolist() == [2, 2, 1]


def test_calls_alternate_one_by_one(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    now, log = [0.0], []

    def call(name: str, seconds: float) -> None:
        log.append(name)
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    made_up = {"selfattn_ext": lambda: call("ours", 1e-5), "torch": lambda: call("torch", 3e-5)}
    monkeypatch.setattr(shape_sweep, "calls", lambda shape: made_up)
    found = shape_sweep.measure(DRAWN[0], 2, MOMENT)
    assert log == ["ours", "ours", "torch", "torch"] + ["ours", "torch"] * 3
    assert found.ratio == pytest.approx(3.0)
    assert (found.our_seconds, found.torch_seconds) == pytest.approx((1e-5, 3e-5))
    assert (found.shape, found.threads, torch.get_num_threads()) == (DRAWN[0], 2, 2)


def test_a_run(monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]) -> None:
    # The process is not a new one, which would take seconds to start.
    monkeypatch.setattr(shape_sweep, "in_new_process", lambda _, function, *arguments: function(*arguments))
    for effort in ("IN_THE_SWEEP", "ALONE"):
        monkeypatch.setattr(shape_sweep, effort, MOMENT)
    shapes = [parse(line) for line in SMALL[:3]]
    monkeypatch.setattr(swept_shapes, "draw", lambda seed, count: shapes)
    status = main(["--threads", "1", "--json", "-"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert status == any(found["missed"].values())
    for row, shape in zip(found["rows"], shapes, strict=True):
        low, high = row["quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert (row["shape"]["line"], row["rounds"], row["threads"]) == (str(shape), 3, 1)
        assert f"{shape} " in printed.err
    assert main(["--threads", "1", "--again", SMALL[3], "--again", SMALL[4]]) in (0, 1)
    printed = capsys.readouterr()
    assert "1 thread: 2 shapes" in printed.out
    assert str(parse(SMALL[4])) in printed.out
