"""Breaks the CUDA kernels in one place after the other, and looks whether the tests notice.

It deletes each synchronisation statement, each bound that keeps sequences of a packed backward apart, and
some terms of second derivatives, in turn.

    python simulators/cuda_emulator/mutate.py [--list] [--only TEXT] [--kernel simt|sm80|sm90] [--jobs N]

A mutant is one statement less: a barrier, a __syncwarp, a fence, an arrival, a commit of copies or
products, a wait for them; or one bound less (BOUNDS), or one term (TERMS). One build with the race
detector, of a copy of the sources, holds all of them: each asks there first whether it is the one that
SELFATTN_EMULATOR_LEFT_OUT numbers. A mutant runs a few problems under several schedules with copies as late
as they may be. It is killed when a problem fails, hangs, or changes a bit; a mutant that survives either
lacks a test, or was not needed: EQUIVALENT holds those, with the reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The package of this checkout, and the tests.
for _folder in (".", "simulators", "tests/support"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / _folder))

from cuda_emulator import build  # noqa: E402

_CALLS = "|".join(
    [
        "__syncthreads|__syncwarp|copy_async_commit|copy_async_wait(?:<[^>]*>)?",
        "barrier_init_fence|barrier_arrive|barrier_arrive_expecting|barrier_wait",
        "fence_async_proxy|sync_threads|arrive_threads",
        "products_fence|products_commit|products_wait(?:<[^>]*>)?",
        # Functions of sm90 that hold one of these or two.
        "wait_for_warp|arrive_of_warp|show|finish_queries|take_turn|give_turn",
        "leave_(?:summed|multiplied|last)|finish_sums(?:<[^>]*>)?",
    ]
)
#: A whole statement, on one line or more; the beginning of a function's definition is none.
STATEMENT = re.compile(rf"(?<!\w)(?:\w+::)*(?:{_CALLS})\s*\([^;{{}}]*?\)\s*;")

#: Where sequences of a packed backward end: file below csrc/cuda, a bound that it holds once, what is there
#: without it.
BOUNDS = [
    ("mma/backward/backward_work.cuh", "(C::kOwnsQueries ? queries : keys) - first_row", "C::kRows"),
    (
        "mma/backward/backward_work.cuh",
        "(C::kOwnsQueries ? keys : queries) - passing.first",
        "C::kTileColumns",
    ),
    ("mma/backward/backward_place.cuh", "min(row_of_tile, this->work.rows - 1)", "row_of_tile"),
    ("mma/backward/backward_place.cuh", "min(end, work.end - at.passing.first)", "end"),
    ("mma/backward/backward_place.cuh", "row_of_tile >= work.rows", "false"),
    ("mma/backward/backward_place.cuh", "at.work.rows < C::kRows", "false"),
    ("mma/backward/backward_place.cuh", "row_of_tile < at.work.rows", "true"),
    ("mma/backward/backward_place.cuh", "query < at.queries()", "true"),
    ("sm80/backward/sm80_gradients.cuh", "work_.rows <= 0", "false"),
    (
        "mma/backward/backward_epilogue.cuh",
        "min(lane.first_row + C::kWarpRows, work.rows)",
        "lane.first_row + C::kWarpRows",
    ),
    ("sm80/backward/sm80_mask_gradient.cuh", "rows <= 0", "false"),
    ("sm80/backward/sm80_mask_gradient.cuh", "passing.first >= range.end", "false"),
    ("sm80/backward/sm80_mask_gradient.cuh", "lane().first_row >= rows", "false"),
    ("mma/backward/backward_statistics.cuh", "query < sequence.queries", "true"),
    ("mma/backward/backward_statistics.cuh", "query >= round_up(sequence.queries, kQueryPadding)", "false"),
    ("rows/row_gradients.cuh", "query_of_sequence >= sequence.queries", "false"),
    ("simt/tangents.cuh", "rows_left <= 0", "false"),
    ("simt/tangents.cuh", "row >= rows_left", "false"),
    ("simt/tangent_tile.cuh", "query < tile.rows()", "true"),
]

#: Terms of second derivatives, in the same form.
TERMS = [
    ("simt/tangent_tile.cuh", "n.delta * pair.tangent", "T(0)"),
    ("simt/tangent_tile.cuh", "pair.tangent - n.mean", "pair.tangent"),
    ("simt/tangent_tile.cuh", "keep * of_tangent", "of_tangent"),
    ("simt/tangent_tile.cuh", "a - n.correction", "a"),
    ("simt/tangent_tile.cuh", "curvature * first * dot_tangent", "T(0)"),
    ("simt/tangents.cuh", "multiply_add(weight, tangent, sum)", "sum"),
    ("simt/tangents.cuh", "multiply_add(weight, of_sink, sum)", "sum"),
]

#: Where a statement may go without any test noticing, and why: folder/file and statement -> reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("simt/forward.cuh", "__syncwarp();"): "a barrier of the block comes before the weights are read",
    ("simt/tangents.cuh", "rows_left <= 0"): "as that of the backward, below",
    (
        "backward/sm90_gradients.cuh",
        "leave_last();",
    ): "behind sm90's careful pass nobody asks for the place any more; behind the other it is missed",
    (
        "backward/sm80_gradients.cuh",
        "work_.rows <= 0",
    ): "a block without rows writes nothing; it leaves to save time",
    (
        "backward/backward_place.cuh",
        "at.work.rows < C::kRows",
    ): "visible_columns hides the last row as well; this is quicker",
    (
        "backward/backward_place.cuh",
        "row_of_tile >= work.rows",
    ): "rows beyond the last have a weight of 0 or are not written",
    (
        "backward/backward_place.cuh",
        "row_of_tile < at.work.rows",
    ): "rows beyond the last are given the last one's bits, and visible_columns hides them",
    (
        "backward/sm80_mask_gradient.cuh",
        "rows <= 0",
    ): "an item without rows adds zeros; leaving it saves time",
    (
        "backward/sm80_mask_gradient.cuh",
        "passing.first >= range.end",
    ): "an item that nobody sees adds zeros; leaving it saves time",
    ("backward/sm80_mask_gradient.cuh", "lane().first_row >= rows"): "the same of a warp's rows",
    (
        "backward/backward_statistics.cuh",
        "query < sequence.queries",
    ): "what is worked out of queries beyond the last is hidden, whatever it is",
}

#: The kernels, and the compute capability that they run on here.
KERNELS = {"simt": 80, "sm80": 80, "sm90": 90}

#: The cases that a kernel's files are judged by: schedule, copies, of how many one runs, and the first.
RUNS = {
    "forward_cases": [("fifo", "late", 3, 0), ("sticky", "random", 7, 0)],
    # The last are those of wide heads, which have kernels of their own.
    "backward_cases": [("fifo", "late", 5, 0), ("sticky", "random", 11, 0), ("fifo", "late", 3, -10)],
    "sequence_cases": [("fifo", "late", 2, 0), ("fifo", "late", 2, 1)],
    # The last are sequences.
    "tangent_cases": [("fifo", "late", 7, 0), ("fifo", "late", 4, -35)],
    # Those of of_statements().
    "hopper_cases": [("fifo", "late", 1, -8), ("sticky", "random", 1, -8)],
    "hopper_backward_cases": [("fifo", "late", 1, -11), ("sticky", "random", 1, -11)],
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
    instead: str = ""  # of an expression

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def mutants() -> Iterator[Mutant]:
    """Every synchronisation statement of csrc/cuda, the bounds and the terms."""
    for name, bound, instead in [*BOUNDS, *TERMS]:
        path = build.CSRC / "cuda" / name
        source = path.read_text(encoding="utf-8")
        if source.count(bound) != 1:
            raise ValueError(f"{path} holds {bound!r} {source.count(bound)} times")
        start = source.index(bound)
        line = source.count("\n", 0, start) + 1
        yield Mutant(path.relative_to(build.CSRC), line, bound, start, start + len(bound), instead)
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
    if file.stem.startswith("tangent"):
        return ["tangent_cases"]
    if file.parts[1] == "sm90":
        if file.name in ("ring.cuh", "mask_tiles.cuh"):
            return ["hopper_cases", "hopper_backward_cases"]
        return ["hopper_backward_cases" if "backward" in file.parts else "hopper_cases"]
    if "backward" in file.parts or file.parts[1] in ("rows", "mask"):
        return ["backward_cases"]
    return ["backward_cases", "forward_cases"] if file.parts[1] == "simt" else ["forward_cases"]


def kernels_of(file: Path) -> list[str]:
    """The kernels that a file belongs to: by its folder, or both. sm80 stands for mma, too."""
    if "mma" in file.parts:
        return ["sm80"]
    return [name for name in KERNELS if name in file.parts] or ["simt", "sm80"]


class Way(NamedTuple):
    """How a mutant is run."""

    variant: str  # of the build
    kernel: str
    cases: str


def ways(mutant: Mutant, variants: Iterable[str]) -> list[Way]:
    """The kernels with the cases that run a mutant's code; in the asan variant only those of bounds."""
    cases = cases_of(mutant.file)
    if mutant.instead and cases != ["tangent_cases"]:
        cases = ["sequence_cases"]
    used = [name for name in variants if name == "race" or mutant.instead]
    return [
        Way(variant, kernel, name) for variant in used for kernel in kernels_of(mutant.file) for name in cases
    ]


def write(found: Sequence[Mutant], csrc: Path) -> None:
    """A copy of the sources in which each statement can be left out, by its number from 1.

    Files that are the same stay as they are, and so does what has been compiled.
    """
    texts = {}
    for path in build.CSRC.rglob("*.*"):
        texts[path.relative_to(build.CSRC)] = path.read_text(encoding="utf-8")
    # From the end of a file, so that the places of those before stay.
    for number, mutant in sorted(enumerate(found, 1), key=lambda it: it[1].start, reverse=True):
        source = texts[mutant.file]
        statement = source[mutant.start : mutant.end]
        left_out = f"selfattn::emulator::leaves_out({number})"
        if mutant.instead:
            asked = f"({left_out} ? ({mutant.instead}) : ({statement}))"
        else:
            # An expression, which may follow "return".
            asked = f"({left_out} ? void() : {statement.rstrip('; ')});"
        texts[mutant.file] = source[: mutant.start] + asked + source[mutant.end :]
    for stale in {path.relative_to(csrc) for path in csrc.rglob("*.*")} - texts.keys():
        (csrc / stale).unlink()
    for name, text in texts.items():
        path = csrc / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def run(library: Path, way: Way, left_out: int = 0) -> tuple[str, str]:
    """The results of all runs without a statement, and how the first that failed ended, or ""."""
    results = []
    preloaded = (build.sanitizers() or {}) if way.variant == "asan" else {}
    for schedule, copies, every, first in RUNS[way.cases]:
        environment = build.environment(
            library,
            SELFATTN_KERNEL=way.kernel,
            SELFATTN_EMULATOR_CAPABILITY=str(KERNELS[way.kernel]),
            SELFATTN_EMULATOR_SCHEDULE=schedule,
            SELFATTN_EMULATOR_COPIES=copies,
            SELFATTN_EMULATOR_LEFT_OUT=str(left_out),
            **preloaded,
        )
        command = [sys.executable, "-m", f"cuda_emulator.{way.cases}", str(every), str(first), str(MOST)]
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
    parser.add_argument("--kernel", choices=tuple(KERNELS), help="this kernel's mutants")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    # Numbered among all, so that one build serves every choice.
    found = list(mutants())
    # What a bound keeps from being read may make no difference to any result.
    variants = ["race", "asan"] if build.sanitizers() is not None else ["race"]
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
    libraries = {
        variant: build.build(
            "library", variant, kernels_in=folder / "csrc", folder=objects, jobs=arguments.jobs
        )
        for variant in variants
        if variant == "race" or any(mutant.instead for _, mutant in chosen)
    }
    expected = {}
    for way in sorted({way for _, mutant in chosen for way in ways(mutant, libraries)}):
        expected[way], problem = run(libraries[way.variant], way)
        if problem:
            sys.exit(f"{way} fails with every statement: {problem}")

    survived = []
    for count, (number, mutant) in enumerate(chosen, 1):
        started = time.monotonic()
        reasons = []
        for way in ways(mutant, libraries):
            results, problem = run(libraries[way.variant], way, left_out=number)
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
