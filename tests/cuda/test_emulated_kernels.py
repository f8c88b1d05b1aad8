"""The CUDA kernels on the CPU, compiled for simulators/cuda_emulator.

The problems have every option at lengths and head dims around the edges of tiles, under different schedules.
Existing tests of the package run on the kernels, too.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import modules
import pytest
import turns
from cuda_emulator import build

KERNELS = ("simt", "sm80", "sm90")

#: The modules of simulators/cuda_emulator that run cases.
CASES = (
    "forward_cases",
    "backward_cases",
    "sequence_cases",
    "split_cases",
    "tangent_cases",
    "hopper_cases",
    "hopper_backward_cases",
)
#: What sm90 does not leave to others; sm80 leaves tangents to simt.
OF_SM90 = ("hopper_cases", "hopper_backward_cases", "sequence_cases")

#: Order of threads and time of asynchronous copies, as a device hardly ever would: threads in any order,
#: copies at the last moment. All cases run so, and every sixth under the others.
MAIN = "random:late"
OTHERS = ["fifo:eager", "lifo:late", "sticky:random"]
OTHERS_EVERY = 6
#: Of how many cases, which take longest, make test runs one. The rest run beside the sanitizers.
SHARE = {
    "forward_cases": 2,
    "backward_cases": 6,
    "sequence_cases": 3,
    "split_cases": 3,
    "tangent_cases": 6,
    "hopper_cases": 4,
    "hopper_backward_cases": 8,
}
RACE = "fifo:late"
ASAN = "sticky:late"
#: Of how many cases one runs under these two, which slow it down most, and the first of them.
SLOWED = {
    "forward_cases": (9, 0),
    "backward_cases": (9, 0),
    "sequence_cases": (3, 1),
    "split_cases": (4, 1),
    "tangent_cases": (9, 4),
    "hopper_cases": (12, 6),
    "hopper_backward_cases": (6, 3),
}
#: Million products of the largest case that does.
MOST = 7

#: Existing tests that say something about a kernel that is forced, and pytest's expression for which of them
#: run, in turns. A line's modules share a process, as starting one takes longer than most of them.
CHOSEN: list[list[tuple[str, str]]] = [
    [
        (
            "test_batch_invariant.py",
            "together or another_way or caches or gradients_of or distances or behind",
        ),
    ],
    [
        # A number for each row, one for each column, and one for all.
        ("test_mask_sums.py", "float32 and (2x4x70x1- or 1x1x1x1030- or 1x1x1x1-)"),
    ],
    [
        # The emulator has one thread, and that runs give the same bits is what schedules are for.
        (
            "test_edge_cases.py test_determinism.py test_dropout.py test_batch_invariant.py",
            "not threads and not another_parallel_region and "
            "(not test_batch_invariant or every_kernel or packed_chunks)",
        ),
        ("test_declared_options.py test_masks.py test_gradients.py", "not never_expanded"),
    ],
]


def environment(kernel: str, schedule: str, variant: str = "plain") -> dict[str, str]:
    order, copies = schedule.split(":")
    return build.environment(
        build.build("library", variant),
        SELFATTN_KERNEL=kernel,
        SELFATTN_EMULATOR_SCHEDULE=order,
        SELFATTN_EMULATOR_COPIES=copies,
        SELFATTN_EMULATOR_BANKS="1",
        SELFATTN_EMULATOR_CAPABILITY="90" if kernel == "sm90" else "80",
    )


def lines(cases: str, environment: dict[str, str], *choice: object) -> list[str]:
    """What a module of cases prints: a line for each with the digest of its results at the end."""
    run = subprocess.run(
        [sys.executable, "-m", f"cuda_emulator.{cases}", *map(str, choice)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (
        "\n".join(line for line in run.stdout.splitlines() if "FAILED" in line) + run.stderr
    )
    # A kernel that never ran proves nothing: every process reports the shared memory that it has read.
    kernel = environment["SELFATTN_KERNEL"]
    assert ("products of warpgroups" in run.stderr) == (kernel == "sm90")
    for report in run.stderr.split("cuda emulator: shared memory\n")[1:] or [""]:
        ran_sm80 = "multiply.cuh" in report or "load_matrix" in report
        assert ran_sm80 == (kernel == "sm80") or kernel == "sm90"  # which leaves some calls to it
    return run.stdout.splitlines()


def digests(
    cases: str,
    kernel: str,
    schedule: str,
    every: int,
    first: int = 0,
    *more: object,
    variant: str = "plain",
    **variables: str,
) -> dict[str, str]:
    """Runs cases, and returns a digest of the results of each."""
    printed = lines(cases, environment(kernel, schedule, variant) | variables, every, first, *more)
    return dict(line.rsplit(" ", 1) for line in printed)


def slowed(cases: str, kernel: str, schedule: str, variant: str, **variables: str) -> dict[str, str]:
    """The digests of the cases that run under the sanitizers. Nobody judges them: other tests judge the bits
    that the plain build computes.
    """
    return digests(cases, kernel, schedule, *SLOWED[cases], MOST, "--again", variant=variant, **variables)


@functools.cache
def of_plain_build(cases: str, kernel: str) -> dict[str, str]:
    """What the sanitizers' builds must compute."""
    return slowed(cases, kernel, MAIN, "plain")


def of_each(cases: Iterable[str]) -> list[Any]:
    """(cases, kernel) as parameters; a process of pytest-xdist runs all tests of one of them."""
    return [
        pytest.param((it, kernel), id=f"{kernel}-{it}", marks=pytest.mark.xdist_group(f"{kernel} {it}"))
        for it in cases
        for kernel in KERNELS
        if (it in OF_SM90 if kernel == "sm90" else not it.startswith("hopper"))
        and (it, kernel) != ("tangent_cases", "sm80")
    ]


@pytest.mark.parametrize("of", of_each(CASES))
def test_every_case_is_accurate(of: tuple[str, str]) -> None:
    cases, kernel = of
    least = {
        "forward_cases": 75,
        "backward_cases": 35,
        "sequence_cases": 15,
        "hopper_cases": 60,
        "hopper_backward_cases": 20,
    }
    assert len(digests(cases, kernel, MAIN, SHARE.get(cases, 1))) > least.get(cases, 5)


@pytest.mark.parametrize(("queries", "folded"), [(17, True), (100, False), (129, False)])
def test_heads_that_share_keys_are_folded(queries: int, folded: bool) -> None:
    """Where that saves items of work. Results do not tell, but such queries are copied without a box."""
    program = f"""
from cuda_emulator import plugin
import selfattn_ext, torch
query = torch.zeros(1, 4, {queries}, 64, dtype=torch.bfloat16)
selfattn_ext.scaled_dot_product_attention(query, query[:, :1], query[:, :1], enable_gqa=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment("sm90", MAIN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "products of warpgroups" in run.stderr
    assert ("copy_async_16 at producer.cuh" in run.stderr) == folded


@pytest.mark.thorough
@pytest.mark.parametrize("of", of_each(CASES))
def test_schedules_do_not_change_a_bit(of: tuple[str, str]) -> None:
    """Those of the main one are accurate, as other tests say of the same cases."""
    cases, kernel = of
    others = turns.chosen(OTHERS)
    run = environment(kernel, MAIN)
    found: dict[str, dict[str, str]] = {schedule: {} for schedule in (MAIN, *others)}
    for line in lines(cases, run, OTHERS_EVERY, "--again", "--schedules", MAIN, *others):
        schedule, case = line.split(" ", 1)
        case, digest = case.rsplit(" ", 1)
        found[schedule][case] = digest
    assert len(found[MAIN]) > 2
    for schedule in others:
        assert found[schedule] == found[MAIN], schedule


@pytest.mark.sanitizers
@pytest.mark.parametrize("of", of_each(SHARE))
def test_the_other_cases_are_accurate(of: tuple[str, str]) -> None:
    """Those that make test leaves out, a share of them in each turn."""
    cases, kernel = of
    for first in turns.chosen(range(1, SHARE[cases])):
        assert len(digests(cases, kernel, MAIN, SHARE[cases], first)) > 5


@pytest.mark.sanitizers
@turns.only_in(0, 3)
@pytest.mark.parametrize("of", of_each(CASES))
def test_there_is_no_race(of: tuple[str, str]) -> None:
    found = slowed(*of, RACE, "race")
    assert len(found) > 4
    assert found == of_plain_build(*of)


@pytest.mark.sanitizers
@turns.only_in(1, 3)
@pytest.mark.skipif(build.sanitizers() is None, reason="the compiler has no libasan and libubsan to preload")
@pytest.mark.parametrize("of", of_each(CASES))
def test_sanitizers_find_nothing(of: tuple[str, str]) -> None:
    options = build.sanitizers()
    assert options is not None
    found = slowed(*of, ASAN, "asan", **options)
    assert len(found) > 4
    assert found == of_plain_build(*of)


def existing_tests() -> list[Any]:
    """(modules, expression) as parameters."""
    return [
        pytest.param(*line, id=f"{line[0].split('.')[0]}-{turn}", marks=turns.only_in(turn, len(CHOSEN)))
        for turn, lines in enumerate(CHOSEN)
        for line in lines
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("names", "chosen"), existing_tests())
@pytest.mark.parametrize("kernel", ["simt", "sm80"])
def test_existing_tests_pass(kernel: str, names: str, chosen: str) -> None:
    paths = [str(modules.paths()[name]) for name in names.split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", chosen],
        env=environment(kernel, "fifo:late"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
