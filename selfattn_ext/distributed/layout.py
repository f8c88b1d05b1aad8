"""Which rows of a sequence a rank of a group holds.

A sequence is cut into pieces of almost equal length, one for each rank (contiguous) or two (zigzag: rank r of
n has the pieces r and 2n - 1 - r, so that under the causal rule all ranks have the same work). Pieces begin
at multiples of four rows, as random numbers of dropout are drawn for four keys at once; so the last pieces of
a short sequence may be empty.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["LAYOUTS", "Layout", "Piece"]

LayoutName = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")

#: What the rows at which pieces begin are multiples of.
ALIGNMENT = 4


class Piece(NamedTuple):
    """Rows begin .. end - 1 of a sequence, which lie in a row of their rank's part from ``at`` on."""

    begin: int
    end: int
    at: int

    @property
    def rows(self) -> slice:
        """Where they are in the rank's part."""
        return slice(self.at, self.at + self.end - self.begin)


class Layout(NamedTuple):
    """How a sequence of ``length`` rows lies on ``ranks`` ranks."""

    name: str
    length: int
    ranks: int

    def pieces(self, rank: int) -> list[Piece]:
        """Those of a rank that are not empty, in the order in which it has them."""
        numbers = [rank] if self.name == "contiguous" else [rank, 2 * self.ranks - 1 - rank]
        found: list[Piece] = []
        at = 0
        for number in numbers:
            begin, end = self._begin(number), self._begin(number + 1)
            if begin < end:
                found.append(Piece(begin, end, at))
                at += end - begin
        return found

    def size(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(piece.end - piece.begin for piece in self.pieces(rank))

    def _begin(self, piece: int) -> int:
        count = self.ranks * (1 if self.name == "contiguous" else 2)
        if piece == count:
            return self.length
        return piece * self.length // count // ALIGNMENT * ALIGNMENT
