"""How an operator gets its fake kernel, and the callables that stand for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..build import library

__all__ = ["NAMESPACE", "SIXTEEN_BITS", "Operator", "direct", "named", "operator"]

Operator = TypeVar("Operator", bound=Callable[..., Any])

#: The dtypes for which a forward keeps what rounding took away from its output.
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_ops = library.ops()

#: The dispatcher namespace of the operators: torch.ops.<NAMESPACE>.
NAMESPACE: str = _ops.name


def operator(fake: Operator) -> Operator:
    """The operator that a fake kernel, which is registered, is named after."""
    return named(fake.__name__, fake)


def named(name: str, fake: Operator) -> Operator:
    """The operator of that name, whose fake kernel is registered."""
    torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
    found: Operator = getattr(_ops, name).default
    return found


def direct(of: Operator) -> Operator:
    """The callable inside an operator, which costs less. torch.compile traces operators only."""
    found: Operator = getattr(of, "_op", of)
    return found
