"""The rows of a sequence that each rank of a group holds.

A sequence is cut into spans of almost equal length, one for each rank (contiguous) or two (zigzag: rank r of
n has the spans r and 2n - 1 - r, so that under the causal rule all ranks have the same work). Packed
sequences are each cut so (zigzag), or all together as if they were one (contiguous). Spans begin at multiples
of four rows, as random numbers of dropout are drawn for four keys at once; so the last spans of a short
sequence may be empty. Those of torch's own context parallelism (head-tail) are zigzag's without that.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "LAYOUTS", "Layout", "LayoutName", "Span", "put_rows", "rows_of_rank"]

LayoutName = Literal["zigzag", "contiguous", "head-tail"]
LAYOUTS = ("zigzag", "contiguous", "head-tail")

#: Spans begin at rows that are multiples of this.
ALIGNMENT = 4


class Interval(NamedTuple):
    """Rows begin .. end - 1 of a sequence."""

    begin: int
    end: int


class Span(NamedTuple):
    """Rows of each sequence, which lie end to end in their rank's part from the row ``at`` on."""

    intervals: tuple[Interval, ...]
    at: int

    @property
    def rows(self) -> slice:
        """The place of the span in the rank's part."""
        return slice(self.at, self.at + sum(end - begin for begin, end in self.intervals))

    def of_sequence(self, number: int) -> Span:
        """The part of the span that belongs to one sequence."""
        before = Span(self.intervals[:number], self.at)
        return Span((self.intervals[number],), before.rows.stop)


class Layout(NamedTuple):
    """The layout of a sequence on ``ranks`` ranks, with ``starts`` = (0, length), or of several packed ones,
    with ``starts`` where each of them begins and where the last one ends.
    """

    name: str
    starts: tuple[int, ...]
    ranks: int

    @property
    def length(self) -> int:
        """The rows of all sequences."""
        return self.starts[-1]

    def spans(self, rank: int) -> list[Span]:
        """The spans of a rank that are not empty, in the order in which it has them."""
        numbers = [rank] if self.name == "contiguous" else [rank, 2 * self.ranks - 1 - rank]
        found: list[Span] = []
        at = 0
        for number in numbers:
            span = Span(tuple(self._interval(number, start, end) for start, end in pairwise(self.starts)), at)
            if span.rows.stop > at:
                found.append(span)
                at = span.rows.stop
        return found

    def size(self, rank: int) -> int:
        """The number of rows of a rank."""
        return sum(span.rows.stop - span.rows.start for span in self.spans(rank))

    def whole_rows(self, rank: int) -> list[Interval]:
        """The places of a rank's rows among those of all sequences, in the rank's order."""
        return [
            Interval(start + each.begin, start + each.end)
            for span in self.spans(rank)
            for start, each in zip(self.starts, span.intervals, strict=False)
            if each.begin < each.end
        ]

    def _interval(self, number: int, start: int, end: int) -> Interval:
        """The rows of span ``number`` of the sequence from ``start`` to ``end``."""
        if self.name != "contiguous":
            count, rows = 2 * self.ranks, ALIGNMENT if self.name == "zigzag" else 1
            return Interval(*(_cut(end - start, each, count, rows) for each in (number, number + 1)))
        first, last = (_cut(self.length, at, self.ranks, ALIGNMENT) for at in (number, number + 1))
        begin = min(max(first - start, 0), end - start)
        return Interval(begin, max(begin, min(last, end) - start))


def _cut(length: int, span: int, count: int, rows: int) -> int:
    """The first row of a span, of ``count`` that a sequence is cut into: a multiple of ``rows``."""
    return length if span == count else span * length // count // rows * rows


def rows_of_rank(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """A rank's part of all rows, which are along ``dim``; a tensor of its own."""
    parts = [whole.narrow(dim, begin, end - begin) for begin, end in layout.whole_rows(rank)]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0).clone()


def put_rows(whole: Tensor, part: Tensor, layout: Layout, rank: int, dim: int) -> None:
    """Writes a rank's part where its rows are among all."""
    at = 0
    for begin, end in layout.whole_rows(rank):
        size = end - begin
        whole.narrow(dim, begin, size).copy_(part.narrow(dim, at, size))
        at += size
