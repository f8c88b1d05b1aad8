"""The PTX machine's Hopper: mbarriers, copies by tensor maps, products, registers handed over. Results are
compared with plain loops on the host, and errors in small kernels are reported. These tests need nvcc, which
takes long for their programs, but no torch with CUDA. test_ptx_pipeline.py has a kernel that compiles fast.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from nvcc_marks import runs_programs
from ptx_machine import build
from ptx_machine.build import run

pytestmark = [pytest.mark.ptx_machine, *runs_programs]

#: Orders of warps, whether races are looked for, and when copies happen.
WAYS = ((0, 0, "late"), (1, 1, "late"), (2, 1, "eager"))


@pytest.fixture(scope="module")
def hopper() -> Path:
    return build.build("hopper")


@pytest.fixture(scope="module")
def wrong() -> Path:
    return build.build("hopper_wrong")


def differences(result: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """How many numbers differ, by the name of the test."""
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return {name: int(count) for name, count in re.findall(r"^(.+?): (\d+)", result.stdout, re.M)}


@pytest.mark.parametrize(("schedule", "races", "copies"), WAYS)
@pytest.mark.parametrize(("test", "count"), [("products", 72), ("boxes", 8)])
def test_results(test: str, count: int, schedule: int, races: int, copies: str, hopper: Path) -> None:
    """Products of every width, in both types, with the left matrix in memory (turned or not) and in
    registers, and the right one turned or not; boxes across the edges of a tensor.
    """
    found = differences(run(hopper, test, schedule=schedule, races=races, copies=copies))
    assert len(found) == count
    assert set(found.values()) == {0}


def test_the_driver_checks_tensor_maps(hopper: Path) -> None:
    invalid = ["map", "address", "rank", "size", "stride", "long stride", "rows", "swizzle", "columns"]
    answers = dict(line.split(": ") for line in run(hopper, "encode").stdout.splitlines())
    assert answers == {"right": "0", **dict.fromkeys(invalid, "1")}


@pytest.mark.parametrize(("capability", "found"), [(80, 800), (89, 800), (90, 9900), (100, 800), (120, 800)])
def test_ptx_of_one_device_runs_there_alone(capability: int, found: int, hopper: Path) -> None:
    assert run(hopper, "generation", capability=capability).stdout.split() == [str(found)]


@pytest.mark.parametrize("architectures", [("9.0", "9.0a"), ("9.0a", "9.0")])
def test_that_of_one_device_comes_first(architectures: tuple[str, ...], tmp_path: Path) -> None:
    source, program = tmp_path / "generation.cu", tmp_path / "generation"
    source.write_text(
        """
#include <cstdio>
__global__ void generation(int* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  *out = 9000 + __CUDA_ARCH__;
#elif defined(__CUDA_ARCH__)
  *out = __CUDA_ARCH__;
#endif
}
int main() {
  int *out, found = 0;
  cudaMalloc(&out, sizeof(int));
  generation<<<1, 1>>>(out);
  if (cudaGetLastError() != cudaSuccess) return 1;
  cudaMemcpy(&found, out, sizeof(int), cudaMemcpyDeviceToHost);
  std::printf("%d", found);
}
""",
        encoding="utf-8",
    )
    flags = build.program_flags(build.CSRC, architectures)
    subprocess.run([build.NVCC_TO_PTX, *flags, source, "-o", program], check=True)
    for capability, found in ((90, "9900"), (100, "900")):
        assert run(program, capability=capability).stdout == found
    refused = run(program, capability=89)
    assert refused.returncode == 1
    assert "of which there is no PTX" in refused.stderr


PLACE = r"PTX line \d+: .*\n.*hopper_wrong\.cu:\d+"
BEFORE_WAIT = r"this touches a register of a product before the wait for it: PTX line \d+: wgmma"
DESCRIPTOR = r"the matrix descriptor 0x[0-9a-f]{16} "

#: What the machine says of each wrong kernel, with the race detector or without it.
REPORTS = {
    "expect_too_much": r"deadlock; .*4, 5, 6, 7 waits? for the mbarrier at byte 0 of shared memory, "
    r"in whose phase 0 0 of 1 arrivals and 64 bytes are missing \(lanes 0-31\)",
    "expect_too_little": r"deadlock; .*4, 5, 6, 7 waits? for the mbarrier at byte 0 of shared memory, "
    r"in whose phase 0 0 of 1 arrivals and 64 bytes too many have come \(lanes 0-31\)",
    "empty_wait_missing": r"an arrival beyond the count of the mbarrier at byte 0",
    "empty_arrival_missing": r"deadlock; .*mbarrier at byte 8 .*, in whose phase 0 128 of 128 arrivals",
    "barrier_not_initialised": r"the mbarrier at byte 0 of shared memory has not been initialised",
    "barrier_initialised_twice": r"the mbarrier at byte 0 of shared memory is initialised a second time",
    "barrier_misaligned": r"8 bytes at 0x404, which is not aligned",
    "barrier_overwritten": r"the mbarrier at byte 0 of shared memory has been overwritten",
    "barrier_for_none": r"an mbarrier for 0 arrivals",
    "barrier_fence_missing": r"a copy whose barrier the asynchronous proxy does not know",
    "bytes_beyond_count": r"more bytes than an mbarrier can count",
    "parity_of_two": r"a parity that is neither 0 nor 1",
    "copy_misaligned": r"a swizzled box goes to byte 1536 .*, where its pattern .* does not begin",
    "copy_beyond_shared": r"is outside of the 17408 bytes of shared memory",
    "copy_beyond_tensor": r"row 63 of a box, 128 bytes at .*, is outside of device memory, 32768 bytes",
    "copy_of_freed": r"row 0 of a box, .* is outside of device memory.*that has been freed",
    "map_is_none": r"the tensor map of a copy is not one",
    "map_in_local_memory": r"a kernel's parameter must be const and __grid_constant__",
    "copy_in_the_end": r"the block ends, and nobody has waited for this copy, (.*\n)*?.*cp\.async\.bulk",
    "products_fence_missing": r"the first product has no wgmma\.fence before it",
    "products_fence_missing_again": r"registers of this product have been touched since the last wgmma",
    "left_touched": BEFORE_WAIT,
    "products_left_in_the_end": r"a thread ends while its products are on their way: PTX line \d+: wgmma",
    "results_of_other_width": r"takes registers of another one that is on its way, and does not go on with",
    "warp_without_product": r"the warps of a warpgroup must execute this together, and another one has",
    "warps_with_other_matrices": r"another warp of the warpgroup has executed this with other operands",
    "warp_waits_before_product": r"deadlock; .*products that other warps of its warpgroup have not begun",
    "warp_leaves_before_product": r"deadlock; .*products that other warps of its warpgroup have not begun",
    "warpgroup_of_two": r"a warpgroup without four warps",
    "matrix_not_swizzled": DESCRIPTOR + r"lacks the 128-byte swizzle",
    "matrix_beyond_shared": DESCRIPTOR + r"leads to byte 17408, outside of the 17408 bytes of shared memory",
    "matrix_within_pattern": DESCRIPTOR + r"begins within the eight rows of a pattern",
    "matrix_with_base_offset": DESCRIPTOR + r"has a base offset",
    "matrix_across_rows": DESCRIPTOR + r"begins so that its rows are not in 128 bytes",
    "registers_without_end": r"deadlock; .*4, 5, 6, 7 waits? for registers, of which the block has 0 left",
    "registers_of_one_warp": r"the block ends, and warp 0 of the warpgroup has not executed this",
    "registers_grow_by_giving_up": r"a thread that has 248 registers cannot keep 256",
    "arrival_left_behind": r"the block ends, and 32 of 64 threads have come to barrier 3",
    "counts_differ": r"warps come to one barrier with different counts or operations",
}
#: What it says only without the race detector.
WITHOUT_DETECTOR = {
    "expect_missing": r"the block ends, and nobody has waited for this copy",
    "full_wait_missing": r"an arrival beyond the count of|" + BEFORE_WAIT,
    "full_wait_parity": r"an arrival beyond the count of|deadlock; ",
    "products_wait_missing": BEFORE_WAIT,
    "products_commit_missing": BEFORE_WAIT,
    "products_wait_for_one_less": BEFORE_WAIT,
}
READ_BY_PRODUCT = (
    r"nothing orders this and a read by a product of warpgroup 1, which has not been waited for, at " + PLACE
)
ON_ITS_WAY = r"nothing orders this and an asynchronous copy that is on its way .*" + PLACE
BY_COPY = r"nothing orders this and an asynchronous copy by the asynchronous proxy at " + PLACE
UNFENCED = r"no fence\.proxy\.async is between this and a write by warp \d, lanes [\d,-]+ at " + PLACE
UNWRITTEN = r"which nobody has written"
#: What it says only with the race detector.
RACES = {
    "expect_missing": f"{ON_ITS_WAY}|{UNWRITTEN}",
    "full_wait_missing": f"{ON_ITS_WAY}|{UNWRITTEN}",
    "full_wait_parity": f"{ON_ITS_WAY}|{READ_BY_PRODUCT}|{BY_COPY}|deadlock; ",
    "empty_arrival_early": READ_BY_PRODUCT,
    "empty_arrival_before_products": f"{READ_BY_PRODUCT}|{ON_ITS_WAY}",
    "empty_arrival_twice": r"deadlock; |an arrival beyond the count",
    "products_wait_missing": f"{READ_BY_PRODUCT}|{BEFORE_WAIT}",
    "products_commit_missing": f"{READ_BY_PRODUCT}|{BEFORE_WAIT}",
    "products_wait_for_one_less": f"{READ_BY_PRODUCT}|{BEFORE_WAIT}",
    "barrier_not_passed_on": r"race on the mbarrier at byte 0 of shared memory: nothing orders this and the "
    r"initialisation by warp 0, lanes 0 at " + PLACE,
    "own_not_passed_on": r"nothing orders this and a write by warp \d, lanes [\d,-]+ at " + PLACE,
    "proxy_fence_missing": UNFENCED,
    "proxy_fence_behind_barrier": UNFENCED,
    "copy_over_writes": f"{ON_ITS_WAY}|nothing orders this and a write|{READ_BY_PRODUCT}",
    "copy_over_unfenced_writes": UNFENCED,
    "written_under_products": READ_BY_PRODUCT,
    "wait_not_passed_on": f"{ON_ITS_WAY}|{BY_COPY}|{UNWRITTEN}",
    "reads_not_passed_on": r"nothing orders this and a read by warp \d, lanes [\d,-]+ at " + PLACE,
}
RIGHT = ("right", "reads_passed_on", "wait_passed_on")
#: The orders of warps in which each report must come, and whether races are looked for.
CASES = [
    pytest.param(kernel, ways, report, id=f"{kernel}{of}")
    for of, ways, reports in (
        ("", ((0, 0), (1, 1)), REPORTS),
        ("-without-detector", ((0, 0), (1, 0)), WITHOUT_DETECTOR),
        ("-race", ((0, 1), (1, 1)), RACES),
    )
    for kernel, report in reports.items()
]


@pytest.mark.parametrize(("kernel", "ways", "report"), CASES)
def test_report(kernel: str, ways: tuple[tuple[int, int], ...], report: str, wrong: Path) -> None:
    for schedule, races in ways:
        result = run(wrong, kernel, races=races, schedule=schedule)
        assert result.returncode == 1, result.stdout
        assert re.search(report, result.stderr), result.stderr


def test_every_wrong_kernel_is_tested(wrong: Path) -> None:
    names = set(run(wrong, "names").stdout.split())
    assert names == {*RIGHT, *REPORTS, *RACES}


@pytest.mark.parametrize("kernel", RIGHT)
def test_nothing_is_said_of_what_is_right(kernel: str, wrong: Path) -> None:
    outputs = set()
    for schedule, races, copies in WAYS:
        result = run(wrong, kernel, races=races, copies=copies, schedule=schedule)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        outputs.add(result.stdout)
    assert len(outputs) == 1
