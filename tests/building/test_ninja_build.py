"""How ninja is run: its messages, and that no process waits for one that has ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfattn_ext.build import ninja_build, toolchain
from selfattn_ext.terminal import Progress

#: Three files; the command for "second" prints something.
THREE = """
rule make
  command = $say touch $out
build first: make
build second: make
  say = echo a warning;
build third: make | first second
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "build.ninja").write_text(THREE)
    return tmp_path


def begin(files: int) -> Progress:
    print(f"{files} files", file=sys.stderr)
    return Progress("made", files)


def run(folder: Path) -> str:
    with toolchain.environment():
        return ninja_build.run(str(folder), begin)


class TestRun:
    def test_shows_how_far_it_is(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(folder) == "a warning"
        lines = capsys.readouterr().err.splitlines()
        assert [line.split("  ")[0] for line in lines] == ["3 files", "made 1/3", "made 2/3", "made 3/3"]
        assert run(folder) == ""
        assert capsys.readouterr().err == ""
        (folder / "first").unlink()
        assert run(folder) == ""
        assert capsys.readouterr().err.splitlines()[0] == "2 files"

    def test_names_the_source_that_is_done(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        compiles = "c++ -I first -c some/folder/sum.cpp -o"
        (folder / "build.ninja").write_text(THREE.replace("$say touch", f"$say : {compiles} && touch"))
        run(folder)
        lines = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r"made 1/3(  \d:\d\d left)?  sum\.cpp", lines[1])

    def test_failure(self, folder: Path) -> None:
        (folder / "build.ninja").write_text(THREE.replace("echo a warning", "echo an error; exit 1"))
        with pytest.raises(RuntimeError, match="an error"):
            run(folder)

    def test_in_place_of_torch(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        torch_own = object()
        cpp_extension = SimpleNamespace(_run_ninja_build=torch_own)
        with toolchain.environment(), ninja_build.shown(cpp_extension, begin, echo=True):
            cpp_extension._run_ninja_build(str(folder), True, error_prefix="Error")
        assert cpp_extension._run_ninja_build is torch_own
        assert capfd.readouterr().out == "a warning\n"

    def test_torch_has_what_is_replaced(self) -> None:
        from torch.utils import cpp_extension

        assert callable(cpp_extension._run_ninja_build)


@pytest.mark.parametrize(
    ("files", "seconds", "variable", "expected"),
    [
        (1, 5, "1", "1 file on 1 processor, about 1 minute"),
        (95, 360, "2", "95 files on 2 processors, about 3 minutes"),
        (159, 7200, "", "159 files on 2 processors, about 60 minutes"),
        (159, 7200, "99", "159 files on 2 processors, about 60 minutes"),
    ],
)
def test_estimate(
    files: int, seconds: float, variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", variable)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert ninja_build.estimate(files, seconds) == expected


def build_until_killed(folder: Path, begun: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs behind them ignore it
    with toolchain.environment(), ninja_build.alone_in(folder) as kept_open:
        (folder / "lock").touch()  # torch does the same
        begun.send(True)
        ninja_build.run(str(folder), lambda files: nullcontext(), kept_open)


class TestAlone:
    def test_waits_for_who_was_first(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        order = []

        def second() -> None:
            with ninja_build.alone_in(tmp_path):
                order.append("second")

        with ninja_build.alone_in(tmp_path):
            thread = threading.Thread(target=second)
            thread.start()
            time.sleep(0.1)
            order.append("first")
        thread.join(timeout=60)
        assert order == ["first", "second"]
        assert f"waiting for another process that compiles in {tmp_path}" in capsys.readouterr().err

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_not_for_who_is_gone(self, how: signal.Signals, tmp_path: Path) -> None:
        commands = "".join(f"build {i}: wait\n" for i in range(99))
        (tmp_path / "build.ninja").write_text(f"rule wait\n command = sleep 1; touch $out\n{commands}")
        fork = multiprocessing.get_context("fork")
        begun, told = fork.Pipe(duplex=False)
        process = fork.Process(target=build_until_killed, args=(tmp_path, told))
        process.start()
        assert begun.recv()
        os.kill(process.pid, how)
        process.join()
        with ninja_build.alone_in(tmp_path):
            assert not (tmp_path / "lock").exists()
            assert not (tmp_path / "98").exists()  # only commands that had begun were waited for


def test_damaged_library_is_made_again(tmp_path: Path) -> None:
    library = tmp_path / "name.so"

    def check(damage: Callable[[], object]) -> None:
        library.write_bytes(b"content")
        ninja_build.seal(library)
        ninja_build.remove_damaged(library)
        assert library.exists()
        damage()
        ninja_build.remove_damaged(library)
        assert not library.exists()

    check(lambda: library.write_bytes(b"conten"))
    check(lambda: (tmp_path / "name.sha256").unlink())
    ninja_build.remove_damaged(library)
    ninja_build.seal(library)
