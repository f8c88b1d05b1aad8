"""Tensor subclasses and modes that define __torch_function__ see the public functions like those of torch."""

from __future__ import annotations

from typing import Any

import torch

from . import checks
from .call import AttentionCall, KVCacheCall, PackedCall

__all__ = ["call", "overriding_arguments"]


def overriding_arguments(*values: Any) -> tuple[Any, ...]:
    """The arguments whose types are to be asked; empty where none of them and no mode overrides functions."""
    # A CausalBias and a jagged tensor override torch's attention alone and are arguments like any other here.
    relevant = tuple(
        value for value in values if not checks.is_causal_bias(value) and not checks.is_jagged(value)
    )
    return relevant if torch.overrides.has_torch_function(relevant) else ()


def call(function: Any, relevant: tuple[Any, ...], given: AttentionCall | PackedCall | KVCacheCall) -> Any:
    """What those types make of the call: the function's arguments by place and by name as it has them."""
    values = {**given._asdict(), **given.options._asdict()}
    by_place = function.__code__.co_varnames[: function.__code__.co_argcount]
    return torch.overrides.handle_torch_function(
        function,
        relevant,
        *(values[name] for name in by_place),
        **{name: values[name] for name in function.__kwdefaults__},
    )
