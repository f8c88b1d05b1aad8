"""The PTX machine's counts of each launch, on kernels whose counts are known by hand. The kernels are in
simulators/ptx_machine/programs/counts.cu.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nvcc_marks import runs_programs
from ptx_machine import build

pytestmark = runs_programs

BLOCKS, WARPS = 3, 6  # of a launch; WARPS in all its blocks
#: Classes of instructions that the compiler adds to the counted statements.
OF_THE_COMPILER = {"integer", "move", "parameter", "comparison", "branch"}
NOTHING = {"accesses": 0, "bytes": 0, "sectors": 0}

#: Instructions of a launch, without those that the compiler adds.
INSTRUCTIONS = {
    "coalesced": {"global_load": WARPS, "global_store": WARPS},
    "strided": {"global_load": 2 * WARPS},
    "conflicted": {"shared_store": WARPS, "shared_load": 2 * WARPS, "barrier": 2 * WARPS},
    "tensor": {
        "copy": WARPS,
        "copy_wait": 2 * WARPS,
        "barrier": WARPS,
        "ldmatrix": WARPS,
        "mma_bfloat16": 5 * WARPS,
        "mma_float16": WARPS,
        "conversion": WARPS,
        "shuffle": WARPS,
        "atomic": BLOCKS,
    },
    # A thread has 8 numbers, from which all pieces except the last are subtracted.
    "pieces": {
        "global_load": 2 * WARPS,
        "conversion": 3 * 4 * WARPS,
        "float32": 2 * 8 * WARPS,
        "shared_store": 3 * 2 * WARPS,
    },
    "arithmetic": {
        "float32": 4 * WARPS,
        "float32_choice": WARPS,
        "special": 2 * WARPS,
        "global_store": WARPS,
    },
}
LINE = 32 * 4  # bytes of a warp that accesses neighbouring words
#: Accesses of device memory by warps.
TRAFFIC = {
    "coalesced": {
        "load": {"accesses": WARPS, "bytes": WARPS * LINE, "sectors": WARPS * 4},
        "store": {"accesses": WARPS, "bytes": WARPS * LINE, "sectors": WARPS * 4},
    },
    # The first load has a sector for each lane, the second has 16 for its 512 bytes.
    "strided": {"load": {"accesses": 2 * WARPS, "bytes": WARPS * 5 * LINE, "sectors": WARPS * (32 + 16)}},
    "conflicted": {},
    # Half of the warps read; one lane of each block adds.
    "tensor": {
        "copy": {"accesses": BLOCKS, "bytes": BLOCKS * 512, "sectors": BLOCKS * 16},
        "atomic": {"accesses": BLOCKS, "bytes": BLOCKS * 4, "sectors": BLOCKS},
    },
    "pieces": {"load": {"accesses": 2 * WARPS, "bytes": 2 * WARPS * 512, "sectors": 2 * WARPS * 16}},
    "arithmetic": {"store": {"accesses": WARPS, "bytes": WARPS * LINE, "sectors": WARPS * 4}},
}
#: Different sectors; all blocks read the same ones.
SECTORS = {
    "coalesced": {"read": 8, "written": BLOCKS * 8, "loaded_by_blocks": BLOCKS * 8},
    "strided": {"read": 64 + 32 - 8, "written": 0, "loaded_by_blocks": BLOCKS * (64 + 32 - 8)},
    "conflicted": {"read": 0, "written": 0, "loaded_by_blocks": 0},
    "tensor": {"read": 16 + 1, "written": 1, "loaded_by_blocks": 0},
    "pieces": {"read": 64, "written": 0, "loaded_by_blocks": BLOCKS * 64},
    "arithmetic": {"read": 0, "written": 8, "loaded_by_blocks": 0},
}
#: An access of 16 bytes by 32 lanes counts as four. Pieces of float32 have no bank conflicts.
SHARED = {
    # There is a store of 32 wavefronts, a load of one, and a load whose four parts need the same words.
    "conflicted": {"accesses": WARPS * 6, "wavefronts": WARPS * (32 + 1 + 4), "least": WARPS * (32 + 1 + 1)},
    # An access of 8 bytes a lane counts as two.
    "pieces": {"accesses": WARPS * 12, "wavefronts": WARPS * 12, "least": WARPS * 12},
    "tensor": {"accesses": WARPS * 8, "wavefronts": WARPS * 8, "least": WARPS * 8},
}


@pytest.fixture(scope="module")
def program() -> Path:
    return build.build("counts")


def counts_of(program: Path, kernel: str, file: Path, **variables: str) -> list[dict[str, Any]]:
    environment = build.environment(SELFATTN_PTX_COUNTS=str(file), **variables)
    subprocess.run([program, kernel], env=environment, check=True, timeout=60)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kernel", INSTRUCTIONS)
def test_counts_of_a_launch(kernel: str, program: Path, tmp_path: Path) -> None:
    first, second = counts_of(program, kernel, tmp_path / "counts.json")
    assert first == second  # counts are for each launch, not for all so far
    assert f"::{kernel}(" in first["kernel"]
    assert (first["grid"], first["block"], first["dynamic_shared"]) == ([BLOCKS, 1, 1], [64, 1, 1], 8192)
    counted = {name: count for name, count in first["instructions"].items() if count}
    assert {name: count for name, count in counted.items() if name not in OF_THE_COMPILER} == INSTRUCTIONS[
        kernel
    ]
    for traffic in ("load", "store", "copy", "atomic"):
        assert first[traffic] == TRAFFIC[kernel].get(traffic, NOTHING), traffic
    assert first["sectors"] == SECTORS[kernel]
    assert first["shared"] == SHARED.get(kernel, {"accesses": 0, "wavefronts": 0, "least": 0})


def test_counts_do_not_depend_on_the_order(program: Path, tmp_path: Path) -> None:
    ascending = counts_of(program, "tensor", tmp_path / "ascending.json")
    assert counts_of(program, "tensor", tmp_path / "random.json", SELFATTN_PTX_SCHEDULE="3") == ascending


def test_the_sum_of_all_classes_is_the_profile(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    environment = build.environment(SELFATTN_PTX_COUNTS=str(file), SELFATTN_PTX_PROFILE="1")
    run = subprocess.run([program, "tensor"], env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    total = sum(sum(line["instructions"].values()) for line in lines)
    assert f"2 launches, {total} instructions of warps" in run.stderr


def test_a_file_that_cannot_be_written(program: Path, tmp_path: Path) -> None:
    environment = build.environment(SELFATTN_PTX_COUNTS=str(tmp_path / "missing" / "counts.json"))
    run = subprocess.run([program, "tensor"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "cannot be written" in run.stderr
