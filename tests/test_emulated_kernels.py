"""The CUDA kernels, compiled for the emulator of tests/emulator, on the CPU: every option at the lengths and
head dims around the edges of tiles, under different schedules, and existing tests of the package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import build

import selfattn_ext

TESTS = Path(__file__).parent
KERNELS = [name for name in ("simt", "sm80") if (build.CSRC / "cuda" / name).is_dir()]

#: Schedule, asynchronous copies, and of how many cases one runs. All cases run once, as a device hardly ever
#: would: threads in any order, copies at the last moment.
MAIN = ("random", "late", 1)
OTHERS = [("fifo", "eager", 6), ("lifo", "late", 6), ("sticky", "random", 6)]
RACE = ("fifo", "late", 9)
ASAN = ("sticky", "late", 9)

#: Existing tests that say something about a forward whose kernel is forced.
CHOSEN = {
    "test_options_pairwise.py": "",
    "test_edge_cases.py": "",
    "test_masks.py": "not never_expanded",
    "test_dropout.py": "",
    "test_determinism.py": "",
    "test_special_numbers.py": "",
}


def environment(kernel: str, schedule: str, copies: str, variant: str = "plain") -> dict[str, str]:
    package = str(Path(selfattn_ext.__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SELFATTN")}
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, str(TESTS), os.environ.get("PYTHONPATH", "")])),
        "SELFATTN_LIBRARY": str(build.build("library", variant)),
        "SELFATTN_KERNEL": kernel,
        "SELFATTN_EMULATOR_SCHEDULE": schedule,
        "SELFATTN_EMULATOR_COPIES": copies,
        "SELFATTN_EMULATOR_BANKS": "1",
        "OMP_NUM_THREADS": "1",
    }


def digests(
    kernel: str, schedule: str, copies: str, every: int, variant: str = "plain", **variables: str
) -> dict[str, str]:
    """Runs the cases of emulator/forward_cases.py, and returns a digest of the results of each."""
    run = subprocess.run(
        [sys.executable, "-m", "emulator.forward_cases", str(every)],
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


@pytest.fixture(scope="module", params=KERNELS)
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """A kernel, and the digests of its results, which are accurate."""
    return request.param, digests(request.param, *MAIN)


def test_every_case_is_accurate(expected: tuple[str, dict[str, str]]) -> None:
    assert len(expected[1]) > 100


@pytest.mark.parametrize("run", OTHERS, ids=lambda run: run[0])
def test_schedules_do_not_change_a_bit(
    run: tuple[str, str, int], expected: tuple[str, dict[str, str]]
) -> None:
    kernel, results = expected
    for case, digest in digests(kernel, *run).items():
        assert digest == results[case], case


def test_there_is_no_race(expected: tuple[str, dict[str, str]]) -> None:
    kernel, results = expected
    for case, digest in digests(kernel, *RACE, variant="race").items():
        assert digest == results[case], case


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


@pytest.mark.skipif(sanitizers() is None, reason="the compiler has no libasan and libubsan to preload")
def test_sanitizers_find_nothing(expected: tuple[str, dict[str, str]]) -> None:
    kernel, results = expected
    # Python's own memory is never given back.
    options = {"LD_PRELOAD": str(sanitizers()), "ASAN_OPTIONS": "detect_leaks=0"}
    for case, digest in digests(kernel, *ASAN, variant="asan", **options).items():
        assert digest == results[case], case


@pytest.mark.parametrize("module", CHOSEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_existing_tests_pass(kernel: str, module: str) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(TESTS / module),
            "-k",
            CHOSEN[module],
        ],
        env=environment(kernel, "fifo", "late"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
