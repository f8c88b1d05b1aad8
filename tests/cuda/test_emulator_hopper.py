"""The emulator's models of Hopper's instructions.

Every form of a product and of a copy is compared with a plain computation. A small kernel that is wrong in
one way (simulators/cuda_emulator/programs/hopper) causes each report, and corrected it causes none.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from cuda_emulator import build

SCHEDULES = ("fifo", "lifo", "random", "sticky")
COPIES = ("eager", "late", "random")

AT = r"at wrong\w*\.cuh:\d+"
BARRIER = r"the barrier at byte \d+ of shared memory"

#: What the emulator says of each wrong kernel, whatever the schedule and whenever copies happen.
REPORTS = {
    "barrier_not_initialised": rf"uses {BARRIER} in barrier_\w+ {AT}, which has not been initialised",
    "barrier_initialised_again": rf"initialises {BARRIER} in barrier_init {AT}, which is initialised",
    "barrier_not_known_to_copies": rf"copies to {BARRIER} in copy_box_async .* known by barrier_init_fence",
    "barrier_written_over": rf"uses {BARRIER} .* over which something has been written",
    "barrier_misaligned": rf"gives barrier_init {AT} an address that is not aligned to 8 bytes",
    "too_many_arrivals": rf"arrives at {BARRIER} in barrier_arrive {AT}, at which all 1 threads",
    "too_few_bytes_announced": rf"{BARRIER} has got 4096 bytes more than its phase had announced",
    "too_many_bytes_announced": rf"deadlock(.*\n)*.*{BARRIER} .* lacks 0 of 1 arrivals and 128 bytes",
    "bytes_not_announced": rf"{BARRIER} has got 8192 bytes more|a phase of {BARRIER} ends before a copy",
    "parity_beyond_one": rf"barrier_wait {AT} with the parity 3",
    "not_released": rf"deadlock(.*\n)*.*{BARRIER} is in phase 0, which lacks 256 of 256 arrivals",
    "box_misaligned": rf"gives copy_box_async {AT} an address that is not aligned to 1024 bytes",
    "box_beyond_shared": rf"gives copy_box_async {AT} the byte 32768 of 33792 bytes of shared memory",
    "map_is_none": rf"gives copy_box_async {AT} a tensor map that is none of four",
    "copy_not_waited_for": rf"nobody has waited for the copy of copy_box_async {AT} to {BARRIER}",
    "products_without_fence": rf"comes to product_async {AT} without any products_fence\(\)",
    "products_without_second_fence": rf"comes to product_async {AT} without products_fence\(\) since",
    "products_not_waited_for": rf"ends, and has not waited for product_async {AT}",
    "products_not_committed": rf"ends, and has not waited for product_async {AT}",
    "results_written_early": rf"thread 70 .* has written to the results of product_async {AT} before",
    "left_operand_written_early": rf"thread 70 .* has written to the left operand of product_async {AT}",
    "group_diverges": rf"the warpgroup diverges: .* product_async {AT} with other operands than",
    "group_in_two_places": r"the warpgroup diverges: .* comes to product\w+ .* have come to product",
    "warp_leaves_products": r"not waited for product_async|deadlock(.*\n)*  of warpgroup 1 96 threads",
    "matrix_beyond_panel": rf"gives product_async {AT} the rows 8 to 71 of panels of 64",
    "matrix_turned": rf"gives product_async {AT} matrix_by_rows\(\) for an operand that is not turned",
    "matrix_misplaced": rf"matrix_by_columns {AT} with column 8, which is not a multiple of 16",
    "threads_differ": rf"to barrier 3 in sync_threads {AT} for \d+ threads, while others wait for \d+ there",
    "half_arrived": rf"128 of 384 have come to barrier 3, the first in arrive_threads {AT}",
    "nobody_arrives": rf"deadlock(.*\n)*.*lanes 0-31 wait in sync_threads {AT}(.*\n)*  128 of 384 threads",
    "number_of_no_barrier": rf"sync_threads {AT} with barrier 16; there are 1 to 15",
    "threads_of_no_warps": rf"sync_threads {AT} for 368 threads of 384",
    "registers_not_given_up": r"deadlock(.*\n)*.*warpgroup 1 has 168 registers a thread and waits for 232",
    "registers_of_one_warp": r"deadlock(.*\n)*.*wait in give_up_registers",
    "registers_beyond": rf"give_up_registers {AT} with 44 registers: it must be a multiple of 8",
}

#: Races, and what the race detector says of them, or another report that comes first.
ORDER = "nothing orders this after"
COPY = rf"an asynchronous copy of thread \d+ .* in copy_box_async {AT}"
RACES = {
    "barrier_not_known_to_threads": rf"race on .*{ORDER} .* in barrier_init {AT}|not been initialised",
    "full_not_waited_for": rf"race on .* a product of warpgroup \d reads it .*{ORDER} {COPY}",
    "empty_not_waited_for": rf"race on .*{COPY}, and {ORDER} an? (product|asynchronous copy) of",
    "released_before_the_wait": rf"race on .*{COPY}, and {ORDER} a product of warpgroup \d",
    "copy_read_early": rf"race on .* thread \d+ .* reads it .*{ORDER} an asynchronous copy of thread 0",
    "other_copy_waited_for": rf"race on .* thread \d+ .* reads it .*{ORDER} an asynchronous copy of thread 0",
    "written_operand_not_fenced": r"a product of warpgroup 0 reads .* no fence_async_proxy\(\) follows",
    "written_operand_not_waited_for": rf"a product of warpgroup 0 reads .*{ORDER} thread",
    "copy_over_writes": rf"race on .*{COPY}, and no fence_async_proxy\(\) follows thread",
    "write_over_operand": rf"race on .* thread \d+ .* writes it .*{ORDER} a product of warpgroup 0",
    "arrived_without_waiting": rf"race on .*{ORDER} thread \d+",
    "counted_by_two_blocks": rf"race on global memory .*{ORDER} thread 0 .* of another block",
}

#: Wrong kernels that fail in another way than by a report.
OTHERS = ("newest_group_pending",)

run = functools.partial(build.run, capability="90")


@pytest.fixture(scope="module")
def plain() -> Path:
    return build.build("hopper_kernels")


@pytest.fixture(scope="module")
def race() -> Path:
    return build.build("hopper_kernels", "race")


def everyone() -> list[tuple[str, str]]:
    return [(schedule, copies) for schedule in SCHEDULES for copies in COPIES]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results(schedule: str) -> None:
    """Products of each number of columns, in both types, with each form of operands; boxes in the tensor,
    across its edges and beyond; a chain of products that overlap.
    """
    judge_results(build.build("hopper_results"), schedule)


@pytest.mark.sanitizers
def test_results_have_no_races() -> None:
    judge_results(build.build("hopper_results", "race"), "random")


def judge_results(program: Path, schedule: str) -> None:
    for copies in COPIES:
        done = run(program, schedule=schedule, copies=copies)
        assert done.returncode == 0, done.stdout
        lines = done.stdout.splitlines()
        products = [line for line in lines if line.startswith("product of ")]
        boxes = [line for line in lines if line.startswith("box of ")]
        assert (len(products), len(boxes), len(lines)) == (6 * 2 * 6, 8, 6 * 2 * 6 + 8 + 1)
        assert [line for line in lines if not line.endswith(": 0 differ")] == []


@pytest.mark.parametrize("kernel", REPORTS)
def test_report(kernel: str, plain: Path) -> None:
    for schedule, copies in everyone():
        wrong = run(plain, kernel, schedule=schedule, copies=copies)
        assert wrong.returncode == 1, (schedule, copies, wrong.stdout)
        assert re.search(REPORTS[kernel], wrong.stdout), (schedule, copies, wrong.stdout)


@pytest.mark.parametrize("kernel", [*REPORTS, *RACES, *OTHERS])
def test_right_kernels_do_not_depend_on_the_schedule(kernel: str, plain: Path) -> None:
    results = set()
    for schedule, copies in everyone():
        right = run(plain, kernel, "right", schedule=schedule, copies=copies)
        assert right.returncode == 0, (schedule, copies, right.stdout)
        assert "nan" not in right.stdout
        results.add(right.stdout)
    assert len(results) == 1


@pytest.mark.sanitizers
@pytest.mark.parametrize("kernel", RACES)
def test_race(kernel: str, race: Path) -> None:
    for schedule, copies in everyone():
        wrong = run(race, kernel, schedule=schedule, copies=copies)
        assert wrong.returncode == 1, (schedule, copies, wrong.stdout)
        assert re.search(RACES[kernel], wrong.stdout), (schedule, copies, wrong.stdout)


@pytest.mark.sanitizers
@pytest.mark.parametrize("kernel", [*REPORTS, *RACES, *OTHERS])
def test_right_kernels_have_no_races(kernel: str, race: Path) -> None:
    for schedule, copies in (("fifo", "late"), ("sticky", "random"), ("lifo", "eager")):
        right = run(race, kernel, "right", schedule=schedule, copies=copies)
        assert right.returncode == 0, (schedule, copies, right.stdout)


@pytest.mark.parametrize("kernel", ["newest_group_pending", "copy_read_early"])
def test_late_copies_and_products_show_a_missing_wait(kernel: str, plain: Path) -> None:
    right = run(plain, kernel, "right").stdout
    assert run(plain, kernel, copies="eager").stdout == right
    for schedule in SCHEDULES:
        assert "nan" in run(plain, kernel, schedule=schedule, copies="late").stdout


def test_models_have_the_signatures_of_the_wrappers() -> None:
    """Names, template parameters and parameters, but for the place of the call that a model gets last."""

    def signatures(text: str, function: str) -> set[str]:
        found = re.findall(rf"(template <[^>]*>)?\n*{function} (\w+ \w+\(.*?\)) \{{", text, re.DOTALL)
        joined = {" ".join(" ".join(parts).split()) for parts in found}
        unnamed = {re.sub(r"(\(&)\w*(\)\[)", r"\1\2", one) for one in joined}
        return {re.sub(r",? ?Site site = Site::at\(\"\w+\"\)", "", one) for one in unnamed}

    wrappers = (build.CSRC / "cuda" / "common" / "ptx_sm90.cuh").read_text(encoding="utf-8")
    models = (build.EMULATOR / "ptx_sm90_model.h").read_text(encoding="utf-8")
    models = models[models.index("namespace selfattn::cuda::ptx") :]
    models = re.sub(r"(>|\n)\nvoid ", r"\1\ninline void ", models)  # templates need not say it
    wanted = signatures(wrappers, "__device__ __forceinline__")
    wanted = {one for one in wanted if not re.search(r"shared_address_of\(|matrix_at\(", one)}  # of wrappers
    assert len(wanted) == 20
    assert wanted - signatures(models, "inline") == set()


def test_other_devices_have_none_of_these_instructions(plain: Path) -> None:
    for capability in ("80", "100"):
        done = run(plain, "half_arrived", "right", capability=capability)
        assert done.returncode == 1
        assert re.search(rf"threads {AT}, which traps on a device of .* {capability}", done.stdout), (
            done.stdout
        )


def test_the_driver_refuses_strides(plain: Path) -> None:
    """One that is not a multiple of 16 bytes."""
    done = run(plain, "map")
    assert done.returncode == 1
    assert "CUDA's driver cannot make a map of a tensor with the sizes 64, 256, 1, 1" in done.stdout
