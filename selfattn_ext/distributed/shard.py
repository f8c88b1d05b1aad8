"""Dealing a sequence out to ranks, and putting it together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .group import ranks_of
from .layout import LAYOUTS, Layout, LayoutName, put_rows, rows_of_rank
from .packed import checked_starts

__all__ = ["shard_sequence", "unshard_sequence"]


def shard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: Any = None,
    layout: LayoutName = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole: of tokens, position ids, a mask's queries.

    Args:
        tensor: any dtype and shape.
        dim: the dimension of the sequence.
        group, layout: as :func:`ring_attention` takes them.
        cu_seqlens: (B + 1,) integers on the CPU, of packed sequences: where each begins, and where the last
            one ends.

    Returns:
        A tensor of its own, whose gradient is that of these rows.
    """
    ranks = ranks_of(group)
    return rows_of_rank(tensor, _checked(layout, tensor.size(dim), ranks.size, cu_seqlens), ranks.rank, dim)


def unshard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: Any = None,
    layout: LayoutName = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole sequence, on every rank, of what each rank has of it; the inverse of :func:`shard_sequence`.

    Its gradient is the sum over the ranks of what each gives this rank's rows. All ranks must call it.
    """
    ranks = ranks_of(group)
    sizes = torch.tensor([tensor.size(dim)], device=tensor.device)
    everybody = sizes.new_empty(ranks.size)
    dist.all_gather(list(everybody.split(1)), sizes, ranks.group)
    found = _checked(layout, int(everybody.sum()), ranks.size, cu_seqlens)
    if [found.size(rank) for rank in range(ranks.size)] != everybody.tolist():
        raise ValueError(f"the ranks have {everybody.tolist()} rows, which is not the {layout} layout")
    joined: Tensor = _Join.apply(tensor.movedim(dim, 0), ranks, found)
    return joined.movedim(0, dim)


def _checked(name: str, length: int, ranks: int, cu_seqlens: Tensor | None) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, but it is {name!r}")
    starts = (0, length) if cu_seqlens is None else checked_starts(cu_seqlens)
    if starts[-1] != length:
        raise ValueError(f"cu_seqlens ends at {starts[-1]}, but there are {length} rows")
    return Layout(name, starts, ranks)


class _Join(Function):
    """(own rows, ...) to (rows of all, ...)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Any, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.ranks, ctx.layout = ranks, layout
        most = max(layout.size(rank) for rank in range(ranks.size))
        filled = own.new_zeros(most, *own.shape[1:])
        filled[: len(own)] = own
        everybody = own.new_empty(ranks.size, *filled.shape)
        dist.all_gather(list(everybody.unbind()), filled, ranks.group)
        joined = own.new_empty(layout.length, *own.shape[1:])
        for rank in range(ranks.size):
            put_rows(joined, everybody[rank], layout, rank, 0)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.ranks.group)
        return rows_of_rank(total, ctx.layout, ctx.ranks.rank, 0), None, None
