"""ring_varlen_attention: attention to packed sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import (
    AttentionCall,
    AttentionOptions,
    OptionalTensor,
    PackedCall,
    autocast,
    checks,
    keywords_for,
    sequence_checks,
    shapes,
    with_options,
)
from ..arguments.call import DEFAULT_SOFTCAP, DEFAULT_WINDOW
from ..attend import attend, aux_output, dropout_seed
from ..aux_request import Wanted, wanted
from ..reference_statistics import AuxOutput
from .agreement import Numbers, agree, tells
from .group import Ranks, eager, ranks_of
from .plan import Plan
from .ring import RingAttention
from .row_layout import Layout, LayoutName
from .split import Part, check_alignment, check_plain_call, choices

__all__ = ["ring_varlen_attention"]


@eager
@tells
def ring_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
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
    return_aux: Any = None,
) -> Any:
    """:func:`ring_attention` of sequences that are packed end to end, each of which sees itself alone.

    Args:
        query: (rows, H, E), this rank's rows of all sequences, as :func:`shard_sequence` deals them out with
            ``cu_seqlens``: a part of each sequence (zigzag), or of all rows (contiguous).
        key: (rows, Hk, E), likewise.
        value: (rows, Hk, Ev), likewise.
        cu_seqlens: (B + 1,) integers on the CPU: where each sequence begins among the rows of all ranks, and
            where the last one ends; the same on every rank.
        attn_mask: broadcastable to (H, rows, S), S the longest sequence: this rank's rows, as
            :func:`shard_sequence` deals them out with ``cu_seqlens``, and the keys of each row's own sequence
            from its first on. bool or floating; gets a gradient if it requires one.
        dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes: as
            :func:`selfattn_ext.varlen_attention` takes them. Rank 0 draws the seed of dropout, which needs
            keys that begin at multiples of four rows; contiguous does not promise that.
        sinks: (H,), a logit per head.
        group, layout, rotate, return_lse, return_aux: as :func:`ring_attention` takes them.

    Returns:
        out (rows, H, Ev), or (out, lse), lse (H, rows), with an :class:`selfattn_ext.AuxOutput` at the end
        for return_aux. All are differentiable once.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ring_attention` does.

    With a mask or dropout each sequence is a call of its own to the kernels, otherwise all are one.

    Example:
        >>> import torch
        >>> from selfattn_ext.distributed import ring_varlen_attention, shard_sequence
        >>> starts = torch.tensor([0, 24, 64])  # two packed sequences
        >>> rows = shard_sequence(torch.randn(64, 4, 16), dim=0, cu_seqlens=starts)
        >>> ring_varlen_attention(rows, rows, rows, starts, is_causal=True).shape
        torch.Size([64, 4, 16])
    """
    choices(layout, rotate)
    ranks = ranks_of(group)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks, 0,
        False, return_lse, return_aux,
    )  # fmt: skip
    wants = Wanted(lse=True) if return_aux is None else wanted(return_aux, False, True)

    def compute(call: AttentionCall) -> Any:
        part, starts = _part(call, cu_seqlens)
        lies = Layout(layout, starts, ranks.size)
        _check_rows(lies, ranks, query.size(0), key.size(0))
        drops = "dropout_p" in part.keywords
        if drops:
            check_alignment(lies)
        described = {
            "the function": "ring_varlen_attention", "cu_seqlens": starts, **part.description(),
            "layout": layout, "rotate": rotate, "return_aux": wants,
        }  # fmt: skip
        seed = int(dropout_seed(query)) if drops else 0
        numbers, flags = agree(ranks, described, Numbers(seed=seed, flags=part.flags()))
        query_rows, key_rows, value_rows, mask, slopes, own_sinks, _ = part.recording(flags).tensors
        plan = Plan(
            ranks, lies, lies, rotate, part.scale, part.keywords, 0, query.device, numbers[0].seed, 0,
            packed=True, one_by_one=drops or mask is not None,
        )  # fmt: skip
        out, *rest = RingAttention.apply(
            query_rows, key_rows, value_rows, mask, slopes, own_sinks, plan, wants
        )
        found = AuxOutput(**dict(zip(wants.names(), rest, strict=True)))
        results = shapes.restored_packed(out, None, found.lse if return_lse else None)
        return results if return_aux is None else (*results, aux_output(options, part.form, found))

    check = partial(check_packed, cu_seqlens=cu_seqlens)
    return attend(AttentionCall(query, key, value, options), compute, check)


def _part(call: AttentionCall, cu_seqlens: Tensor) -> tuple[Part, tuple[int, ...]]:
    """This rank's part, and where the sequences begin."""
    given = call.options
    check_packed(call, cu_seqlens)
    starts = checked_starts(cu_seqlens)
    form = shapes.packed(autocast(*call[:3]), len(starts) - 1, given.enable_gqa)
    unmasked = given._replace(attn_mask=None)
    tensors, scale, keywords, form = with_options(form, unmasked, keywords_for(unmasked, form.query))
    tensors = tensors._replace(mask=_mask_four_dimensional(given.attn_mask, call.query, starts))
    return Part(tensors, scale, keywords, 0, form), starts


def checked_starts(cu_seqlens: Any) -> tuple[int, ...]:
    """The first rows of the sequences, and the end of the last one."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError("cu_seqlens must be a tensor (B + 1,) of integers")
    if cu_seqlens.is_floating_point() or cu_seqlens.device.type != "cpu":
        raise ValueError("cu_seqlens must be integers on the CPU: they say how much is exchanged")
    starts = tuple(cu_seqlens.tolist())
    if starts[0] != 0 or any(end < begin for begin, end in pairwise(starts)):
        raise ValueError(f"cu_seqlens must begin with 0 and never fall, but it is {list(starts)}")
    return starts


def _mask_four_dimensional(mask: OptionalTensor, query: Tensor, starts: Sequence[int]) -> OptionalTensor:
    """(1, H | 1, rows | 1, S | 1)."""
    if mask is None:
        return None
    longest = max((end - begin for begin, end in pairwise(starts)), default=0)
    full = (query.size(1), query.size(0), longest)
    checks.broadcasts("attn_mask", mask.shape, full, "heads, this rank's rows and the longest sequence")
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def check_packed(call: AttentionCall, cu_seqlens: Tensor) -> None:
    """Checks every argument but the mask's shape, as if the first sequence had all of this rank's rows."""
    others = len(checked_starts(cu_seqlens)) - 2
    query, key, value, given = call
    check_plain_call(call)
    mask, given = given.attn_mask, given._replace(attn_mask=None)
    if mask is not None:
        checks.dense_tensor("attn_mask", checks.mask("attn_mask", mask))
        checks.on_device("attn_mask", mask, "query", query.device)
    rows = query.size(0), key.size(0)
    starts = [torch.tensor([0, count] + [count] * others, dtype=torch.int32) for count in rows]
    sequence_checks.packed_attention(
        PackedCall(query, key, value, starts[0], starts[1], *rows, None, None, None, None, given)
    )


def _check_rows(layout: Layout, ranks: Ranks, queries: int, keys: int) -> None:
    expected = layout.size(ranks.rank)
    if not queries == keys == expected:
        raise ValueError(
            f"rank {ranks.peer(ranks.rank)} has {queries} rows of query and {keys} of key, but the "
            f"{layout.name} layout of these sequences gives it {expected}: see shard_sequence"
        )
