"""Some heads of all rows in place of all heads of some rows, and back: the exchange of Ulysses."""

from __future__ import annotations

from collections.abc import Sequence
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

    def mine(self) -> int:
        """How many heads this rank gets."""
        begin, end = self.heads[self.ranks.rank]
        return end - begin


def heads_of_rank(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first head of a rank, and the one behind its last."""
    return rank * heads // ranks, (rank + 1) * heads // ranks


def to_heads(tensor: Tensor, deal: Deal) -> Tensor:
    """(B, all heads, this rank's rows, E) to (B, this rank's heads, all rows, E)."""
    result: Tensor = _ToHeads.apply(tensor, deal)
    return result


def to_rows(tensor: Tensor, deal: Deal) -> Tensor:
    """The way back. Where ranks share heads, what they have is added up."""
    result: Tensor = _ToRows.apply(tensor, deal)
    return result


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, deal: Deal) -> Tensor:  # type: ignore[override]
        ctx.deal = deal
        ranks, layout = deal.ranks, deal.layout
        sent = [tensor[:, begin:end] for begin, end in deal.heads]
        batch, _, _, last = tensor.shape
        shapes = [(batch, deal.mine(), layout.size(rank), last) for rank in range(ranks.size)]
        result = tensor.new_empty(batch, deal.mine(), layout.length, last)
        for rank, part in enumerate(_all_to_all(ranks, sent, shapes)):
            put_rows(result, part, layout, rank, 2)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return to_rows(grad, ctx.deal), None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, deal: Deal) -> Tensor:  # type: ignore[override]
        ctx.deal = deal
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

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return to_heads(grad, ctx.deal), None


def _all_to_all(ranks: Ranks, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each rank has for this one, of these shapes, for what this one has for each."""
    joined = torch.cat([tensor.reshape(-1) for tensor in sent])
    traffic.note(tensor for rank, tensor in enumerate(sent) if rank != ranks.rank)
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    received = joined.new_empty(sum(sizes))
    dist.all_to_all_single(received, joined, sizes, [tensor.numel() for tensor in sent], ranks.group)
    return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
