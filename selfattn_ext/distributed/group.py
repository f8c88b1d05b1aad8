"""The processes that a sequence is split over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..arguments.split_blocks import WHY_EAGER

__all__ = ["Ranks", "crossing", "eager", "ranks_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Keeps a function out of the graphs of torch.compile, which break there, or refuse to (fullgraph)."""
    kept: _Function = torch.compiler.disable(function, reason=WHY_EAGER)
    return kept


class Ranks(NamedTuple):
    """A group of processes, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def peer(self, rank: int) -> int:
        """The number that torch.distributed knows a rank of the group by."""
        return dist.get_global_rank(self.group, rank % self.size)


def ranks_of(group: Any) -> Ranks:
    """The ranks of a ProcessGroup, of a DeviceMesh of one dimension, or for None of the default group.

    Raises:
        RuntimeError: torch.distributed has not been initialised.
        ValueError: a mesh of several dimensions, or a group that this process is not in.
        TypeError: something else.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first, in a "
            "program that torchrun starts"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh of one dimension, but it has {group.ndim}: take one of them, as in "
                "mesh['cp']"
            )
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, not {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    return Ranks(group, rank, dist.get_world_size(group))


def crossing(group: Ranks, ring: Ranks) -> None:
    """Checks that two groups are the dimensions of a mesh: they share this process alone.

    Raises:
        ValueError: they share more processes, or none.
    """
    shared = {*dist.get_process_group_ranks(group.group)} & {*dist.get_process_group_ranks(ring.group)}
    if len(shared) != 1:
        raise ValueError(
            "group and ring_group must be two dimensions of a mesh, which share one process, but they share "
            f"{len(shared)}"
        )
