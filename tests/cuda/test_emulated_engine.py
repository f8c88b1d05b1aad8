"""The operators on CUDA tensors without a GPU: the CUDA half of csrc/ops, on the kernels of tests/emulator
and a device in memory of the host.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from emulator import build

#: Writes a byte at so many bytes from the beginning of a result of 64.
WRITES = """
import ctypes, torch
from selfattn_ext import library, ops
query = library.ops().to_device(torch.ones(1, 1, 1, 16))
out = ops.attention_forward(query, query, query, 1.0)[0]
ctypes.memset(out.data_ptr() + ({at}), 0, 1)
"""


def calls_of(module: str) -> int:
    """Runs a module of tests/emulator on the device; how many calls it says that the device has had."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"emulator.{module}"],
        env=build.environment(build.build("device")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return int(run.stdout)


def test_the_operators_are_accurate_and_agree_in_layout_with_those_of_the_cpu() -> None:
    assert calls_of("engine_cases") > 500


@pytest.mark.thorough
def test_the_gradient_of_a_mask_is_the_same_alone_packed_and_in_a_batch() -> None:
    assert calls_of("mask_alone") > 100


def test_no_start_length_or_page_number_makes_a_kernel_leave_its_tensors() -> None:
    assert calls_of("wild_numbers") > 250


@pytest.mark.parametrize(
    ("at", "side"), [(0, ""), (63, ""), (-1, "before"), (64, "behind"), (-4000, "before")]
)
def test_what_is_written_beside_a_tensor_is_reported(at: int, side: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITES.format(at=at)],
        env=build.environment(build.build("device")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode != 0) == bool(side), run.stderr
    assert not side or f"something has written {side} 64 bytes of device memory" in run.stderr
