"""Deletes each synchronisation statement of the CUDA kernels in turn and looks whether the tests notice.

    python tests/emulator/mutate.py [--list] [--only TEXT] [--kernel simt|sm80] [--jobs N]

A mutant is one statement less: a barrier, a __syncwarp, a commit of copies, a wait for them. One build with
the race detector, of a copy of the sources, holds all of them: a statement there asks first whether it is the
one that SELFATTN_EMULATOR_LEFT_OUT numbers. A mutant runs a few problems under several schedules with copies
as late as they may be. It is killed when a problem fails, hangs, or changes a bit; a mutant that survives
either lacks a test, or the statement was not needed: EQUIVALENT holds those, with the reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The package of this checkout, and the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulator import build

_CALLS = "__syncthreads|__syncwarp|copy_async_commit|copy_async_wait(?:<[^>]*>)?"
#: A whole statement, on one line or more.
STATEMENT = re.compile(rf"(?<!\w)(?:\w+::)*(?:{_CALLS})\s*\([^;]*?\)\s*;")

#: Where a statement may go without any test noticing, and why: folder/file and statement -> reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("simt/forward.cuh", "__syncwarp();"): "a barrier of the block comes before the weights are read",
}

#: The cases that a kernel's files are judged by: schedule, copies, of how many one runs, and the first.
RUNS = {
    "forward_cases": [("fifo", "late", 3, 0), ("sticky", "random", 7, 0)],
    # The last are those of wide heads, which have kernels of their own.
    "backward_cases": [("fifo", "late", 5, 0), ("sticky", "random", 11, 0), ("fifo", "late", 3, -10)],
}
#: Million products of the largest case.
MOST = 7
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Mutant:
    file: Path  # relative to csrc
    line: int
    text: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def mutants() -> Iterator[Mutant]:
    """Every synchronisation statement of csrc/cuda."""
    for path in sorted((build.CSRC / "cuda").rglob("*.cuh")):
        if path.name.startswith("ptx_"):
            continue
        source = path.read_text(encoding="utf-8")
        for found in STATEMENT.finditer(source):
            line = source.count("\n", 0, found.start()) + 1
            if "//" in source.splitlines()[line - 1][: found.start() - source.rfind("\n", 0, found.start())]:
                continue  # a comment speaks of it
            text = " ".join(found[0].split())
            yield Mutant(path.relative_to(build.CSRC), line, text, found.start(), found.end())


def cases_of(file: Path) -> list[str]:
    """The modules that run a file's code; each backward comes after its forward."""
    if "backward" in file.parts or file.parts[1] in ("rows", "mask"):
        return ["backward_cases"]
    return ["backward_cases", "forward_cases"] if file.parts[1] == "simt" else ["forward_cases"]


def kernels_of(file: Path) -> list[str]:
    """The kernels that a file belongs to: by its folder, or both."""
    return [name for name in ("simt", "sm80") if name in file.parts] or ["simt", "sm80"]


def ways(file: Path) -> list[tuple[str, str]]:
    """Kernels with the cases that run a file's code."""
    return [(kernel, cases) for kernel in kernels_of(file) for cases in cases_of(file)]


def write(found: Sequence[Mutant], csrc: Path) -> None:
    """A copy of the sources in which each statement can be left out, by its number from 1.

    Files that are the same stay as they are, and so does what has been compiled.
    """
    texts = {}
    for path in build.CSRC.rglob("*.*"):
        texts[path.relative_to(build.CSRC)] = path.read_text(encoding="utf-8")
    # From the end of a file, so that the places of those before stay.
    for number, mutant in reversed(list(enumerate(found, 1))):
        source = texts[mutant.file]
        statement = source[mutant.start : mutant.end]
        asked = f"{{ if (!selfattn::emulator::leaves_out({number})) {statement} }}"
        texts[mutant.file] = source[: mutant.start] + asked + source[mutant.end :]
    for stale in {path.relative_to(csrc) for path in csrc.rglob("*.*")} - texts.keys():
        (csrc / stale).unlink()
    for name, text in texts.items():
        path = csrc / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def run(library: Path, kernel: str, cases: str, left_out: int = 0) -> tuple[str, str]:
    """The results of all runs without a statement, and how the first that failed ended, or ""."""
    results = []
    for schedule, copies, every, first in RUNS[cases]:
        environment = build.environment(
            library,
            SELFATTN_KERNEL=kernel,
            SELFATTN_EMULATOR_SCHEDULE=schedule,
            SELFATTN_EMULATOR_COPIES=copies,
            SELFATTN_EMULATOR_LEFT_OUT=str(left_out),
        )
        command = [sys.executable, "-m", f"emulator.{cases}", str(every), str(first), str(MOST)]
        said, problem = follow(command, environment)
        if problem:
            return "", problem
        results.append(said)
    return "".join(results), ""


def follow(command: list[str], environment: dict[str, str]) -> tuple[str, str]:
    """What a process prints, and how its first case that failed ended, or ""; nothing runs after that."""
    lines = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        late = threading.Timer(LIMIT_SECONDS, process.kill)
        late.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "FAILED: " in line:
                process.kill()
                break
        code, in_time = process.wait(), late.is_alive()
        late.cancel()
        errors.seek(0)
        if "FAILED: " in "".join(lines[-1:]):
            return "", lines[-1].split("FAILED: ", 1)[1].strip()
        if code != 0:
            return "", (errors.read().strip().splitlines() or [f"exit {code}"])[-1] if in_time else "hangs"
    return "".join(lines), ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    parser.add_argument("--only", default="", help="mutants that contain this text")
    parser.add_argument("--kernel", choices=("simt", "sm80"), help="this kernel's mutants")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    # Numbered among all, so that one build serves every choice.
    found = list(mutants())
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(found, 1)
        if arguments.only in str(mutant) and arguments.kernel in (None, *kernels_of(mutant.file))
    ]
    if arguments.list:
        print("\n".join(str(mutant) for _, mutant in chosen))
        return

    folder = build.ROOT / "build" / "mutants"
    write(found, folder / "csrc")
    objects = folder / "objects"
    library = build.build("library", "race", kernels_in=folder / "csrc", folder=objects, jobs=arguments.jobs)
    expected = {}
    for kernel, cases in sorted({way for _, mutant in chosen for way in ways(mutant.file)}):
        expected[kernel, cases], problem = run(library, kernel, cases)
        if problem:
            sys.exit(f"{kernel} fails {cases} with every statement: {problem}")

    survived = []
    for count, (number, mutant) in enumerate(chosen, 1):
        started = time.monotonic()
        reasons = []
        for way in ways(mutant.file):
            results, problem = run(library, *way, left_out=number)
            if problem or results != expected[way]:
                reasons.append(problem or "the results differ")
                break
        known = EQUIVALENT.get(("/".join(mutant.file.parts[-2:]), mutant.text))
        verdict = f"killed: {reasons[0][:160]}" if reasons else f"SURVIVED{f' ({known})' if known else ''}"
        if not reasons and known is None:
            survived.append(mutant)
        print(f"[{count}/{len(chosen)}, {time.monotonic() - started:.0f} s] {mutant}: {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {len(survived)} survived without a known reason")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
