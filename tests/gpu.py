"""Whether tests can run on a GPU here, and what happens where they cannot."""

from __future__ import annotations

import os

import pytest
import torch

from selfattn_ext import library

#: Set to 1 where there is a GPU: that it cannot be used is then a failure.
REQUIRE = "SELFATTN_REQUIRE_CUDA"

#: On a GPU: the kernel that a call gets by itself, and the one that takes every call.
KERNELS = ("cuda", "cuda-simt")


def missing() -> str | None:
    """What is missing for tests on a GPU, or None."""
    if not library.extension().build_info()["cuda"]:
        return "needs a GPU, and this build of selfattn_ext is for the CPU alone"
    return None if torch.cuda.is_available() else "needs a GPU, and torch finds none"


def required() -> bool:
    """Whether a missing GPU is a failure."""
    return os.environ.get(REQUIRE, "") == "1"


def need() -> None:
    """For the top of a test module: skips the whole of it without a GPU, or fails where one is required."""
    reason = missing()
    if reason is not None and required():
        pytest.fail(f"{REQUIRE}=1: this module {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)
