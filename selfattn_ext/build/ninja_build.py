"""Runs ninja for torch's build code: shows progress, and lets one process at a time build in a folder.

setup.py loads this file by its path and jit.py imports it, so it needs neither torch nor the rest of the
package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_STATUS = {"NINJA_STATUS": "[%f/%t] "}
_FINISHED = re.compile(r"^\[(\d+)/(\d+)\] ", re.M)
_SOURCE = re.compile(r" -c (?:.*/)?([\w.-]+\.(?:cpp|cu))\b")

#: A function of the number of files that ninja is to make: it tells users, and returns a progress bar.
Begin = Callable[[int], Any]


def estimate(files: int, processor_seconds: float) -> str:
    """Tells users how many files are made, and about how long that takes on this machine."""
    processors = _processors()
    minutes = max(1, round(processor_seconds / processors / 60))
    return (
        f"{files} {'file' if files == 1 else 'files'} on "
        f"{processors} {'processor' if processors == 1 else 'processors'}, "
        f"about {minutes} {'minute' if minutes == 1 else 'minutes'}"
    )


def _processors() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, _jobs() or there))


def _jobs() -> int:
    """How many compilers may run at once, read from MAX_JOBS as torch reads it; 0 if ninja decides."""
    wanted = os.environ.get("MAX_JOBS", "")
    return int(wanted) if wanted.isdigit() else 0


@contextlib.contextmanager
def shown(
    cpp_extension: Any, begin: Begin, *, echo: bool = False, kept_open: Sequence[int] = ()
) -> Iterator[None]:
    """Make torch's build code, the module torch.utils.cpp_extension, run ninja by :func:`run`.

    ``echo`` prints the compilers' warnings. If torch's function has another name, nothing is shown.
    """
    before = getattr(cpp_extension, "_run_ninja_build", None)

    def instead(build_directory: str, verbose: bool, error_prefix: str) -> None:
        try:
            said = run(build_directory, begin, kept_open)
        except RuntimeError as error:
            raise RuntimeError(f"{error_prefix}: {error}") from None
        if echo and said:
            print(said, flush=True)

    cpp_extension._run_ninja_build = instead
    try:
        yield
    finally:
        cpp_extension._run_ninja_build = before


def run(folder: str, begin: Begin, kept_open: Sequence[int] = ()) -> str:
    """Bring everything that the folder's build.ninja lists up to date. Returns the compilers' warnings.

    Args:
        folder: where build.ninja is.
        begin: see :data:`Begin`; not called where there is nothing to do.
        kept_open: file descriptors that ninja and the compilers hold until they end.

    Raises:
        RuntimeError: something does not compile; the message holds the compiler's output.
    """
    environment = {**os.environ, **_STATUS}
    # ninja itself tells how many files there are only when the first has been made.
    listed = subprocess.run(
        ["ninja", "-n"], cwd=folder, env=environment, capture_output=True, text=True, errors="replace"
    ).stdout
    counts = _FINISHED.findall(listed)
    command = ["ninja", "-v", *(["-j", str(_jobs())] if _jobs() else [])]
    said = []
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(begin(int(counts[-1][1]))) if counts else None
        ninja = stack.enter_context(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", pass_fds=kept_open,
            )
        )  # fmt: skip
        assert ninja.stdout is not None
        try:
            for line in ninja.stdout:
                finished = _FINISHED.match(line)
                if finished is None:
                    said.append(line)
                elif progress is not None:
                    progress.update(int(finished[1]), _compiled(line))
        except BaseException:
            ninja.terminate()  # it ends the compilers and removes what they have not finished
            raise
    if ninja.returncode != 0:
        raise RuntimeError("".join(said).strip())
    return "".join(line for line in said if not line.startswith("ninja: ")).strip()


def _compiled(command: str) -> str:
    """The source that a command has compiled, if it did."""
    source = _SOURCE.search(command)
    return source[1] if source else ""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[list[int]]:
    """One process at a time builds in a folder. Yields what ninja and the compilers are to keep open.

    If a process is killed, the system releases its lock as soon as its compilers have ended, too. torch's own
    lock is a file, which a killed process leaves behind and for which torch would wait for ever.
    """
    torch_lock = folder / "lock"
    with (folder / "selfattn_ext.lock").open("a") as turn:
        try:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _tell(f"selfattn_ext: waiting for another process that compiles in {folder}")
                fcntl.flock(turn, fcntl.LOCK_EX)
        except OSError:
            # Some file systems have no locks. On these, only torch's file keeps processes apart.
            if torch_lock.exists():
                _tell(f"selfattn_ext: another process is compiling; if there is none, delete {torch_lock}")
        else:
            torch_lock.unlink(missing_ok=True)
        yield [turn.fileno()]


def remove_damaged(library: Path) -> None:
    """Remove a library that does not fit its seal; ninja, which compares times, would not make it again."""
    if library.exists() and (not _seal(library).exists() or _seal(library).read_text() != _digest(library)):
        library.unlink()


def seal(library: Path) -> None:
    """Keep the digest of a library that has been loaded once; see :func:`remove_damaged`."""
    if library.exists():
        _seal(library).write_text(_digest(library))


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
