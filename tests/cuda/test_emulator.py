"""The CUDA emulator itself: a small wrong kernel causes each of its reports.

Each is wrong in one way (simulators/cuda_emulator/programs/wrong_kernels.cu), and corrected it causes none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cuda_emulator import build, probe
from cuda_emulator.build import run

SCHEDULES = ("fifo", "lifo", "random", "sticky")
COPIES = ("eager", "late", "random")

#: What the emulator says of each wrong kernel, whatever the schedule.
REPORTS = {
    "warp_diverges": r"the warp diverges: .* comes to __(ballot|shfl_xor)_sync at .* wait for it",
    "warp_skips_barrier": r"deadlock.*\n.*warp 0: lanes 0-31 wait in __syncthreads.*\n.*warp 1: .* ended",
    "lane_leaves_shuffle": r"deadlock.*(.*\n)*.* lanes 7 have ended(.*\n)*.* 8-31 wait in __shfl_xor_sync",
    "mask_lacks_caller": r"thread \d+ \(warp \d, lane \d+\).* __ballot_sync .* 0x0000ffff, which lacks",
    "write_beyond_shared": r"thread \d+ .* accesses the byte \d+ of 1024 bytes of shared memory",
    "rows_beyond_shared": r"gives load_matrix_x4 at wrong_kernels.cu:\d+ the byte \d+ of 1024 bytes",
    "copy_misaligned": r"copy_async_16 .* not aligned to 16 bytes",
}

#: Races, and what the race detector says of them. The places are those of both accesses.
PLACE = r"wrong_kernels\.cu:\d+"
RACES = {
    "neighbour_in_block": rf"race on byte \d+ of shared memory .*{PLACE}.* nothing orders this .*{PLACE}",
    "neighbour_in_warp": rf"race on byte \d+ of shared memory .*{PLACE}.* nothing orders this .*{PLACE}",
    "buffer_reused": rf"race on byte \d+ of shared memory .*{PLACE}.* nothing orders this .*{PLACE}",
    "copy_not_waited_for": r"race .* asynchronous copy of thread \d+ .* in copy_async_16 at",
    "copy_not_committed": r"race .* asynchronous copy of thread \d+ .* in copy_async_16 at",
    "copy_without_barrier": r"race .* asynchronous copy of thread \d+ .* in copy_async_16 at",
    "copy_over_reads": r"race .* asynchronous copy of thread \d+ .* in copy_async_16 at",
    "blocks_overlap": r"race on global memory .* of another block, which wrote it",
}


@pytest.fixture(scope="module")
def plain() -> Path:
    return build.build("wrong_kernels")


@pytest.fixture(scope="module")
def race() -> Path:
    return build.build("wrong_kernels", "race")


@pytest.fixture(scope="module")
def answering() -> Path:
    """The probe of the PTX wrappers."""
    return build.build("probe")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", REPORTS)
def test_report(kernel: str, schedule: str, plain: Path) -> None:
    wrong = run(plain, kernel, schedule=schedule)
    assert wrong.returncode == 1, wrong.stdout
    assert re.search(REPORTS[kernel], wrong.stdout), wrong.stdout
    right = run(plain, kernel, "right", schedule=schedule)
    assert right.returncode == 0, right.stdout


@pytest.mark.sanitizers
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", RACES)
def test_race(kernel: str, schedule: str, race: Path) -> None:
    for copies in COPIES:
        wrong = run(race, kernel, schedule=schedule, copies=copies)
        assert wrong.returncode == 1, wrong.stdout
        assert re.search(RACES[kernel], wrong.stdout), wrong.stdout
        right = run(race, kernel, "right", schedule=schedule, copies=copies)
        assert right.returncode == 0, right.stdout


@pytest.mark.parametrize("kernel", [*RACES, *REPORTS])
def test_right_kernels_do_not_depend_on_the_schedule(kernel: str, plain: Path) -> None:
    results = {
        run(plain, kernel, "right", schedule=schedule, copies=copies).stdout
        for schedule in SCHEDULES
        for copies in COPIES
    }
    assert len(results) == 1


@pytest.mark.parametrize("kernel", ["neighbour_in_block", "buffer_reused", "copy_without_barrier"])
def test_schedules_alone_show_a_missing_barrier(kernel: str, plain: Path) -> None:
    right = run(plain, kernel, "right").stdout
    wrong = {run(plain, kernel, schedule=schedule, copies="late").stdout for schedule in SCHEDULES}
    assert wrong != {right}


@pytest.mark.parametrize("kernel", ["copy_not_waited_for", "copy_not_committed"])
def test_late_copies_show_a_missing_wait(kernel: str, plain: Path) -> None:
    right = run(plain, kernel, "right").stdout
    assert run(plain, kernel, copies="eager").stdout == right
    assert "4294967295" in run(plain, kernel, copies="late").stdout


def test_shared_memory_holds_nan_at_first(plain: Path) -> None:
    assert set(run(plain, "shared_memory_not_written").stdout.split()) == {"4294967295"}


def test_a_write_within_the_last_page_is_seen(plain: Path) -> None:
    """Memory ends in the middle of what its alignment takes: no page ends there."""
    result = run(plain, "write_beyond_shared", "right", "260")
    assert result.returncode == 0, result.stdout
    result = run(plain, "write_beyond_shared", "right", "252")
    assert result.returncode == 1
    assert "has written outside its 252 bytes of shared memory, at byte 252" in result.stdout


@pytest.mark.sanitizers
def test_race_build_knows_every_byte(race: Path) -> None:
    result = run(race, "write_beyond_shared", "right", "252")
    assert re.search(r"thread 63 .* accesses the byte 252 of 252 bytes of shared memory", result.stdout)


def test_shared_memory_has_the_size_of_the_device(plain: Path) -> None:
    for capability, kilobytes in (("75", 64), ("80", 163), ("89", 99), ("90", 227)):
        for size, fits in ((kilobytes * 1024, True), (kilobytes * 1024 + 1, False)):
            result = run(plain, "neighbour_in_block", "right", str(size), capability=capability)
            assert (result.returncode == 0) == fits, result.stdout
            assert fits or "invalid launch" in result.stdout


def test_bank_conflicts_are_counted(plain: Path) -> None:
    """Two warps load four matrices each: one wavefront per matrix where rows are swizzled, else 8."""
    for way, wavefronts in (("right", 8), ("wrong", 64)):
        report = run(plain, "columns_of_rows", way, banks="1").stderr
        assert re.search(rf"load_matrix_x4 at {PLACE}: 8 accesses, {wavefronts} wavefronts", report), report
    report = run(plain, "copy_without_barrier", "right", banks="1").stderr
    assert re.search(rf"copy_async_16 at {PLACE}: 8 accesses, 8 wavefronts", report), report


def test_options_are_checked(plain: Path) -> None:
    result = run(plain, "neighbour_in_block", schedule="backwards")
    assert "SELFATTN_EMULATOR_SCHEDULE must be one of fifo, lifo, random, sticky" in result.stdout


RECORDINGS = sorted([*probe.GOLDEN.glob("*.npz"), *probe.ORACLE.glob("*.npz")])


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_wrappers_answer_as_recorded(path: Path, answering: Path) -> None:
    """Those of devices (golden) and of a published model of tensor cores (oracle), to the bit."""
    recording = probe.load(path)
    environment = {**os.environ, "SELFATTN_EMULATOR_CAPABILITY": str(recording.capability)}
    count = recording.results.shape[-1]
    results = probe.answers(answering, recording.wrapper, recording.operands, count, environment)
    assert probe.differences(recording, results) == 0, recording.source


def test_recordings_are_not_trivial() -> None:
    """Truncation matters: the two generations of the oracle differ."""
    for wrapper in ("multiply_bfloat16", "multiply_float16"):
        old, new = (probe.load(probe.ORACLE / f"{wrapper}-{capability}.npz") for capability in (80, 90))
        assert (old.operands == new.operands).all()
        assert (old.results != new.results).sum() > 100


def test_every_wrapper_has_a_probe(answering: Path) -> None:
    header = (build.CSRC / "cuda" / "common" / "ptx_sm80.cuh").read_text(encoding="utf-8")
    defined = set(re.findall(r"__device__ __forceinline__ \w+ (\w+)\(", header))
    # What has an effect together with a copy only, and what returns its argument.
    without = {"shared_address", "copy_async_commit", "copy_async_wait", "opaque"}
    assert defined - without == set(probe.wrappers(answering))


@pytest.mark.parametrize("wrapper", probe.DROPPED_BITS)
def test_numbers_that_are_rounded_include_ties(wrapper: str) -> None:
    """Half of them even where they are cut, half odd: only they tell rounding to even from away from zero."""
    dropped = probe.DROPPED_BITS[wrapper]
    words = probe.operands_of(wrapper, 2)
    tie = words & ((1 << dropped) - 1) == 1 << (dropped - 1)
    last_bits = words[tie] >> dropped & 1
    assert min((last_bits == 0).sum(), (last_bits == 1).sum()) > 100


def test_golden_files_can_be_recorded(answering: Path, tmp_path: Path) -> None:
    """With the emulator in the place of a device: every wrapper answers, and answers the same again."""
    for path in probe.record(answering, tmp_path):
        recording = probe.load(path)
        assert recording.source == "emulator"
        count = recording.results.shape[-1]
        again = probe.answers(answering, recording.wrapper, recording.operands, count)
        assert probe.differences(recording, again) == 0
        damaged = recording.results.copy()
        damaged[0, 0, 0] ^= 1 << 20
        assert probe.differences(recording, damaged) == 1
