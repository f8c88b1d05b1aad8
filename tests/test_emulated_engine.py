"""The operators on CUDA tensors without a GPU: the CUDA half of csrc/ops, on the kernels of tests/emulator
and a device in memory of the host.
"""

from __future__ import annotations

import subprocess
import sys

from emulator import build


def test_the_operators_are_accurate_and_agree_in_layout_with_those_of_the_cpu() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "emulator.engine_cases"],
        env=build.environment(build.build("device")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout) > 500
