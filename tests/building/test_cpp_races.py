"""The C++ tests of code that divides work among threads, under ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sanitizers


@pytest.mark.parametrize(
    ("name", "tested"), [("test_parallel", []), ("test_joint_task", ["cpu/joint_task.cpp"])]
)
def test_threads(name: str, tested: list[str], tmp_path: Path) -> None:
    program = tmp_path / name
    sources = [ROOT / "tests" / "cpp" / f"{name}.cpp", *(ROOT / "csrc" / source for source in tested)]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, *map(str, sources), "-o", str(program)], check=True)
    # A race makes the exit code 66, even if the program's own checks succeed.
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
