"""Compilation and loading of the functions in score_functions.cpp."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from selfattn_ext.build import library, sources

SOURCE = Path(__file__).parent / "score_functions.cpp"


@functools.cache
def _load(function: str, number: str) -> str:
    name = f"test_{function}_{number}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.so"
        compiler = os.environ.get("CXX", "c++").split()
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{sources.root()}"]
        flags += [f"-DFUNCTION={function}", f"-DNUMBER={number}"]
        subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(file)], check=True)
        library.extension().load_score_function(name, str(file))
    return name


def load(function: str, dtype: torch.dtype) -> str:
    """Loads a structure of the source; returns the name that operators know it by, for inputs of a dtype."""
    return _load(function, "double" if dtype == torch.float64 else "float")
