"""The operators on CUDA tensors without a GPU: the CUDA half of csrc/ops, on the kernels of tests/emulator
and a device in memory of the host.
"""

from __future__ import annotations

import subprocess
import sys

from emulator import build


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


def test_no_start_length_or_page_number_makes_a_kernel_leave_its_tensors() -> None:
    assert calls_of("wild_numbers") > 250
