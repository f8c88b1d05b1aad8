"""The PTX machine itself: its reports, and features of PTX that the package's kernels do not use.

Small wrong kernels (simulators/ptx_machine/programs/wrong_kernels.cu, features.cu) cause the reports. These
tests need nvcc, but no torch with CUDA; simulators/ptx_machine/run.py runs the tests that need one.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from nvcc_marks import runs_programs
from ptx_machine import build
from ptx_machine.build import run

pytestmark = runs_programs

OUTSIDE = r"is outside of the 1024 bytes of shared memory"
SOURCE = r"wrong_kernels\.cu:\d+"
PLACE = rf"PTX line \d+: .*\n.*{SOURCE}"
UNWRITTEN = r"a read of byte \d+ of shared memory, which nobody has written"
RACE = (
    rf"race on byte \d+ of shared memory: nothing orders this and a {{}} by warp \d, lanes [\d,-]+ at {PLACE}"
)
IN_FLIGHT = rf"nothing orders this and an asynchronous copy that is on its way .*{PLACE}"

#: What the machine says of each wrong kernel, in any order of warps.
REPORTS = {
    "warp_diverges": r"lanes 0-15 never come; lane 0 waits|lanes 16-31 never come; lane 16 waits",
    "warp_skips_barrier": r"deadlock: 1 of 2 warps wait at barrier 0, and 1 have ended",
    "lane_leaves_shuffle": r"lanes 7, which take part, have ended",
    "mask_lacks_caller": r"a mask of members that leaves out the lane",
    "write_beyond_shared": OUTSIDE,
    "rows_beyond_shared": OUTSIDE,
    "copy_misaligned": r"a read of 16 bytes at 0x[0-9a-f]+, which is not aligned",
}
#: What it says with the race detector.
RACES = {
    "neighbour_in_block": RACE.format("write") + "|" + UNWRITTEN,
    "neighbour_in_warp": RACE.format("write"),
    "buffer_reused": RACE.format("(read|write)"),
    "copy_not_waited_for": IN_FLIGHT,
    "copy_not_committed": IN_FLIGHT,
    "copy_without_barrier": f"{RACE.format('write')}|{IN_FLIGHT}|{UNWRITTEN}",
    "copy_over_reads": f"{RACE.format('(read|write)')}|{IN_FLIGHT}",
    "blocks_overlap": r"race on device memory.*nothing orders this and a write by another block",
    "shared_memory_not_written": UNWRITTEN,
}
SCHEDULES = (0, 1)

THREADS = range(64)
NAN = 0xFFFFFFFF
#: What each thread of a kernel writes if nothing is wrong; the host gives thread n the number 4 n, and n.
RESULTS = {
    "warp_diverges": [n ^ 1 for n in THREADS],
    "warp_skips_barrier": [*THREADS],
    "lane_leaves_shuffle": [n ^ 1 for n in THREADS],
    "mask_lacks_caller": [0xFFFFFFFF] * 64,
    "write_beyond_shared": [1] * 64,
    "rows_beyond_shared": [NAN] * 64,
    "copy_misaligned": [0] * 64,
    "neighbour_in_block": [(n + 32) % 64 for n in THREADS],
    "neighbour_in_warp": [n ^ 1 for n in THREADS],
    "buffer_reused": [n + 1 for n in THREADS],
    "copy_not_waited_for": [4 * ((n + 1) % 64) for n in THREADS],
    "copy_not_committed": [4 * n for n in THREADS],
    "copy_without_barrier": [4 * (63 - n) for n in THREADS],
    "copy_over_reads": [4 * n for n in THREADS],
    "blocks_overlap": [*THREADS],
    "shared_memory_not_written": [0] * 64,
}


@pytest.fixture(scope="module")
def wrong_kernels() -> Path:
    return build.build("wrong_kernels")


@pytest.fixture(scope="module")
def features() -> Path:
    return build.build("features")


def flags_for_one_device() -> list[str]:
    """The flags of nvcc for a program with PTX for compute capability 8.0 alone."""
    return [flag for flag in build.program_flags(build.CSRC) if "compute_75" not in flag]


def words_of(output: str) -> list[int]:
    return list(map(int, output.split()))


@pytest.mark.parametrize("kernel", [*REPORTS, *RACES])
def test_report(kernel: str, wrong_kernels: Path) -> None:
    for schedule in SCHEDULES:
        wrong = run(wrong_kernels, kernel, schedule=schedule, races=int(kernel in RACES))
        assert wrong.returncode == 1, wrong.stdout
        assert "unspecified launch failure" in wrong.stdout
        assert re.search({**REPORTS, **RACES}[kernel], wrong.stderr), wrong.stderr


@pytest.mark.parametrize("kernel", [*REPORTS, *RACES])
def test_nothing_is_said_of_what_is_right(kernel: str, wrong_kernels: Path) -> None:
    for schedule, copies in ((0, "late"), (3, "eager")):
        races = int(kernel in RACES)
        right = run(wrong_kernels, kernel, "right", schedule=schedule, copies=copies, races=races)
        assert right.stderr == ""
        assert words_of(right.stdout) == RESULTS[kernel]


@pytest.mark.parametrize("kernel", ["neighbour_in_block", "buffer_reused", "copy_without_barrier"])
def test_without_the_detector_results_show_a_missing_barrier(kernel: str, wrong_kernels: Path) -> None:
    """Warps run as far as they can, one after the other."""
    assert words_of(run(wrong_kernels, kernel).stdout) != RESULTS[kernel]


def test_a_copy_must_be_waited_for_before_its_thread_ends(wrong_kernels: Path) -> None:
    wrong = run(wrong_kernels, "copy_not_waited_for")
    assert "a thread ends while its asynchronous copies are on their way" in wrong.stderr


def test_shared_memory_holds_nan_at_first(wrong_kernels: Path) -> None:
    assert set(run(wrong_kernels, "shared_memory_not_written").stdout.split()) == {str(NAN)}


def test_shared_memory_ends_at_its_last_byte(wrong_kernels: Path) -> None:
    assert run(wrong_kernels, "write_beyond_shared", "right", "256").returncode == 0
    for size in ("252", "255"):
        assert (
            f"is outside of the {size} bytes"
            in run(wrong_kernels, "write_beyond_shared", "right", size).stderr
        )


@pytest.mark.parametrize(("capability", "kilobytes"), [(75, 64), (80, 163), (89, 99), (90, 227)])
def test_shared_memory_has_the_size_of_the_device(
    capability: int, kilobytes: int, wrong_kernels: Path
) -> None:
    for size, fits in ((kilobytes * 1024, True), (kilobytes * 1024 + 1, False)):
        result = run(wrong_kernels, "neighbour_in_block", "right", str(size), capability=capability)
        assert (result.returncode == 0) == fits, result.stdout + result.stderr
        assert fits or "invalid argument" in result.stdout


def test_devices_run_the_newest_ptx_that_is_for_them(features: Path) -> None:
    for capability, found in ((75, 750), (80, 800), (89, 800), (120, 800)):
        assert set(run(features, "generation", capability=capability).stdout.split()) == {str(found)}


@pytest.mark.ptx_machine
def test_a_device_does_not_run_what_is_for_later_ones(tmp_path: Path) -> None:
    variables = {**os.environ, "PTX_NVCC": build.nvcc().command}
    program = tmp_path / "features"
    source = build.MACHINE / "programs" / "features.cu"
    subprocess.run(
        [build.NVCC_TO_PTX, *flags_for_one_device(), source, "-o", program], env=variables, check=True
    )
    assert run(program, "generation", capability=80).returncode == 0
    refused = run(program, "generation", capability=75)
    assert refused.returncode == 1
    assert "of which there is no PTX" in refused.stderr


def test_bank_conflicts_are_counted(wrong_kernels: Path) -> None:
    """Two warps load four matrices each: one wavefront per matrix if rows are swizzled, else 8."""
    for way, wavefronts in (("right", 8), ("wrong", 64)):
        report = run(wrong_kernels, "columns_of_rows", way, banks=1).stderr
        assert re.search(rf"ptx_sm80\.cuh:\d+ in .*{SOURCE}: 8 accesses, {wavefronts} wavefronts", report), (
            report
        )
    report = run(wrong_kernels, "copy_without_barrier", "right", banks=1).stderr
    assert re.search(rf"ptx_sm80\.cuh:\d+ in .*{SOURCE}: 8 accesses, 8 wavefronts", report), report


def test_instructions_are_counted(wrong_kernels: Path) -> None:
    report = run(wrong_kernels, "neighbour_in_block", "right", profile=1).stderr
    found = re.search(r"1 launches, (\d+) instructions of warps, (\d+) of (\d+) in the text", report)
    assert found is not None, report
    executed, reached, written = map(int, found.groups())
    assert executed == 2 * reached  # two warps that do not diverge execute them
    assert 0 < reached <= written


def test_options_are_checked(wrong_kernels: Path) -> None:
    result = run(wrong_kernels, "neighbour_in_block", copies="never")
    assert result.returncode == 2
    assert 'SELFATTN_PTX_COPIES must be late or eager, but it is "never"' in result.stderr


FEATURES = {
    "variables": [n % 8 * (n % 8) + (100 if n == 0 else 0) + 16 for n in range(64)],
    "arrival": [0] * 32 + [32 - n for n in range(32)],
    "guarded": [0xAAAA if n % 32 < 16 else n % 2 for n in range(64)],
    "halves": [n ^ 8 for n in range(64)],
    "overwritten": [2 * n if n & 16 else n + 16 for n in range(64)],
    "half_words": [2 * (n % 32) + 1 + ((2 * (n % 32) + 2) << 16) for n in range(64)],
    "parts": [28 if n % 32 < 8 else 31 for n in range(64)],
    "calls": [(n + 1) * sum(range(1, n % 4 + 2)) for n in range(64)],
    "labels": [31 * (n % 4 + 1) + 62000 for n in range(64)],
    "votes": [1022] * 64,
}


@pytest.mark.parametrize("kernel", FEATURES)
def test_features(kernel: str, features: Path) -> None:
    for schedule in SCHEDULES:
        result = run(features, kernel, schedule=schedule, races=1)
        assert result.stderr == ""
        assert words_of(result.stdout) == FEATURES[kernel]


def test_a_block_has_no_two_labels_of_a_name(features: Path, tmp_path: Path) -> None:
    program = tmp_path / "features"
    program.write_bytes(features.read_bytes().replace(b"ended:", b"again:"))
    program.chmod(0o755)
    refused = run(program, "labels")
    assert refused.returncode == 1
    assert re.search(r"cannot read line \d+ of the PTX: a second label again", refused.stderr)


RACE_OF_FEATURES = RACE.replace("wrong_kernels", "features")
#: What the machine says if these features are used wrongly.
MISUSES = {
    "variables_beyond": r"is outside of (device memory|every memory)",
    "arrival_early": RACE_OF_FEATURES.format("(read|write)") + "|" + UNWRITTEN,
    "arrival_missing": r"deadlock: 1 of 2 warps wait at barrier 1, and 1 have ended",
    "arrival_of_both": RACE_OF_FEATURES.format("write") + "|" + UNWRITTEN,
    "barrier_of_no_number": r"a barrier that does not exist, or for a part of a warp",
    "barrier_of_no_warps": r"a barrier that does not exist, or for a part of a warp",
    "barrier_of_fewer": r"64 threads come to barrier 1, which expects 32",
    "halves_beyond": RACE_OF_FEATURES.format("write"),
    "overwritten_early": RACE_OF_FEATURES.format("read"),
    "half_words_of_neighbours": r"race on device memory.*nothing orders this and a (read|write) by warp \d",
    "masks_differ": r"a mask of members that differs between them",
    "guarded_for_all": r"lanes 16-31 never come|lanes 16-31, which take part, have ended",
}


@pytest.mark.parametrize("kernel", MISUSES)
def test_misused_features(kernel: str, features: Path) -> None:
    for schedule in SCHEDULES:
        wrong = run(features, kernel, schedule=schedule, races=1)
        assert wrong.returncode == 1, wrong.stdout
        assert re.search(MISUSES[kernel], wrong.stderr), wrong.stderr


#: How nvcc compresses PTX: its default is LZ4 before 12.8, and zstd since.
COMPRESSIONS = ([], ["--compress-mode=speed"])
#: The last header of a fatbin in a program is that of its kernels; its first entry follows after 16 bytes.
FATBIN = 0xBA55ED50.to_bytes(4, "little")


@pytest.mark.ptx_machine
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda flags: "".join(flags) or "default")
def test_compressed_ptx(compression: list[str], tmp_path: Path) -> None:
    nvcc = build.nvcc()
    if compression and nvcc.version < (12, 8):
        pytest.skip("an nvcc that compresses in one way alone")
    flags = [flag.replace("code=sm_", "code=compute_") for flag in flags_for_one_device()]
    source = build.MACHINE / "programs" / "features.cu"
    program = tmp_path / "features"
    subprocess.run([nvcc.command, *flags, *compression, source, "-o", program], check=True)
    result = run(program, "calls")
    assert result.stderr == ""
    assert words_of(result.stdout) == FEATURES["calls"]

    # With zeros inside, nothing is executed, and the report says why.
    content = bytearray(program.read_bytes())
    entry = content.rindex(FATBIN) + 16
    header, compressed = (int.from_bytes(content[entry + n :][:4], "little") for n in (4, 16))
    assert compressed > 0
    middle = entry + header + compressed // 2
    content[middle : middle + 64] = bytes(64)
    program.write_bytes(content)
    broken = run(program, "calls")
    assert broken.returncode == 1
    assert "compressed PTX: " in broken.stderr


def test_the_variables_of_a_step_of_tests_come_before_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptx_machine import run

    monkeypatch.setattr(build, "build", lambda target: Path("somewhere", target))
    for step in (*run.all_steps().values(), *run.quick_steps().values()):
        environment = build.environment_for_torch(Path("library.so"), **step.variables)
        assert step.variables.items() <= environment.items()
