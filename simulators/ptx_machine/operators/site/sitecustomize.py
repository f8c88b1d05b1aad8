"""Replaces torch's operators for CUDA tensors as soon as a process has imported torch.

Python imports this file by its name when it starts, if the file's folder is in PYTHONPATH.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

OPERATORS = os.environ.get("SELFATTN_PTX_OPERATORS", "")


class _AfterTorch:
    """Finds torch, once, and loads the replacements after it."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.ops.load_library(OPERATORS)
            import fused_attention  # noqa: F401

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if OPERATORS:
    sys.meta_path.insert(0, _AfterTorch)
