"""The operators on CUDA tensors without a GPU: the CUDA half of csrc/ops, on the kernels of tests/emulator
and a device in memory of the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from emulator import build

import selfattn_ext

TESTS = Path(__file__).parent


def test_the_operators_agree_with_those_of_the_cpu() -> None:
    package = str(Path(selfattn_ext.__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SELFATTN")}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "emulator.engine_cases"],
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [package, str(TESTS), os.environ.get("PYTHONPATH", "")])
            ),
            "SELFATTN_LIBRARY": str(build.build("device")),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout) > 500
