"""Functions that torch.compile leaves out of its graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["outside_of_graphs"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_of_graphs(function: _Function) -> _Function:
    """What :func:`torch.compiler.disable` makes of a function, without loading the compiler, which takes
    seconds.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_Function, call)
