"""A call that is split over ranks, in the form of the operators: who has which rows, and what pairs of pieces
are computed with."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Keywords
from .group import Ranks
from .row_layout import Layout, Piece

__all__ = ["Pair", "Plan", "part_of_mask", "part_of_slopes"]


class Pair(NamedTuple):
    """Queries of this rank and keys of a rank, which they see: of all sequences, or of one."""

    query: Piece
    key: Piece
    sequence: int | None = None


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
    #: Whether rows are those of packed sequences, and whether each of them is computed alone: masks and
    #: patterns of dropout begin elsewhere for each.
    packed: bool = False
    one_by_one: bool = False

    def pairs(self, source: int) -> list[Pair]:
        """Those of this rank's pieces of queries and a rank's pieces of keys that see each other."""
        pieces = [
            Pair(query, key)
            for query in self.queries.pieces(self.ranks.rank)
            for key in self.keys.pieces(source)
        ]
        if self.one_by_one:
            pieces = [
                Pair(query.of_sequence(number), key.of_sequence(number), number)
                for query, key, _ in pieces
                for number in range(len(query.spans))
            ]
        return [pair for pair in pieces if self._meet(pair.query, pair.key)]

    def _meet(self, query: Piece, key: Piece) -> bool:
        right = 0 if self.keywords.get("is_causal", False) else self.keywords.get("window_right", -1)
        left = self.keywords.get("window_left", -1)
        offset = self.query_offset
        return any(
            q.begin < q.end
            and k.begin < k.end
            and (right < 0 or k.begin <= q.end - 1 + offset + right)
            and (left < 0 or k.end - 1 >= q.begin + offset - left)
            for q, k in zip(query.spans, key.spans, strict=True)
        )

    def options(self, pair: Pair) -> Keywords:
        """The keywords of the operators for a pair."""
        offsets = [
            q.begin + self.query_offset - k.begin
            for q, k in zip(pair.query.spans, pair.key.spans, strict=True)
        ]
        if self.packed and not self.one_by_one:
            return {
                **self.keywords,
                **_packed("q", pair.query, self.device),
                **_packed("k", pair.key, self.device),
                "query_offsets": torch.tensor(offsets, dtype=torch.int64, device=self.device),
            }
        result = {**self.keywords, "query_offset": offsets[0]}
        if "dropout_p" in self.keywords:
            first = [pair.query.spans[0].begin, pair.key.spans[0].begin]
            origin = [self.seed, pair.sequence or 0, self.first_head, *first]
            result["dropout_seed"] = torch.tensor(origin, dtype=torch.int64, device=self.device)
        return result


def _packed(name: str, piece: Piece, device: torch.device) -> Keywords:
    """Where the rows of each sequence are in a piece."""
    sizes = [end - begin for begin, end in piece.spans]
    starts = list(accumulate(sizes, initial=0))
    return {
        f"cu_seqlens_{name}": torch.tensor(starts, dtype=torch.int64, device=device),
        f"max_seqlen_{name}": max(sizes),
    }


def part_of_mask(mask: Tensor, pair: Pair) -> Tensor:
    """A view of a mask (B | 1, H | 1, L | 1, S | 1) of this rank's queries and all keys of their sequence.

    Where this rank has one row, a mask of one row is that row's and that of all its rows alike.
    """
    rows = pair.query.rows if mask.size(2) != 1 else slice(None)
    columns = slice(*pair.key.spans[0]) if mask.size(3) != 1 else slice(None)
    return mask[:, :, rows, columns]


def part_of_slopes(slopes: Tensor, pair: Pair) -> Tensor:
    """A view of slopes (B | 1, H)."""
    if pair.sequence is None or slopes.size(0) == 1:
        return slopes
    return slopes[pair.sequence : pair.sequence + 1]
