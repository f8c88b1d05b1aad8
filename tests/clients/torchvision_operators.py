"""Operators that let torchvision be imported with a torch for the CPU.

Every process that imports clients imports this module.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def declare_operators_of_torchvision() -> torch.library.Library | None:
    """Declares operators whose library on PyPI is for CUDA and does not load with a torch for the CPU.

    timm needs only the Python code of torchvision, whose import fails if these two operators are unknown.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None  # the test that needs torchvision reports that it is missing
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators
    return None


_OPERATORS = declare_operators_of_torchvision()  # the operators exist as long as this object
