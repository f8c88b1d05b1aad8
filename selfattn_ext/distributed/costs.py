"""The costs of a split on paper: the work of each rank, and the bytes that it sends.

>>> from selfattn_ext.distributed.costs import Work
>>> Work("zigzag", 65536, 8, is_causal=True).share_of_ideal() > 0.99
True
>>> round(Work("contiguous", 65536, 8, is_causal=True).share_of_ideal(), 2)
0.53
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .row_layout import Interval, Layout, LayoutName

__all__ = ["Work", "ring_bytes", "ulysses_bytes"]


class Work:
    """The pairs of a query and a key that see each other, by the rank that computes them and the step.

    Args:
        layout: "zigzag", "contiguous" or "head-tail".
        length: rows of the sequence, or of each of several that are packed.
        ranks: how many share them.
        is_causal, window_size: as :func:`ring_attention` takes them.
    """

    def __init__(
        self,
        layout: LayoutName,
        length: int | Sequence[int],
        ranks: int,
        *,
        is_causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
    ) -> None:
        lengths = [length] if isinstance(length, int) else list(length)
        lies = Layout(layout, tuple(accumulate(lengths, initial=0)), ranks)
        left, right = window_size
        if is_causal:
            right = 0 if right < 0 else min(right, 0)
        #: pairs[rank][step]: those with the keys of the rank that stands ``step`` places before.
        self.pairs = [
            [self._between(lies, rank, (rank - step) % ranks, left, right) for step in range(ranks)]
            for rank in range(ranks)
        ]

    def share_of_ideal(self, *, in_step: bool = False) -> float:
        """The pairs of an average rank over those of the slowest; with ``in_step``, where all wait for each
        other after each step, as they do when the exchange takes no time and nothing is ahead of need.
        """
        total = sum(map(sum, self.pairs))
        longest = max(map(sum, self.pairs))
        if in_step:
            longest = sum(map(max, zip(*self.pairs, strict=True)))
        return total / len(self.pairs) / longest if longest else 1.0

    def _between(self, lies: Layout, rank: int, source: int, left: int, right: int) -> int:
        return sum(
            _seen(q, k, left, right)
            for query in lies.spans(rank)
            for key in lies.spans(source)
            for q, k in zip(query.intervals, key.intervals, strict=True)
        )


def _seen(query: Interval, key: Interval, left: int, right: int) -> int:
    """The number of pairs of rows of one sequence that see each other."""
    at = torch.arange(query.begin, query.end)
    first = at.new_full(at.shape, key.begin) if left < 0 else (at - left).clamp(min=key.begin)
    last = at.new_full(at.shape, key.end) if right < 0 else (at + right + 1).clamp(max=key.end)
    return int((last - first).clamp(min=0).sum())


def ring_bytes(
    rows: int, ranks: int, *, kv_heads: int, head_dim: int, value_dim: int | None = None, batch: int = 1,
    bytes_per_number: int = 2, backward: bool = True,
) -> int:  # fmt: skip
    """The bytes that a rank with so many rows sends in a ring (p2p): keys and values of one rank after the
    other, and in the backward once more, with float32 gradients of them, which come home last.
    """
    numbers = rows * batch * kv_heads * (head_dim + (head_dim if value_dim is None else value_dim))
    forward = (ranks - 1) * numbers * bytes_per_number
    if not backward or ranks == 1:
        return forward
    return 2 * forward + ranks * numbers * max(4, bytes_per_number)


def ulysses_bytes(
    rows: int, ranks: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int | None = None,
    batch: int = 1, bytes_per_number: int = 2, backward: bool = True,
) -> int:  # fmt: skip
    """The bytes that a rank with so many rows sends in the exchange of heads, if ranks divide both kinds of
    heads: all but its own heads of query, key, value and out, and in the backward of their gradients.
    """
    last = head_dim if value_dim is None else value_dim
    numbers = rows * batch * (heads + kv_heads) * (head_dim + last)
    return numbers * (ranks - 1) // ranks * bytes_per_number * (2 if backward else 1)
