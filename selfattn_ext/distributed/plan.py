"""A call that is split over ranks, in the form of the operators: who has which rows, and what pairs of pieces
are computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Keywords
from .group import Ranks
from .layout import Layout, Piece

__all__ = ["Pair", "Plan", "part_of_mask"]


class Pair(NamedTuple):
    """Queries of this rank and keys of a rank, which they see."""

    query: Piece
    key: Piece


class Plan(NamedTuple):
    """What ranks agree about. ``keywords`` are the operators', without positions."""

    ranks: Ranks
    queries: Layout
    keys: Layout
    rotate: str
    scale: float
    keywords: Keywords
    query_offset: int
    device: torch.device
    #: Of dropout: rank 0's.
    seed: int
    first_head: int

    def pairs(self, source: int) -> list[Pair]:
        """Those of this rank's pieces of queries and a rank's pieces of keys that see each other."""
        return [
            Pair(query, key)
            for query in self.queries.pieces(self.ranks.rank)
            for key in self.keys.pieces(source)
            if self._meet(query, key)
        ]

    def _meet(self, query: Piece, key: Piece) -> bool:
        first, last = query.begin + self.query_offset, query.end - 1 + self.query_offset
        right = self.keywords.get("window_right", -1)
        if self.keywords.get("is_causal", False):
            right = 0
        left = self.keywords.get("window_left", -1)
        return (right < 0 or key.begin <= last + right) and (left < 0 or key.end - 1 >= first - left)

    def options(self, pair: Pair) -> Keywords:
        """The keywords of the operators for a pair."""
        result = {**self.keywords, "query_offset": pair.query.begin + self.query_offset - pair.key.begin}
        if "dropout_p" in self.keywords:
            origin = [self.seed, 0, self.first_head, pair.query.begin, pair.key.begin]
            result["dropout_seed"] = torch.tensor(origin, dtype=torch.int64, device=self.device)
        return result


def part_of_mask(mask: Tensor, pair: Pair) -> Tensor:
    """A view of a mask (B | 1, H | 1, L | 1, S | 1) of this rank's queries and all keys."""
    rows = pair.query.rows if mask.size(2) != 1 else slice(None)
    columns = slice(pair.key.begin, pair.key.end) if mask.size(3) != 1 else slice(None)
    return mask[:, :, rows, columns]
