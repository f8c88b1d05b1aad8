"""Packed sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import (
    REFUSALS,
    AttentionCall,
    AttentionOptions,
    PackedCall,
    autocast,
    keywords_for,
    sequence_checks,
    shapes,
    with_options,
)
from ..arguments.call import DEFAULT_SOFTCAP, DEFAULT_WINDOW
from ..attend import attend
from .group import REFUSED, Ranks, agree, eager, ranks_of
from .layout import Layout, LayoutName
from .plan import Plan
from .ring import RingAttention
from .split import Part, choices

__all__ = ["ring_varlen_attention"]


@eager
def ring_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Any = None,
    layout: LayoutName = "zigzag",
    rotate: Literal["p2p", "allgather"] = "p2p",
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`ring_attention` of sequences that are packed one behind the other, each of which sees itself.

    Args:
        query: (rows, H, E), this rank's rows of all sequences, as :func:`shard_sequence` deals them out with
            ``cu_seqlens``: of each sequence a part (zigzag), or a part of all rows (contiguous).
        key: (rows, Hk, E), likewise.
        value: (rows, Hk, Ev), likewise.
        cu_seqlens: (B + 1,) integers on the CPU: where each sequence begins among the rows of all ranks, and
            where the last one ends; the same on every rank.
        is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes: as
            :func:`selfattn_ext.varlen_attention` takes them.
        sinks: (H,), a logit per head.
        group, layout, rotate, return_lse: as :func:`ring_attention` takes them.

    Returns:
        out (rows, H, Ev), or (out, lse), lse (H, rows). Both are differentiable once.

    Raises:
        as :func:`ring_attention`.

    Masks and dropout are not taken; :func:`ulysses_attention` has both, for sequences of one length.
    """
    choices(layout, rotate)
    ranks = ranks_of(group)
    options = AttentionOptions(
        None,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        window_size,
        softcap,
        alibi_slopes,
        sinks,
        0,
        False,
        return_lse,
    )

    def compute(call: AttentionCall) -> shapes.Results:
        part, starts = _part(call, cu_seqlens, ranks)
        lies = Layout(layout, starts, ranks.size)
        _check_rows(lies, ranks.rank, query.size(0), key.size(0))
        described = {**part.description(), "layout": layout, "rotate": rotate, "cu_seqlens": starts}
        agree(ranks, query.device, described, (0, 0, 0))
        query_rows, key_rows, value_rows, _, slopes, own_sinks, _ = part.tensors
        plan = Plan(
            ranks, lies, lies, rotate, part.scale, part.keywords, 0, query.device, 0, 0, packed=True
        )  # fmt: skip
        out, lse = RingAttention.apply(query_rows, key_rows, value_rows, None, slopes, own_sinks, plan)
        return shapes.restored_packed(out, None, lse if return_lse else None)

    return attend(AttentionCall(query, key, value, options), compute, check_packed)


def _part(call: AttentionCall, cu_seqlens: Tensor, ranks: Ranks) -> tuple[Part, tuple[int, ...]]:
    """This rank's part, and where the sequences begin. Where it is refused, the others get to know."""
    given = call.options
    try:
        check_packed(call)
        starts = checked_starts(cu_seqlens)
        form = shapes.packed(autocast(*call[:3]), len(starts) - 1, given.enable_gqa)
        keywords = keywords_for(given, form.query)
        tensors, scale, keywords, form = with_options(form, given, keywords)
        return Part(tensors, scale, keywords, 0, form), starts
    except REFUSALS as refusal:
        device = call.query.device if isinstance(call.query, Tensor) else torch.device("cpu")
        agree(ranks, device, {REFUSED: str(refusal)}, (0, 0, 0))
        raise


def checked_starts(cu_seqlens: Any) -> tuple[int, ...]:
    """Where sequences begin, and where the last one ends."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError("cu_seqlens must be a tensor (B + 1,) of integers")
    if cu_seqlens.is_floating_point() or cu_seqlens.device.type != "cpu":
        raise ValueError("cu_seqlens must be integers on the CPU: they say how much is exchanged")
    starts = tuple(cu_seqlens.tolist())
    if starts[0] != 0 or any(end < begin for begin, end in pairwise(starts)):
        raise ValueError(f"cu_seqlens must begin with 0 and never fall, but it is {list(starts)}")
    return starts


def check_packed(call: AttentionCall) -> None:
    """Every argument but cu_seqlens, as if this rank's rows were one sequence."""
    query, key, value, given = call
    rows = query.size(0), key.size(0)
    starts = [torch.tensor([0, count], dtype=torch.int32) for count in rows]
    sequence_checks.packed_attention(
        PackedCall(query, key, value, starts[0], starts[1], *rows, None, None, None, None, given)
    )


def _check_rows(layout: Layout, rank: int, queries: int, keys: int) -> None:
    expected = layout.size(rank)
    if not queries == keys == expected:
        raise ValueError(
            f"rank {rank} has {queries} rows of query and {keys} of key, but the {layout.name} layout of "
            f"these sequences gives it {expected}: see shard_sequence"
        )
