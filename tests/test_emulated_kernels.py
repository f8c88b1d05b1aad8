"""The CUDA kernels, compiled for the emulator of tests/emulator, on the CPU: every option at the lengths and
head dims around the edges of tiles, under different schedules, and existing tests of the package.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from emulator import build

TESTS = Path(__file__).parent
KERNELS = [name for name in ("simt", "sm80") if (build.CSRC / "cuda" / name).is_dir()]

#: The modules of tests/emulator that run cases.
CASES = ("forward_cases", "backward_cases", "sequence_cases", "split_cases")

#: Schedule, asynchronous copies, and of how many cases one runs. All cases run once, as a device hardly ever
#: would: threads in any order, copies at the last moment; those of sequences, each of which is computed
#: twice, where the sanitizers run.
MAIN = ("random", "late", 1)
SHARE = {"sequence_cases": 3}
OTHERS = [("fifo", "eager", 6), ("lifo", "late", 6), ("sticky", "random", 6)]
RACE = ("fifo", "late")
ASAN = ("sticky", "late")
#: Of how many cases one runs under these two, which slow it down most.
SLOWED = {"forward_cases": 9, "backward_cases": 9, "sequence_cases": 3, "split_cases": 3}
#: Million products of the largest case that does.
MOST = 7

#: Existing tests that say something about a kernel that is forced, and pytest's expression for which of them
#: run. A line's modules share a process, as starting one takes longer than most of them.
CHOSEN = [
    ("test_options_pairwise.py test_dropout.py", ""),
    ("test_edge_cases.py test_determinism.py", ""),
    ("test_masks.py test_gradients.py", "not never_expanded"),
    # Every broadcast of a mask is among the cases, in sizes that take less time.
    ("test_special_numbers.py test_double_backward.py test_mask_gradient.py", "not broadcast and not groups"),
]


def environment(kernel: str, schedule: str, copies: str, variant: str = "plain") -> dict[str, str]:
    return build.environment(
        build.build("library", variant),
        SELFATTN_KERNEL=kernel,
        SELFATTN_EMULATOR_SCHEDULE=schedule,
        SELFATTN_EMULATOR_COPIES=copies,
        SELFATTN_EMULATOR_BANKS="1",
    )


def digests(
    cases: str, kernel: str, schedule: str, copies: str, every: int, variant: str = "plain", **variables: str
) -> dict[str, str]:
    """Runs cases, and returns a digest of the results of each."""
    choice = [str(every)] if variant == "plain" else [str(every), "0", str(MOST)]
    run = subprocess.run(
        [sys.executable, "-m", f"emulator.{cases}", *choice],
        env=environment(kernel, schedule, copies, variant) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (
        "\n".join(line for line in run.stdout.splitlines() if "FAILED" in line) + run.stderr
    )
    # A kernel that never ran proves nothing.
    assert ("multiply.cuh" in run.stderr or "load_matrix" in run.stderr) == (kernel == "sm80")
    return dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())


@functools.cache
def all_results(cases: str, kernel: str) -> dict[str, str]:
    """The digests of all cases; pytest may ask more than once for the fixture that wants them."""
    schedule, copies, every = MAIN
    return digests(cases, kernel, schedule, copies, SHARE.get(cases, every))


@dataclass(frozen=True)
class Expected:
    """What a kernel computes of the cases, which is accurate."""

    cases: str
    kernel: str
    results: dict[str, str]

    def assert_same(self, *run: Any) -> None:
        for case, digest in digests(self.cases, self.kernel, *run).items():
            assert digest == self.results[case], case


# A process of pytest-xdist runs all tests of one of these.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (cases, kernel), id=f"{kernel}-{cases}", marks=pytest.mark.xdist_group(f"{kernel} {cases}")
        )
        for cases in CASES
        for kernel in KERNELS
    ],
)
def expected(request: pytest.FixtureRequest) -> Expected:
    return Expected(*request.param, all_results(*request.param))


def test_every_case_is_accurate(expected: Expected) -> None:
    assert len(expected.results) > (15 if expected.cases in ("sequence_cases", "split_cases") else 100)


@pytest.mark.parametrize("run", OTHERS, ids=lambda run: run[0])
def test_schedules_do_not_change_a_bit(run: tuple[str, str, int], expected: Expected) -> None:
    expected.assert_same(*run)


@pytest.mark.sanitizers
@pytest.mark.parametrize("cases", SHARE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_other_cases_are_accurate(kernel: str, cases: str) -> None:
    assert len(digests(cases, kernel, *MAIN)) > 50


@pytest.mark.sanitizers
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_there_is_no_race(kernel: str, cases: str) -> None:
    schedule, copies, _ = MAIN
    every = SLOWED[cases]
    expected = Expected(cases, kernel, digests(cases, kernel, schedule, copies, every))
    expected.assert_same(*RACE, every, "race")


def sanitizers() -> str | None:
    """The runtime libraries that a program without sanitizers must load first, None where there are none."""
    compiler = build.tools().compiler.split()
    names = ("libasan.so", "libubsan.so")
    asked = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in names
    ]
    paths = [answer.stdout.strip() for answer in asked]
    return ":".join(paths) if all(os.path.isabs(path) for path in paths) else None


@pytest.mark.sanitizers
@pytest.mark.skipif(sanitizers() is None, reason="the compiler has no libasan and libubsan to preload")
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sanitizers_find_nothing(kernel: str, cases: str) -> None:
    # Python's own memory is never given back.
    options = {"LD_PRELOAD": str(sanitizers()), "ASAN_OPTIONS": "detect_leaks=0"}
    assert len(digests(cases, kernel, *ASAN, SLOWED[cases], "asan", **options)) > 5


@pytest.mark.parametrize(("modules", "left_out"), CHOSEN, ids=lambda value: value.split(".")[0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_existing_tests_pass(kernel: str, modules: str, left_out: str) -> None:
    paths = [str(TESTS / module) for module in modules.split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", left_out],
        env=environment(kernel, "fifo", "late"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
