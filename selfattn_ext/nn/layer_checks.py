"""Argument checks that the layers share, and their support of torch.fx.symbolic_trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..aux_request import returned
from ..collecting import keep


def check_positive(**sizes: int) -> None:
    """Raises ValueError for a size that is not a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_input(name: str, x: Tensor, features: int, weight: Tensor) -> None:
    """Raises TypeError or ValueError if x (..., L, features) does not fit a layer's parameter ``weight``."""
    if isinstance(x, Proxy):
        return  # a proxy of torch.fx stands for any tensor
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() < 2 or x.shape[-1] != features:
        raise ValueError(f"{name} must be (..., {features}) with at least 2 dimensions, got {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the device of the parameters, {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} must have the dtype of the parameters, {weight.dtype}, got {x.dtype}")


def is_traced(layer: nn.Module, x: Any) -> bool:
    """Tells whether torch.fx.symbolic_trace calls the layer as a part of a model."""
    return isinstance(x, Proxy) and x.tracer.root is not layer  # type: ignore[attr-defined]


def step_of_trace(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Records the call as one step of the trace, as torch.fx does with torch's own layers."""
    tracer: Any = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)


def own_request(return_aux: Any) -> Any:
    """Returns the request of a layer's caller. Where torch.fx traces the layer itself, the argument is a
    stand-in, and the trace is that of a call without it.
    """
    return None if isinstance(return_aux, Proxy) else return_aux


def given(layer: nn.Module, aux: list[Any], request: Any, kv_heads: int | None) -> list[Any]:
    """Keeps a layer's statistics for blocks that collect them, and gives its caller those of its request."""
    for found in aux:
        keep(layer, found, kv_heads)
    return [] if request is None else [returned(request, found, kv_heads) for found in aux]
