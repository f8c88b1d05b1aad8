"""The tests of the package once more with their tensors on the GPU; see tests/support/gpu.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gpu
import modules
import pytest

import selfattn_ext

gpu.need()


@pytest.mark.parametrize("module", gpu.MODULES)
def test_on_the_gpu(module: str) -> None:
    package = str(Path(selfattn_ext.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(modules.paths()[module])],
        env={**os.environ, "PYTHONPATH": path, gpu.DEVICE_VARIABLE: "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
