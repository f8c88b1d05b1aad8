"""Terminal output: progress where people wait, aligned tables, an error for the user."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO


class CommandError(Exception):
    """The command cannot do what was asked; the message is for the user.

    Args:
        message: one or two lines that say what was given and what is allowed or missing.
        exit_code: 2 for a mistake in the arguments, as in argparse; 1 for something that this machine lacks.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_QUIET = "SELFATTN_QUIET"


def is_quiet() -> bool:
    """Tells whether the environment variable SELFATTN_QUIET asks for no progress."""
    return os.environ.get(_QUIET, "") not in ("", "0")


@contextlib.contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """Shows no progress in the block if ``wanted``, in processes that it starts neither."""
    before = os.environ.get(_QUIET)
    if wanted:
        os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ[_QUIET]
        elif wanted and before is not None:
            os.environ[_QUIET] = before


class Progress:
    """A progress bar on stderr, with the time that is left, or at the end the time that it took.

    On a terminal one line is redrawn in place, at most ten times a second. Elsewhere (a log file, a pipe) it
    writes only ``log_lines`` plain lines, so that logs stay short. It writes nothing where :func:`is_quiet`.

    Args:
        label: name of the work, shown before the bar.
        total: number of units of work, at least 1.
        stream: where to draw; stderr by default, so that stdout holds only results.
        log_lines: how many lines a log gets.
    """

    _REDRAW_SECONDS = 0.1

    def __init__(self, label: str, total: int, stream: TextIO | None = None, *, log_lines: int = 5) -> None:
        self._label = label
        self._total = max(1, total)
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._log_lines = log_lines
        self._quiet = is_quiet()
        self._next_redraw = 0.0
        self._lines_logged = 0
        self._line = ""
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._in_place and not self._quiet:
            self._redraw(0, "")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._in_place and self._line:
            self._stream.write("\n")
            self._stream.flush()

    def update(self, done: int, note: str = "", most: float = math.inf) -> None:
        """Shows that ``done`` of the units are finished.

        Args:
            done: how many units are finished.
            note: follows the bar.
            most: the seconds after which the work ends, finished or not.
        """
        finished = done >= self._total
        now = time.monotonic()
        if self._quiet:
            return
        note = _spaced(_duration(now - self._start, done, self._total, most)) + _spaced(note)
        if self._in_place:
            if finished or now >= self._next_redraw:
                self._redraw(done, note)
                self._next_redraw = now + self._REDRAW_SECONDS
        elif done * self._log_lines >= (self._lines_logged + 1) * self._total:
            self._lines_logged = done * self._log_lines // self._total
            self._stream.write(f"{self._label} {done}/{self._total}{note}\n")
            self._stream.flush()

    def _redraw(self, done: int, note: str) -> None:
        # One column stays free: a terminal that wraps at its last column would scroll on every redraw.
        columns = shutil.get_terminal_size().columns - 1
        count = f"{done}/{self._total}{note}"
        width = max(0, min(30, columns - len(self._label) - len(count) - 4))
        filled = width * min(done, self._total) // self._total
        line = f"{self._label} [{'#' * filled}{'.' * (width - filled)}] {count}"[: max(0, columns)]
        self._stream.write("\r" + line.ljust(len(self._line)))
        self._stream.flush()
        self._line = line


#: The seconds after which :func:`waiting` says something, and :class:`Progress` estimates.
PATIENCE = 1.0


@contextlib.contextmanager
def waiting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Says what the block does if that takes longer than a second, for work that has no parts to count.

    On a terminal one line of stderr shows the seconds so far. Elsewhere it is one plain line. Nothing is
    written where :func:`is_quiet`.
    """
    if is_quiet():
        yield
        return
    to = sys.stderr if stream is None else stream
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, to, ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(what: str, stream: TextIO, ended: threading.Event) -> None:
    start = time.monotonic()
    if ended.wait(PATIENCE):
        return
    if not stream.isatty():
        stream.write(f"{what}\n")
        stream.flush()
        return
    over = False
    while not over:
        over = ended.wait(1.0)
        line = f"{what}, {_clock(time.monotonic() - start)}"
        stream.write("\r" + line[: shutil.get_terminal_size().columns - 1] + ("\n" if over else ""))
        stream.flush()


def _duration(spent: float, done: int, total: int, most: float) -> str:
    """Returns the time that the work took, or the time that is left if all parts take about as long."""
    if done >= total:
        return f"in {_clock(spent)}"
    if done == 0 or spent < PATIENCE:
        return ""
    return f"{_clock(min(most, spent / done * (total - done)))} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _spaced(note: str) -> str:
    return f"  {note}" if note else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligns columns: the first ``left`` columns are flush left, the others (numbers) flush right.

    A heading may have several lines; the last lines of all stand side by side.
    """
    heads = [cell.split("\n") for cell in header]
    height = max(map(len, heads))
    headings = list(zip(*([""] * (height - len(cell)) + cell for cell in heads), strict=True))
    widths = [max(len(row[column]) for row in [*headings, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([*map(line, headings), "  ".join("-" * width for width in widths), *map(line, rows)])


PICTURE_FORMATS = (".png", ".pdf", ".svg")


def check_output(option: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Makes the folder of an output file, and reports early what would otherwise fail after minutes of work.

    Raises:
        CommandError: the name ends in none of ``suffixes``, or the file cannot be written there.
    """
    target = path.expanduser().absolute()
    if suffixes and target.suffix.lower() not in suffixes:
        raise CommandError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {path}: cannot make its folder: {error.strerror or error}") from error
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandError(f"{option} {path}: cannot be written")


def describe(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
