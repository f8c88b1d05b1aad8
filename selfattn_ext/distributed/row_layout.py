"""Which rows of a sequence a rank of a group holds.

A sequence is cut into pieces of almost equal length, one for each rank (contiguous) or two (zigzag: rank r of
n has the pieces r and 2n - 1 - r, so that under the causal rule all ranks have the same work). Of sequences
packed one behind the other each is cut so (zigzag), or all as if they were one (contiguous). Pieces begin at
multiples of four rows, as random numbers of dropout are drawn for four keys at once; so the last pieces of a
short sequence may be empty. Those of torch's own context parallelism (head-tail) are zigzag's without that.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "LAYOUTS", "Layout", "LayoutName", "Piece", "Span", "put_rows", "rows_of_rank"]

LayoutName = Literal["zigzag", "contiguous", "head-tail"]
LAYOUTS = ("zigzag", "contiguous", "head-tail")

#: What the rows at which pieces begin are multiples of.
ALIGNMENT = 4


class Span(NamedTuple):
    """Rows begin .. end - 1 of a sequence."""

    begin: int
    end: int


class Piece(NamedTuple):
    """Rows of each sequence, which lie one behind the other in their rank's part from the row ``at`` on."""

    spans: tuple[Span, ...]
    at: int

    @property
    def rows(self) -> slice:
        """Where they are in the rank's part."""
        return slice(self.at, self.at + sum(end - begin for begin, end in self.spans))

    def of_sequence(self, number: int) -> Piece:
        """Those of one sequence."""
        before = Piece(self.spans[:number], self.at)
        return Piece((self.spans[number],), before.rows.stop)


class Layout(NamedTuple):
    """How a sequence lies on ``ranks`` ranks, or several that are packed: with ``starts`` = (0, length), or
    where each of them begins and the last one ends.
    """

    name: str
    starts: tuple[int, ...]
    ranks: int

    @property
    def length(self) -> int:
        """The rows of all sequences."""
        return self.starts[-1]

    def pieces(self, rank: int) -> list[Piece]:
        """Those of a rank that are not empty, in the order in which it has them."""
        numbers = [rank] if self.name == "contiguous" else [rank, 2 * self.ranks - 1 - rank]
        found: list[Piece] = []
        at = 0
        for number in numbers:
            piece = Piece(tuple(self._span(number, start, end) for start, end in pairwise(self.starts)), at)
            if piece.rows.stop > at:
                found.append(piece)
                at = piece.rows.stop
        return found

    def size(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(piece.rows.stop - piece.rows.start for piece in self.pieces(rank))

    def whole_rows(self, rank: int) -> list[Span]:
        """Where a rank's rows are among those of all sequences, in its order."""
        return [
            Span(start + span.begin, start + span.end)
            for piece in self.pieces(rank)
            for start, span in zip(self.starts, piece.spans, strict=False)
            if span.begin < span.end
        ]

    def _span(self, number: int, start: int, end: int) -> Span:
        """The rows of piece ``number`` of the sequence from ``start`` to ``end``."""
        if self.name != "contiguous":
            count, rows = 2 * self.ranks, ALIGNMENT if self.name == "zigzag" else 1
            return Span(_cut(end - start, number, count, rows), _cut(end - start, number + 1, count, rows))
        first, last = (_cut(self.length, at, self.ranks, ALIGNMENT) for at in (number, number + 1))
        begin = min(max(first - start, 0), end - start)
        return Span(begin, max(begin, min(last, end) - start))


def _cut(length: int, piece: int, count: int, rows: int) -> int:
    """Where a piece of so many begins: at a multiple of ``rows``."""
    return length if piece == count else piece * length // count // rows * rows


def rows_of_rank(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """A rank's part of all rows, which are along ``dim``; a tensor of its own."""
    spans = layout.whole_rows(rank)
    parts = [whole.narrow(dim, span.begin, span.end - span.begin) for span in spans]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0).clone()


def put_rows(whole: Tensor, part: Tensor, layout: Layout, rank: int, dim: int) -> None:
    """Writes a rank's part where its rows are among all."""
    at = 0
    for span in layout.whole_rows(rank):
        size = span.end - span.begin
        whole.narrow(dim, span.begin, size).copy_(part.narrow(dim, at, size))
        at += size
