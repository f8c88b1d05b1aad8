"""The tests of the package once more with their tensors on the GPU; see tests/support/gpu.py."""

from __future__ import annotations

import re
import subprocess
import sys

import gpu
import modules
import pytest
import warm

gpu.need()


@pytest.mark.parametrize("module", gpu.MODULES)
def test_on_the_gpu(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(modules.paths()[module])],
        env=warm.variables(**{gpu.DEVICE_VARIABLE: "cuda"}),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
