"""Some heads of all rows in place of all heads of some rows, and back: the exchange of Ulysses."""

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
from .layout import Layout, put_rows, rows_of_rank

__all__ = ["Deal", "heads_of_rank", "to_heads", "to_rows"]


class Deal(NamedTuple):
    """Which heads each rank gets, for rows that are dealt out so. Ranks may share heads."""

    ranks: Ranks
    layout: Layout
    heads: tuple[tuple[int, int], ...]
    total: int
    #: Whether any rank wants the gradient of what is exchanged so.
    differentiated: bool

    def mine(self) -> int:
        """How many heads this rank gets."""
        begin, end = self.heads[self.ranks.rank]
        return end - begin


def heads_of_rank(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first head of a rank, and the one behind its last."""
    return rank * heads // ranks, (rank + 1) * heads // ranks


def to_heads(tensors: Sequence[Tensor], deals: Sequence[Deal]) -> tuple[Tensor, ...]:
    """Each (B, all heads, this rank's rows, E) to (B, this rank's heads, all rows, E)."""
    results: tuple[Tensor, ...] = _ToHeads.apply(tuple(deals), *tensors)
    return results


def to_rows(tensors: Sequence[Tensor], deals: Sequence[Deal]) -> tuple[Tensor, ...]:
    """The way back. Where ranks share heads, what they have is added up."""
    results: tuple[Tensor, ...] = _ToRows.apply(tuple(deals), *tensors)
    return results


class _ToHeads(Function):
    """All tensors are exchanged by one function, whose backward exchanges the gradients of all that any rank
    wants, zeros for those that have none here: what a rank's loss depends on, the others do not know.
    """

    @staticmethod
    def forward(ctx: Any, deals: Sequence[Deal], *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.deals = deals
        results = tuple(map(_heads_of_all_rows, tensors, deals))
        ctx.mark_non_differentiable(*_not_differentiated(results, deals))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *_gradients(to_rows, grads, ctx.deals)


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, deals: Sequence[Deal], *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.deals = deals
        results = tuple(map(_rows_of_all_heads, tensors, deals))
        ctx.mark_non_differentiable(*_not_differentiated(results, deals))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return None, *_gradients(to_heads, grads, ctx.deals)


def _not_differentiated(results: Sequence[Tensor], deals: Sequence[Deal]) -> list[Tensor]:
    return [each for each, deal in zip(results, deals, strict=True) if not deal.differentiated]


def _gradients(
    back: Callable[..., tuple[Tensor, ...]], grads: Sequence[Tensor], deals: Sequence[Deal]
) -> list[Tensor | None]:
    """Those of the tensors that were exchanged, of those of what came of them."""
    wanted = [at for at, deal in enumerate(deals) if deal.differentiated]
    found = back([grads[at] for at in wanted], [deals[at] for at in wanted])
    return [dict(zip(wanted, found, strict=True)).get(at) for at in range(len(deals))]


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
    """What each rank has for this one, of these shapes, for what this one has for each."""
    joined = torch.cat([tensor.reshape(-1) for tensor in sent])
    traffic.note(tensor for rank, tensor in enumerate(sent) if rank != ranks.rank)
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    received = joined.new_empty(sum(sizes))
    dist.all_to_all_single(received, joined, sizes, [tensor.numel() for tensor in sent], ranks.group)
    return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
