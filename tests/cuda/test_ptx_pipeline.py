"""A kernel with all of Hopper's instructions on the PTX machine: one warpgroup brings tiles, two use them.

The program (simulators/ptx_machine/programs/hopper_pipeline.cu) compares its results with plain loops on the
host. These tests need nvcc, but no torch with CUDA; test_ptx_hopper.py has each instruction by itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvcc_marks import runs_programs
from ptx_machine import build
from ptx_machine.build import run

pytestmark = runs_programs


@pytest.fixture(scope="module")
def pipeline() -> Path:
    return build.build("hopper_pipeline")


@pytest.mark.parametrize("copies", ["late", "eager"])
@pytest.mark.parametrize(("schedule", "races"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_results(schedule: int, races: int, copies: str, pipeline: Path) -> None:
    result = run(pipeline, schedule=schedule, races=races, copies=copies)
    assert (result.stdout, result.stderr) == ("pipeline: 0\n", "")


def test_other_devices_trap(pipeline: Path) -> None:
    """The definition is that of ptx_sm90.cuh. Earlier architectures have no tensor maps, either."""
    for capability in (80, 100):
        result = run(pipeline, capability=capability)
        assert result.returncode == 1
        assert "a trap" in result.stderr or "cuTensorMapEncodeTiled: 801" in result.stdout


def test_products_and_boxes_are_counted(pipeline: Path, tmp_path: Path) -> None:
    run(pipeline, counts=tmp_path / "counts")
    counts = json.loads((tmp_path / "counts").read_text(encoding="utf-8"))
    tiles, bytes_of_tile = 7, 64 * 128
    # There are four products for each tile, worth eight of mma.m16n8k16 in each of eight warps.
    assert counts["instructions"]["mma_bfloat16"] == tiles * 4 * 8 * 8
    assert counts["instructions"]["copy"] == counts["copy"]["accesses"] == 3 * tiles
    assert counts["copy"]["bytes"] == 3 * tiles * bytes_of_tile
    assert counts["copy"]["sectors"] == counts["sectors"]["read"] == 3 * tiles * bytes_of_tile // 32
