"""The CUDA kernels, compiled for the emulator of tests/emulator, on the CPU: every option at the lengths and
head dims around the edges of tiles, under different schedules, and existing tests of the package.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import modules
import pytest
from emulator import build

KERNELS = [name for name in ("simt", "sm80") if (build.CSRC / "cuda" / name).is_dir()]

#: The modules of tests/emulator that run cases.
CASES = ("forward_cases", "backward_cases", "sequence_cases", "split_cases")

#: Order of threads and time of asynchronous copies, as a device hardly ever would: threads in any order,
#: copies at the last moment. All cases run so, and every sixth under the others.
MAIN = "random:late"
OTHERS = ["fifo:eager", "lifo:late", "sticky:random"]
OTHERS_EVERY = 6
#: Cases that are computed several times each, of which every third runs here, and the rest beside the
#: sanitizers.
SHARE = {"backward_cases": 3, "sequence_cases": 3}
RACE = "fifo:late"
ASAN = "sticky:late"
#: Of how many cases one runs under these two, which slow it down most, and the first of them.
SLOWED = {"forward_cases": (9, 0), "backward_cases": (9, 0), "sequence_cases": (3, 1), "split_cases": (4, 1)}
#: Million products of the largest case that does.
MOST = 7

#: Existing tests that say something about a kernel that is forced, and pytest's expression for which of them
#: run. A line's modules share a process, as starting one takes longer than most of them.
CHOSEN: list[Any] = [
    # The emulator has one thread, and that runs give the same bits is what schedules are for.
    (
        "test_edge_cases.py test_determinism.py test_dropout.py",
        "not threads_and_runs and not another_parallel_region",
    ),
    ("test_declared_options.py", ""),
    ("test_batch_invariant.py", "every_kernel or packed_chunks"),
    pytest.param(
        "test_batch_invariant.py",
        "together or another_way or caches or gradients_of or distances or behind",
        marks=pytest.mark.thorough,
    ),
    pytest.param("test_masks.py test_gradients.py", "not never_expanded", marks=pytest.mark.thorough),
    # A number for each row, one for each column, and one for all.
    pytest.param(
        "test_mask_sums.py",
        "float32 and (2x4x70x1- or 1x1x1x1030- or 1x1x1x1-)",
        marks=pytest.mark.thorough,
    ),
]


def environment(kernel: str, schedule: str, variant: str = "plain") -> dict[str, str]:
    order, copies = schedule.split(":")
    return build.environment(
        build.build("library", variant),
        SELFATTN_KERNEL=kernel,
        SELFATTN_EMULATOR_SCHEDULE=order,
        SELFATTN_EMULATOR_COPIES=copies,
        SELFATTN_EMULATOR_BANKS="1",
    )


def lines(cases: str, environment: dict[str, str], *choice: object) -> list[str]:
    """What a module of cases prints: a line for each with the digest of its results at the end."""
    run = subprocess.run(
        [sys.executable, "-m", f"emulator.{cases}", *map(str, choice)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (
        "\n".join(line for line in run.stdout.splitlines() if "FAILED" in line) + run.stderr
    )
    # A kernel that never ran proves nothing: every process reports the shared memory that it has read.
    for report in run.stderr.split("cuda emulator: shared memory\n")[1:] or [""]:
        ran_sm80 = "multiply.cuh" in report or "load_matrix" in report
        assert ran_sm80 == (environment["SELFATTN_KERNEL"] == "sm80")
    return run.stdout.splitlines()


def digests(
    cases: str,
    kernel: str,
    schedule: str,
    every: int,
    first: int = 0,
    variant: str = "plain",
    **variables: str,
) -> dict[str, str]:
    """Runs cases, and returns a digest of the results of each. Builds that are not the plain one, whose
    digests are there, only compute.
    """
    choice: list[object] = [every, first, *([] if variant == "plain" else [MOST, "--again"])]
    printed = lines(cases, environment(kernel, schedule, variant) | variables, *choice)
    return dict(line.rsplit(" ", 1) for line in printed)


@functools.cache
def all_results(cases: str, kernel: str) -> dict[str, str]:
    """The digests of all cases; pytest may ask more than once for the fixture that wants them."""
    return digests(cases, kernel, MAIN, SHARE.get(cases, 1))


@functools.cache
def judged(cases: str, kernel: str) -> dict[str, str]:
    """The digests of the cases that run under the sanitizers, by the plain build."""
    return digests(cases, kernel, MAIN, *SLOWED[cases])


@dataclass(frozen=True)
class Expected:
    """What a kernel computes of the cases, which is accurate."""

    cases: str
    kernel: str
    results: dict[str, str]


def of_each(cases: Iterable[str]) -> list[Any]:
    """(cases, kernel) as parameters; a process of pytest-xdist runs all tests of one of them."""
    return [
        pytest.param((it, kernel), id=f"{kernel}-{it}", marks=pytest.mark.xdist_group(f"{kernel} {it}"))
        for it in cases
        for kernel in KERNELS
    ]


@pytest.fixture(scope="module", params=of_each(CASES))
def expected(request: pytest.FixtureRequest) -> Expected:
    return Expected(*request.param, all_results(*request.param))


def test_every_case_is_accurate(expected: Expected) -> None:
    least = {"forward_cases": 100, "backward_cases": 70}
    assert len(expected.results) > least.get(expected.cases, 15)


@pytest.mark.thorough
def test_schedules_do_not_change_a_bit(expected: Expected) -> None:
    run = environment(expected.kernel, MAIN)
    printed = lines(expected.cases, run, OTHERS_EVERY, "--again", "--schedules", *OTHERS)
    met = set()
    for line in printed:
        schedule, case = line.split(" ", 1)
        met.add(schedule)
        case, digest = case.rsplit(" ", 1)
        assert digest == expected.results[case], line
    assert met == set(OTHERS)


@pytest.mark.sanitizers
@pytest.mark.parametrize("of", of_each(SHARE))
def test_the_other_cases_are_accurate(of: tuple[str, str]) -> None:
    cases, kernel = of
    every, first = SLOWED[cases]
    found = judged(cases, kernel)
    for other in range(1, every):
        if other != first:
            found = found | digests(cases, kernel, MAIN, every, other)
    assert len(found) > 30


@pytest.mark.sanitizers
@pytest.mark.parametrize("of", of_each(CASES))
def test_there_is_no_race(of: tuple[str, str]) -> None:
    expected = judged(*of)
    for case, digest in digests(*of, RACE, *SLOWED[of[0]], "race").items():
        assert digest == expected[case], case


@pytest.mark.sanitizers
@pytest.mark.skipif(build.sanitizers() is None, reason="the compiler has no libasan and libubsan to preload")
@pytest.mark.parametrize("of", of_each(CASES))
def test_sanitizers_find_nothing(of: tuple[str, str]) -> None:
    options = build.sanitizers()
    assert options is not None
    expected = judged(*of)
    found = digests(*of, ASAN, *SLOWED[of[0]], "asan", **options)
    assert len(found) > 5
    for case, digest in found.items():
        assert digest == expected[case], case


@pytest.mark.parametrize(("names", "left_out"), CHOSEN, ids=lambda value: value.split(".")[0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_existing_tests_pass(kernel: str, names: str, left_out: str) -> None:
    paths = [str(modules.paths()[name]) for name in names.split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", left_out],
        env=environment(kernel, "fifo:late"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
