"""The operators on CUDA tensors without a GPU and with any torch.

The CUDA half of csrc/ops runs on the PTX machine, with tensors that say that they are on "cuda:0".
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from ptx_machine import host_build

from selfattn_ext.build import cuda_build

pytestmark = [
    pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="no nvcc on this machine"),
    pytest.mark.xdist_group("cuda engine"),
]

#: Copies of this process each write a byte, so many bytes from the beginning of a result of 64 bytes. The
#: machine looks at what is beside memory when it is freed.
WRITES = """
import ctypes, torch
from selfattn_ext import ops
from selfattn_ext.build import library
for at in (0, 63, -1, 64, -400):
    query = library.ops().to_device(torch.ones(1, 1, 1, 16))
    out = ops.attention_forward(query, query, query, 1.0, kernel_name="simt")[0]
    ctypes.memset(out.data_ptr() + at, 0, 1)
    print("at", at, flush=True)
    del out
"""


def run(*command: str, few: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=host_build.environment(
            host_build.build("device", few=few), SELFATTN_PTX_CAPABILITY="80", SELFATTN_PTX_RACES="1"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done


def calls_of(module: str, few: bool) -> int:
    """Runs a module of cases on the device, and returns how many calls the device had."""
    said = run("-m", f"ptx_machine.kernel_cases.{module}", *["--few"][: int(few)], few=few).stdout
    assert "ptx machine: " not in said, said
    return int(said)


EVERY_INSTANCE = pytest.param(False, marks=pytest.mark.ptx_machine, id="every instance")


@pytest.mark.parametrize("few", [True, EVERY_INSTANCE])
def test_the_operators_are_accurate_and_agree_in_layout_with_those_of_the_cpu(few: bool) -> None:
    assert calls_of("engine_cases", few) > 250


@pytest.mark.ptx_machine
def test_the_gradient_of_a_mask_is_the_same_alone_packed_and_in_a_batch() -> None:
    assert calls_of("mask_alone", False) > 100


@pytest.mark.parametrize("few", [True, EVERY_INSTANCE])
def test_no_start_length_or_page_number_makes_a_kernel_leave_its_tensors(few: bool) -> None:
    assert calls_of("wild_numbers", few) > 100


def test_what_is_written_beside_a_tensor_is_reported() -> None:
    lines = run("-c", WRITES).stdout.splitlines()
    reports = [line.partition("ptx machine: the host has written ")[2] for line in lines]
    assert [line for line in lines if line.startswith("at")] == [f"at {n}" for n in (0, 63, -1, 64, -400)]
    assert [report.partition(" at ")[0] for report in reports if report] == [
        "before the 64 bytes",
        "behind the 64 bytes",
        "before the 64 bytes",
    ]
