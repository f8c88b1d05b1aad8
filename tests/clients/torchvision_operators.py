"""What lets torchvision be imported beside a torch for the CPU: in every process that imports clients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def declare_operators_of_torchvision() -> torch.library.Library | None:
    """Declares operators whose library, PyPI's for CUDA, does not load beside a torch for the CPU.

    timm needs torchvision, but only what is Python in it, whose import fails where these two are unknown.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None  # the test that needs it says so
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators
    return None


_OPERATORS = declare_operators_of_torchvision()  # they are there as long as the object
