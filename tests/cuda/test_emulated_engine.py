"""The operators on CUDA tensors without a GPU.

The CUDA half of csrc/ops runs on the kernels of simulators/cuda_emulator and on a device in memory of the
host.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from cuda_emulator import build

#: Copies of itself, as starting a process takes longer, write a byte each, so many bytes from the beginning
#: of a result of 64. Says after the report of each whether it has ended as it should.
WRITES = """
import ctypes, os, sys, torch
from selfattn_ext import ops
from selfattn_ext.build import library
for at in sys.argv[1:]:
    if (process := os.fork()) == 0:
        query = library.ops().to_device(torch.ones(1, 1, 1, 16))
        out = ops.attention_forward(query, query, query, 1.0)[0]
        ctypes.memset(out.data_ptr() + int(at), 0, 1)
        sys.exit()
    print("ended", os.waitpid(process, 0)[1] == 0, file=sys.stderr, flush=True)
"""


def calls_of(module: str) -> int:
    """Runs a module of simulators/cuda_emulator on the device; how many calls the device has had."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"cuda_emulator.{module}"],
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


def test_what_is_written_beside_a_tensor_is_reported() -> None:
    places = {0: "", 63: "", -1: "before", 64: "behind", -4000: "before"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITES, *map(str, places)],
        env=build.environment(build.build("device")),
        capture_output=True,
        text=True,
        check=True,
    )
    reports = re.findall(r"(.*?)^ended (True|False)$", run.stderr, re.DOTALL | re.MULTILINE)
    for (at, side), (report, well) in zip(places.items(), reports, strict=True):
        assert (well == "True") == (side == ""), f"at {at}: {report}"
        assert not side or f"something has written {side} 64 bytes of device memory" in report, at
