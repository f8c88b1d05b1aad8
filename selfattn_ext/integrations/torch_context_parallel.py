"""Switches selfattn_ext.distributed.torch_context_parallel, which it imports if it is needed."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

__all__ = ["activate", "restore"]

#: The module of torch's context parallelism.
_TORCHS = "torch.distributed.tensor.experimental._context_parallel._attention"


def activate() -> None:
    """Blocks of torch's context_parallel that begin from now on are ours."""
    if (module := _module()) is not None:
        module.activate()


def restore() -> None:
    """Blocks are torch's again, once this has been called as often as :func:`activate`."""
    if (module := _module()) is not None:
        module.restore()


def _module() -> Any:
    """The module that does it, or None while this process has no use for it.

    Its import is in this function because it takes more than a second, and needs torch.distributed, which not
    every build of torch has.
    """
    if _TORCHS not in sys.modules and not (dist.is_available() and dist.is_initialized()):
        return None
    from ..distributed import torch_context_parallel

    return torch_context_parallel
