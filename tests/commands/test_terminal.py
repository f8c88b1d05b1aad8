"""Progress where people wait, on a terminal and without one; aligned tables; paths of output."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfattn_ext import terminal
from selfattn_ext.build import jit
from selfattn_ext.commands import check
from selfattn_ext.commands.cli import main
from selfattn_ext.flex import compiler
from selfattn_ext.terminal import CommandError, Progress, check_output, table, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[io.StringIO, Terminal])
def stream(request: pytest.FixtureRequest) -> io.StringIO:
    return request.param()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves."""
    moved = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: moved.now)
    monkeypatch.delenv("SELFATTN_QUIET", raising=False)
    return moved


def on_a_terminal(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what a call writes to stderr where that is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side has been closed
            while part := os.read(ours, 4096):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", stderr)
        changed.setenv("COLUMNS", "80")
        call()
    reader.join()
    os.close(ours)
    return b"".join(written).decode()


class TestProgress:
    def test_redraws_one_line_on_a_terminal(
        self, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        stream = Terminal()
        with Progress("working", 4, stream) as progress:
            assert "0/4" in stream.getvalue()  # the first part may take long
            for done in range(1, 5):
                clock.now += 30
                progress.update(done, "a note that is much longer than the terminal is wide, or nearly so")
        text = stream.getvalue()
        assert text.count("\n") == 1
        assert text.endswith("\n")
        drawn = text.split("\r")
        assert all(len(line.rstrip()) < 60 for line in drawn)
        for part, line in zip(("1:30 left", "1:00 left", "0:30 left", "in 2:00"), drawn[2:], strict=True):
            assert part in line

    def test_writes_few_lines_into_a_log(self, clock: SimpleNamespace) -> None:
        stream = io.StringIO()
        with Progress("working", 1000, stream) as progress:
            for done in range(1, 1001):
                clock.now += 7.2
                progress.update(done)
        assert stream.getvalue().splitlines() == [
            "working 200/1000  1:36:00 left",
            "working 400/1000  1:12:00 left",
            "working 600/1000  48:00 left",
            "working 800/1000  24:00 left",
            "working 1000/1000  in 2:00:00",
        ]

    def test_knows_of_an_end_before_the_last_part(self, clock: SimpleNamespace) -> None:
        stream = io.StringIO()
        with Progress("working", 5, stream) as progress:
            clock.now += 10
            progress.update(1, "a note", most=25.0)
        assert stream.getvalue() == "working 1/5  0:25 left  a note\n"

    def test_is_silent_if_asked(self, stream: io.StringIO) -> None:
        with terminal.quiet(), Progress("working", 1, stream) as progress:
            progress.update(1)
        assert stream.getvalue() == ""
        assert not terminal.is_quiet()


class TestWaiting:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(terminal, "PATIENCE", 0.0)
        monkeypatch.delenv("SELFATTN_QUIET", raising=False)

    def until_it_writes(self, stream: io.StringIO) -> None:
        for _ in range(1000):
            if stream.getvalue():
                return
            threading.Event().wait(0.01)

    def test_counts_seconds_on_a_terminal(self) -> None:
        stream = Terminal()
        with waiting("working", stream):
            self.until_it_writes(stream)
        first, *others = stream.getvalue().split("\r")[1:]
        assert first == "working, 0:01"
        assert others[-1].startswith("working, 0:0")
        assert others[-1].endswith("\n")

    def test_says_it_once_in_a_log(self) -> None:
        stream = io.StringIO()
        with waiting("working", stream):
            self.until_it_writes(stream)
        assert stream.getvalue() == "working\n"

    def test_says_nothing_of_what_is_quick_or_quiet(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with terminal.quiet(), waiting("working", stream):
            threading.Event().wait(0.05)
        monkeypatch.setattr(terminal, "PATIENCE", 60.0)
        with waiting("working", stream):
            pass
        assert stream.getvalue() == ""

    def test_the_first_call_of_a_function_says_what_it_does(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def compile_slowly(command: list[str]) -> None:
            threading.Event().wait(0.2)
            Path(command[-1]).touch()

        monkeypatch.setattr(compiler, "_run", compile_slowly)
        assert compiler._compiled("") == b""
        assert capsys.readouterr().err == (
            "selfattn_ext: compiling a function of scores, once for all processes\n"
        )


class TestCommands:
    @pytest.fixture(autouse=True)
    def _one_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (case,) = (case for case in check.cases(0) if case.name == "cache in pages, one token")
        monkeypatch.setattr(check, "cases", lambda seed: [case])

    def test_check_redraws_a_bar_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = on_a_terminal(lambda: main(["check"]), monkeypatch).split("\r")
        assert drawn[1].startswith("checking [......")
        assert re.match(r"checking \[#+\] 4/4  in \d:\d\d  cache in pages", drawn[-2])
        assert drawn[-1] == "\n"  # the terminal's driver writes \r\n

    def test_quiet_commands_print_results_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check"]) == 0
        with_progress = capsys.readouterr()
        assert "checking 4/4  in 0:" in with_progress.err
        assert main(["check", "--quiet"]) == 0
        assert capsys.readouterr() == (with_progress.out, "")

    def test_a_build_at_run_time_is_silent_if_asked(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = SimpleNamespace(cuda=False, architectures=[])
        with terminal.quiet():
            jit._begin(plan, "no library", 2, 2)
        assert capsys.readouterr() == ("", "")


def test_table_aligns_words_left_and_numbers_right() -> None:
    text = table(["name", "ms"], [["a", "1.5"], ["long name", "12.25"]])
    assert text.splitlines() == [
        "name          ms",
        "---------  -----",
        "a            1.5",
        "long name  12.25",
    ]


def test_headings_of_several_lines_stand_at_the_bottom() -> None:
    assert table(["name", "their\ntime"], [["a", "1.5"]]).splitlines() == [
        "      their",
        "name   time",
        "----  -----",
        "a       1.5",
    ]


def test_output_paths_are_checked_without_writing(tmp_path: Path) -> None:
    check_output("--out", tmp_path / "a" / "b.png", (".png",))
    assert (tmp_path / "a").is_dir()
    assert not (tmp_path / "a" / "b.png").exists()
    with pytest.raises(CommandError, match=r"must end in \.png"):
        check_output("--out", tmp_path / "b.txt", (".png",))
    with pytest.raises(CommandError, match="cannot be written"):
        check_output("--out", tmp_path)
