"""Errors that replace an operator's refusal.

Note [Refusals] in :mod:`selfattn_ext.functional` says when they are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["REFUSALS", "explained", "out_of_memory"]

#: Errors that operators, torch's views, and attributes of objects that are not tensors raise for bad
#: arguments, and the error of an operator that has no memory for its result.
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, IndexError, MemoryError)


def explained(refusal: Exception, query: Tensor, check: Callable[..., None], *call: Any) -> Exception:
    """Returns the error to raise in place of one of REFUSALS.

    It is the mistake that the check finds in the arguments of the call, or the refusal itself if it finds
    none.
    """
    if isinstance(refusal, MemoryError):
        return out_of_memory(refusal, query)
    if type(refusal).__name__ == "GuardOnDataDependentSymNode":
        return refusal  # a graph has no answer, and the check would ask the same question
    try:
        check(*call)
    except (ValueError, TypeError) as problem:
        return problem
    if "DefaultCPUAllocator" in str(refusal):
        # torch's own functions, which the formula uses, raise a RuntimeError if there is no memory.
        return MemoryError(f"not enough memory: {refusal}")
    return refusal


def out_of_memory(error: MemoryError, tensor: Tensor) -> Exception:
    """Returns the error to raise in place of an operator's MemoryError: on CUDA, that of torch's functions.

    The operators learn only that an allocation failed. Trying it once more tells whether memory is missing
    or an earlier kernel has failed.
    """
    if tensor.device.type != "cuda":
        return error
    wanted = re.search(r"\((\d+) bytes\)", str(error))
    try:
        torch.empty(int(wanted[1]) if wanted else 1, dtype=torch.uint8, device=tensor.device)
    except Exception as reason:
        return reason
    return torch.OutOfMemoryError(f"CUDA out of memory: {error}")
