"""The processes that a sequence is split over: which they are, and whether they agree about a call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..arguments.split_blocks import WHY_EAGER

__all__ = ["REFUSED", "Ranks", "agree", "crossing", "eager", "ranks_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: What a rank says instead of its call, with the reason.
REFUSED = "refused"


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
    """Of None, the default group, a ProcessGroup, or a DeviceMesh of one dimension.

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
    """That two groups are the dimensions of a mesh: they share this process alone.

    Raises:
        ValueError: they do not.
    """
    shared = {*dist.get_process_group_ranks(group.group)} & {*dist.get_process_group_ranks(ring.group)}
    if len(shared) != 1:
        raise ValueError(
            "group and ring_group must be two dimensions of a mesh, which share one process, but they share "
            f"{len(shared)}"
        )


def agree(ranks: Ranks, device: torch.device, call: Mapping[str, Any], own: tuple[int, ...]) -> Tensor:
    """The numbers ``own`` of all ranks, (ranks, len(own)), once they all make the same call.

    Costs an exchange of a few bytes, before which nothing else is exchanged.

    Raises:
        ValueError: on every rank, where a rank makes another call: it names what differs.
    """
    text = repr(sorted(call.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest, *own], dtype=torch.int64, device=device)
    everybody = mine.new_empty(ranks.size, len(mine))
    dist.all_gather(list(everybody.unbind()), mine, ranks.group)
    found = everybody.cpu()
    if bool((found[:, 0] == digest).all()):
        return found[:, 1:]
    calls: list[Any] = [None] * ranks.size
    dist.all_gather_object(calls, dict(call), ranks.group)
    raise ValueError(_difference(calls))


def _difference(calls: list[Mapping[str, Any]]) -> str:
    """The first thing in which ranks differ."""
    for rank, call in enumerate(calls):
        if REFUSED in call:
            return f"rank {rank} has made no call, as its arguments were refused: {call[REFUSED]}"
    for name in sorted(set().union(*calls)):
        values = [call.get(name) for call in calls]
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = f"{values[0]} on rank 0", f"{value} on rank {rank}"
                return f"ranks must make the same call, but {name} is {first} and {other}"
    return "ranks must make the same call, but their calls differ"
