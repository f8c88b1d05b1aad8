"""shard_sequence deals a sequence out to ranks, and unshard_sequence puts it together again."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..arguments import checks
from .agreement import Numbers, agree, tells
from .group import Ranks, eager, ranks_of
from .packed import checked_starts
from .row_layout import Layout, LayoutName, put_rows, rows_of_rank
from .split import check_length, check_plain, choices, laid_out
from .taking_part import anchor, recorded, recording, tied

__all__ = ["shard_sequence", "unshard_sequence"]


def shard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: Any = None,
    layout: LayoutName = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole, such as tokens, positions or a mask.

    Args:
        tensor: any dtype and shape.
        dim: the dimension of the sequence.
        group, layout: as :func:`ring_attention` takes them.
        cu_seqlens: (B + 1,) integers on the CPU, of packed sequences: where each begins, and where the last
            one ends.

    Returns:
        The rows of this rank as a copy, in the tensor's dtype. They are differentiable, and the gradient of
        the other rows is 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed. Nothing is exchanged,
            so the other ranks do not learn of it.
        IndexError: ``dim`` is no dimension of the tensor.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> import torch
        >>> from selfattn_ext.distributed import shard_sequence
        >>> tokens = torch.arange(8)
        >>> rows = shard_sequence(tokens, dim=0)  # of two ranks, the first one gets 0, 1, 6, 7
        >>> positions = shard_sequence(torch.arange(8), dim=0)
    """
    ranks = ranks_of(group)
    choices(layout)
    length = tensor.size(dim)
    starts = (0, length) if cu_seqlens is None else checked_starts(cu_seqlens)
    check_length(starts, length)
    return rows_of_rank(tensor, Layout(layout, starts, ranks.size), ranks.rank, dim)


@eager
@tells
def unshard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: Any = None,
    layout: LayoutName = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole sequence, on every rank, of what each rank has of it; the inverse of :func:`shard_sequence`.

    Args:
        tensor: this rank's rows, of any shape and of a dtype that the group's backend sends, both the same on
            all ranks but for the number of rows.
        dim, group, layout, cu_seqlens: as :func:`shard_sequence` takes them, the same on all ranks.

    Returns:
        All rows as a new tensor of the same dtype. They are differentiable, and the gradient of this rank's
        rows is the sum of what all ranks give them.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed; on every rank if ranks
            make different calls, one of them is refused, or they have other rows than the layout gives them.
        NotImplementedError: a FakeTensor, a tensor with a tangent, or a transform of torch.func.
        RuntimeError: torch.distributed is not initialised, or a rank does not come within the group's
            timeout.

    Every rank of the group has to call it, and to compute the gradient if one does.

    Example:
        >>> import torch
        >>> from selfattn_ext.distributed import shard_sequence, unshard_sequence
        >>> tokens = torch.arange(8)
        >>> torch.equal(unshard_sequence(shard_sequence(tokens, dim=0), dim=0), tokens)
        True
    """
    ranks = ranks_of(group)
    check_plain(tensor=checks.dense_tensor("tensor", tensor))
    if tensor.is_meta:
        raise ValueError("tensor is on the meta device and has no data to exchange")
    starts = None if cu_seqlens is None else checked_starts(cu_seqlens)
    choices(layout)
    rows = tensor.size(dim)
    dim %= tensor.dim()
    described = {
        "the function": "unshard_sequence", "dtype": str(tensor.dtype), "dim": dim,
        "the shape without the rows": [*tensor.shape[:dim], *tensor.shape[dim + 1 :]],
        "layout": layout, "cu_seqlens": starts,
    }  # fmt: skip
    numbers, flags = agree(ranks, described, Numbers(query_rows=rows, flags=recorded(tensor)))
    found = laid_out(layout, "tensor", [each.query_rows for each in numbers], starts)
    joined, _ = _Join.apply(recording(tensor, flags).movedim(dim, 0), ranks, found)
    whole: Tensor = joined.movedim(0, dim)
    return whole


class _Join(Function):
    """Joins the (own rows, ...) of all ranks to (all rows, ...)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, layout: Layout) -> Any:  # type: ignore[override]
        ctx.ranks, ctx.layout = ranks, layout
        most = max(layout.size(rank) for rank in range(ranks.size))
        filled = own.new_zeros(most, *own.shape[1:])
        filled[: len(own)] = own
        everybody = own.new_empty(ranks.size, *filled.shape)
        dist.all_gather(list(everybody.unbind()), filled, ranks.group)
        joined = own.new_empty(layout.length, *own.shape[1:])
        for rank in range(ranks.size):
            put_rows(joined, everybody[rank], layout, rank, 0)
        return joined, anchor(ctx, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # type: ignore[override]
        of_own, _ = _OwnOfSum.apply(*tied(ctx, [grad]), ctx.ranks, ctx.layout)
        return of_own, None, None


class _OwnOfSum(Function):
    """The gradient of :class:`_Join`: the sum of all ranks' (all rows, ...), and of that the own rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks, layout: Layout) -> Any:  # type: ignore[override]
        ctx.ranks, ctx.layout = ranks, layout
        total = whole.contiguous().clone()
        dist.all_reduce(total, group=ranks.group)
        return rows_of_rank(total, layout, ranks.rank, 0), anchor(ctx, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # type: ignore[override]
        of_whole, _ = _Join.apply(*tied(ctx, [grad]), ctx.ranks, ctx.layout)
        return of_whole, None, None
