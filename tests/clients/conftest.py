"""Tests with the programs that call attention: transformers, timm, diffusers.

`make test-clients` installs and runs them. pyproject.toml keeps `pytest` out of this folder unless named. A
module imports its client at the top, so that a missing one is an error and not a skip.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

# The models are built from their configurations with random weights: nothing is to come from a network. Read
# as the clients are imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"


def declare_operators_of_torchvision() -> torch.library.Library | None:
    """Lets torchvision be imported beside a torch for the CPU, where PyPI's build, for CUDA, does not load.

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
