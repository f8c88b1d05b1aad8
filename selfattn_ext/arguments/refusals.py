"""What is raised in place of an operator's refusal: see Note [Refusals] in :mod:`selfattn_ext.functional`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["REFUSALS", "explained", "out_of_memory"]

#: What operators, torch's views and attributes of things that are no tensors raise for bad arguments, and
#: what an operator raises where there is no memory for its result.
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, IndexError, MemoryError)


def explained(refusal: Exception, query: Tensor, check: Callable[..., None], *call: Any) -> Exception:
    """What to raise in place of one of REFUSALS: what the check finds wrong with the arguments of the call,
    the refusal itself where it finds nothing.
    """
    if isinstance(refusal, MemoryError):
        return out_of_memory(refusal, query)
    if type(refusal).__name__ == "GuardOnDataDependentSymNode":
        return refusal  # A graph cannot tell, and the check would ask the same.
    try:
        check(*call)
    except (ValueError, TypeError) as problem:
        return problem
    if "DefaultCPUAllocator" in str(refusal):
        # torch's own functions, of which the formula is made, have no class of their own for that.
        return MemoryError(f"not enough memory: {refusal}")
    return refusal


def out_of_memory(error: MemoryError, tensor: Tensor) -> Exception:
    """What to raise in place of an operator's MemoryError: on CUDA, what torch's own functions raise.

    The operators learn only that an allocation failed. Trying it once more tells why: an earlier kernel's
    error shows there as well as lack of memory.
    """
    if tensor.device.type != "cuda":
        return error
    wanted = re.search(r"\((\d+) bytes\)", str(error))
    try:
        torch.empty(int(wanted[1]) if wanted else 1, dtype=torch.uint8, device=tensor.device)
    except Exception as reason:
        return reason
    return torch.OutOfMemoryError(f"CUDA out of memory: {error}")
