"""The plan of a call that is split over ranks: their rows, and the queries and keys that meet."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Keywords
from .group import Ranks
from .row_layout import Layout, Span

__all__ = ["Meeting", "Plan", "part_of_mask", "part_of_slopes"]


class Meeting(NamedTuple):
    """A span of this rank's queries and a span of a rank's keys, some of which they see: of all sequences, or
    of one.
    """

    query: Span
    key: Span
    sequence: int | None = None


class Plan(NamedTuple):
    """The parts of a call that ranks agree about. ``keywords`` are the operators', without positions."""

    ranks: Ranks
    queries: Layout
    keys: Layout
    rotate: str
    scale: float
    keywords: Keywords
    query_offset: int
    device: torch.device
    #: The seed of dropout, which is rank 0's.
    seed: int
    first_head: int
    #: Whether rows are those of packed sequences, and whether each of them is computed alone: masks and
    #: patterns of dropout begin elsewhere for each.
    packed: bool = False
    one_by_one: bool = False

    def meetings(self, source: int) -> list[Meeting]:
        """The meetings of this rank's queries with the keys of the rank ``source``."""
        possible = [
            Meeting(query, key)
            for query in self.queries.spans(self.ranks.rank)
            for key in self.keys.spans(source)
        ]
        if self.one_by_one:
            possible = [
                Meeting(query.of_sequence(number), key.of_sequence(number), number)
                for query, key, _ in possible
                for number in range(len(query.intervals))
            ]
        return [each for each in possible if self._meet(each.query, each.key)]

    def _meet(self, query: Span, key: Span) -> bool:
        right = 0 if self.keywords.get("is_causal", False) else self.keywords.get("window_right", -1)
        left = self.keywords.get("window_left", -1)
        offset = self.query_offset
        return any(
            q.begin < q.end
            and k.begin < k.end
            and (right < 0 or k.begin <= q.end - 1 + offset + right)
            and (left < 0 or k.end - 1 >= q.begin + offset - left)
            for q, k in zip(query.intervals, key.intervals, strict=True)
        )

    def options(self, meeting: Meeting) -> Keywords:
        """The keywords of the operators for a meeting."""
        offsets = [
            q.begin + self.query_offset - k.begin
            for q, k in zip(meeting.query.intervals, meeting.key.intervals, strict=True)
        ]
        if self.packed and not self.one_by_one:
            return {
                **self.keywords,
                **_packed("q", meeting.query, self.device),
                **_packed("k", meeting.key, self.device),
                "query_offsets": torch.tensor(offsets, dtype=torch.int64, device=self.device),
            }
        result = {**self.keywords, "query_offset": offsets[0]}
        if "dropout_p" in self.keywords:
            first = [meeting.query.intervals[0].begin, meeting.key.intervals[0].begin]
            origin = [self.seed, meeting.sequence or 0, self.first_head, *first]
            result["dropout_seed"] = torch.tensor(origin, dtype=torch.int64, device=self.device)
        return result


def _packed(name: str, span: Span, device: torch.device) -> Keywords:
    """The keywords that say where the rows of each sequence are in a span."""
    sizes = [end - begin for begin, end in span.intervals]
    starts = list(accumulate(sizes, initial=0))
    return {
        f"cu_seqlens_{name}": torch.tensor(starts, dtype=torch.int64, device=device),
        f"max_seqlen_{name}": max(sizes),
    }


def part_of_mask(mask: Tensor, meeting: Meeting) -> Tensor:
    """A view of a mask (B | 1, H | 1, L | 1, S | 1) of this rank's queries and all keys of their sequence.

    If this rank has one row, it makes no difference whether a mask of one row is for that row or for all.
    """
    rows = meeting.query.rows if mask.size(2) != 1 else slice(None)
    columns = slice(*meeting.key.intervals[0]) if mask.size(3) != 1 else slice(None)
    return mask[:, :, rows, columns]


def part_of_slopes(slopes: Tensor, meeting: Meeting) -> Tensor:
    """A view of the slopes (B | 1, H) of the meeting's sequence."""
    if meeting.sequence is None or slopes.size(0) == 1:
        return slopes
    return slopes[meeting.sequence : meeting.sequence + 1]
