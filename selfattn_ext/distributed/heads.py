"""The exchange of Ulysses: all heads of some rows for some heads of all rows, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..reference import accumulation_dtype
from . import traffic
from .group import Ranks
from .row_layout import Layout, put_rows, rows_of_rank
from .taking_part import anchor, tied

__all__ = ["Deal", "heads_of_rank", "to_heads", "to_rows"]


class Deal(NamedTuple):
    """The heads that each rank gets, and the layout of the rows. Ranks may share heads."""

    ranks: Ranks
    layout: Layout
    heads: tuple[tuple[int, int], ...]
    total: int
    #: Whether any rank wants a gradient through the exchange.
    differentiated: bool

    def mine(self) -> int:
        """The number of heads that this rank gets."""
        begin, end = self.heads[self.ranks.rank]
        return end - begin


def heads_of_rank(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first head of a rank, and the one behind its last."""
    return rank * heads // ranks, (rank + 1) * heads // ranks


def to_heads(tensors: Sequence[Tensor], deals: Sequence[Deal]) -> list[Tensor]:
    """Exchanges each (B, all heads, this rank's rows, E) for (B, this rank's heads, all rows, E)."""
    *results, _ = _ToHeads.apply(deals, *tensors)
    return results


def to_rows(tensors: Sequence[Tensor], deals: Sequence[Deal]) -> list[Tensor]:
    """The inverse of :func:`to_heads`. Results of heads that ranks share are added up."""
    *results, _ = _ToRows.apply(deals, *tensors)
    return results


class _ToHeads(Function):
    """Exchanges all tensors in one function. Its backward exchanges every gradient that any rank wants, zeros
    for those that this rank does not have: no rank knows what the losses of others depend on.
    """

    @staticmethod
    def forward(ctx: Any, deals: Sequence[Deal], *tensors: Tensor) -> Any:  # type: ignore[override]
        return _forward(ctx, _heads_of_all_rows, deals, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *_backward(ctx, to_rows, grads)


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, deals: Sequence[Deal], *tensors: Tensor) -> Any:  # type: ignore[override]
        return _forward(ctx, _rows_of_all_heads, deals, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *_backward(ctx, to_heads, grads)


def _forward(
    ctx: Any, exchange: Callable[[Tensor, Deal], Tensor], deals: Sequence[Deal], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The results of the exchange, and an :func:`anchor`."""
    results = [exchange(tensor, deal) for tensor, deal in zip(tensors, deals, strict=True)]
    ctx.deals = deals
    ctx.mark_non_differentiable(
        *(each for each, deal in zip(results, deals, strict=True) if not deal.differentiated)
    )
    return *results, anchor(ctx, tensors[0])


def _backward(ctx: Any, back: Callable[..., list[Tensor]], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the tensors, from those of the results."""
    wanted = [at for at, deal in enumerate(ctx.deals) if deal.differentiated]
    found = back(tied(ctx, [grads[at] for at in wanted]), [ctx.deals[at] for at in wanted])
    of_all: list[Tensor | None] = [None] * len(ctx.deals)
    for at, gradient in zip(wanted, found, strict=True):
        of_all[at] = gradient
    return of_all


def _heads_of_all_rows(tensor: Tensor, deal: Deal) -> Tensor:
    ranks, layout = deal.ranks, deal.layout
    sent = [tensor[:, begin:end] for begin, end in deal.heads]
    batch, _, _, last = tensor.shape
    shapes = [(batch, deal.mine(), layout.size(rank), last) for rank in range(ranks.size)]
    result = tensor.new_empty(batch, deal.mine(), layout.length, last)
    for rank, part in enumerate(_all_to_all(ranks, sent, shapes)):
        put_rows(result, part, layout, rank, 2)
    return result


def _rows_of_all_heads(tensor: Tensor, deal: Deal) -> Tensor:
    ranks, layout = deal.ranks, deal.layout
    sent = [rows_of_rank(tensor, layout, rank, 2) for rank in range(ranks.size)]
    batch, _, _, last = tensor.shape
    rows = layout.size(ranks.rank)
    shapes = [(batch, end - begin, rows, last) for begin, end in deal.heads]
    shared = sum(end - begin for begin, end in deal.heads) != deal.total
    dtype = accumulation_dtype(tensor.dtype) if shared else tensor.dtype
    result = torch.zeros(batch, deal.total, rows, last, dtype=dtype, device=tensor.device)
    for (begin, end), part in zip(deal.heads, _all_to_all(ranks, sent, shapes), strict=True):
        result[:, begin:end] += part
    return result.to(tensor.dtype)


def _all_to_all(ranks: Ranks, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Sends each rank its part, and returns the part that each has for this rank, of these shapes."""
    joined = torch.cat([tensor.reshape(-1) for tensor in sent])
    traffic.note(tensor for rank, tensor in enumerate(sent) if rank != ranks.rank)
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    received = joined.new_empty(sum(sizes))
    dist.all_to_all_single(received, joined, sizes, [tensor.numel() for tensor in sent], ranks.group)
    return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
