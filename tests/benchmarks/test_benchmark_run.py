"""benchmarks/run.py: its tables, and the classes with their targets and goals."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import classes
import pytest
import tables

from selfattn_ext.bench import elsewhere, memory, peak, timer
from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.varlen import VarlenCase

pytestmark = pytest.mark.usefixtures("nothing_is_collected")

Main = Callable[[list[str]], int]
FOLDER = Path(__file__).parents[2] / "benchmarks"
MOMENT = timer.Effort(seconds=0.0, min_rounds=1)
SMALL = Case(1, 2, 8, 16)
PACKED = VarlenCase.of((9, 4), 2, 16)
CACHED = CacheCase.of((9, 4), 2, 16)


@pytest.fixture
def full_run(monkeypatch: pytest.MonkeyPatch) -> Main:
    """Returns main() of benchmarks/run.py, with tables of two small cases each and a class of each kind."""
    short = [replace(SMALL, length=length, keys=None) for length in (8, 16)]
    monkeypatch.setattr(tables, "TABLES", {"tiny": lambda: short, "lengths": lambda: short})
    environment = (("SELFATTN_CPU_ISA", "scalar"),)
    lines = [
        classes.Line("plain", SMALL, 1e-9, 1e9, quick=True),
        classes.Line("longer", replace(SMALL, length=16, causal=True), 1e-9, 2e-9, quick=True),
        classes.Line(
            "elsewhere", replace(SMALL, backward=True), 1e8, 1e9, environment=environment, quick=True
        ),
        classes.Line("decode", replace(SMALL, length=1, keys=64), 1e-9, 1e9, "of read", quick=True),
        classes.Line("packed", PACKED, 1e-9, 1e9, quick=True),
        classes.Line("packed, over padding", PACKED, 1e-9, 1e9, peer="padded", quick=True),
        classes.Line("paged", CACHED, 1e8, 1e9, "speed", "pages of 16", quick=True),
        classes.Line("lacking", replace(SMALL, isa="abacus"), 1e-9, 1e9, quick=True),
    ]
    monkeypatch.setattr(
        classes, "lines", lambda quick, only="": [line for line in lines if only in line.name]
    )
    monkeypatch.setattr(classes, "memory_cases", lambda quick: [replace(SMALL, length=64, dropout=0.1)])
    monkeypatch.setattr(timer, "QUICK", MOMENT)
    monkeypatch.setattr(peak, "READ_BYTES", 2**10)
    return runpy.run_path(str(FOLDER / "run.py"))["main"]


def test_full_run_compares_with_all_peers_and_draws(
    full_run: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, results_file = tmp_path / "ratios.png", tmp_path / "results.json"
    arguments = ["--quick", "--threads", "1", "--peers", "torch,formula,loops"]
    assert full_run([*arguments, "--png", str(picture), "--json", str(results_file)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = json.loads(results_file.read_text(encoding="utf-8"))["rows"]
    assert [row["length"] for row in rows] == [8, 16]
    assert set(rows[0]["ratios"]) == {"torch", "formula", "loops"}
    assert str(picture) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tables", "tiny", "--png", "x.png"], "which --tables leaves out"),
        (["--png", "x.txt"], "must end in .png"),
        (["--only", "packed"], "--only packed needs --classes"),
        (["--classes", "--only", "unheard"], "the classes are plain, longer, elsewhere"),
    ],
)
def test_full_run_refuses_before_measuring(
    full_run: Main, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert full_run(["--quick", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tables", "huge"], "no huge; there is tiny, lengths"),
        (["--classes", "--tables", "tiny"], "not allowed with"),
    ],
)
def test_full_run_refuses_such_tables(
    full_run: Main, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        full_run(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_tables_hold_cases_without_repetition() -> None:
    for name, table in tables.TABLES.items():
        found = table()
        assert found, name
        assert len(set(found)) == len(found), name


def test_the_classes_are_held_against_targets_and_goals(
    full_run: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The memory is not that of processes of their own, which take seconds.
    monkeypatch.setattr(memory, "alone", lambda measure, *arguments: measure(*arguments))
    picture, results_file = tmp_path / "ratios.png", tmp_path / "results.json"
    arguments = ["--classes", "--quick", "--threads", "1", "--png", str(picture), "--json", str(results_file)]
    assert full_run(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr().out
    assert "1 of 8 rows reach their goal, 4 their target, 2 miss it, 1 could not be measured" in printed
    assert "misses: elsewhere" in printed
    assert "cannot run the instruction set abacus" in printed
    data = json.loads(results_file.read_text(encoding="utf-8"))
    lines = {line["class"]: line for line in data["lines"]}
    assert [line["reached"] for line in lines.values()] == [
        *("target", "goal", "MISS", "target", "target", "target", "MISS", "-")
    ]
    assert lines["plain"]["value"] == lines["plain"]["ratios"]["torch"]["median"]
    assert lines["decode"]["value"] == lines["decode"]["contenders"]["selfattn_ext"]["of_read"] > 0
    packed, padded, paged = (lines[name] for name in ("packed", "packed, over padding", "paged"))
    assert packed["ratios"] == padded["ratios"]
    assert packed["value"] == packed["ratios"]["torch"]["median"]
    assert padded["value"] == padded["ratios"]["padded"]["median"]
    assert paged["value"] == 1 / paged["ratios"]["pages of 16"]["median"]
    assert paged["reading"]["rounds"] >= MOMENT.min_rounds
    assert lines["elsewhere"]["peak"]["isa"] == "scalar"
    assert lines["plain"]["peak"]["isa"] in [peak["isa"] for peak in data["peaks"] if "isa" in peak]
    for line in lines.values():
        for contender in line["contenders"].values():
            assert contender["refused"] or contender["error"] < 1e-5
    if memory.available():
        assert set(data["memory"][0]["extra_bytes"]) == {"selfattn_ext", "torch"}


def test_some_classes(full_run: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert full_run(["--classes", "--quick", "--threads", "1", "--only", "packed"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 2 rows reach their goal, 2 their target" in printed
    assert "extra memory" not in printed


def test_every_class_has_a_target_below_its_goal_and_a_quick_line() -> None:
    lines = classes.lines()
    assert len({(line.name, line.case) for line in lines}) == len(lines)
    assert all(0 < line.target < line.goal for line in lines)
    assert {line.name for line in lines} == {line.name for line in classes.lines(quick=True)}
    assert all(line.case.isa == "avx2" for line in lines if line.environment)


def test_a_new_process_has_its_own_environment() -> None:
    assert elsewhere.in_new_process({"SELFATTN_TEST": "1"}, os.getenv, "SELFATTN_TEST") == "1"
    assert "SELFATTN_TEST" not in os.environ
