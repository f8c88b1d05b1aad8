"""Argument checks that the layers share."""

from __future__ import annotations

import torch
from torch import Tensor


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_input(name: str, x: Tensor, features: int, weight: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() < 2 or x.shape[-1] != features:
        raise ValueError(f"{name} must be (..., {features}) with at least 2 dimensions, got {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the device of the parameters, {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} must have the dtype of the parameters, {weight.dtype}, got {x.dtype}")
