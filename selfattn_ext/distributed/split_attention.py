"""ring_attention and ulysses_attention, which users call on their rank's part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import AttentionCall, AttentionOptions, OptionalTensor, Tensors, shapes
from ..arguments.call import DEFAULT_QUERY_OFFSET, DEFAULT_SOFTCAP, DEFAULT_WINDOW
from ..attend import attend, aux_output
from ..autograd import attention_with_gradient, statistics_with_gradient
from ..aux_request import Wanted, wanted
from ..reference_statistics import AuxOutput
from .agreement import Flags, tells
from .group import crossing, eager, ranks_of
from .heads import Deal, heads_of_rank, to_heads, to_rows
from .plan import Plan
from .ring import RingAttention
from .row_layout import LayoutName
from .split import (
    Part,
    Split,
    check,
    check_columns,
    choices,
    digest_of_mask,
    part_of_call,
    split,
    split_again,
)

__all__ = ["ring_attention", "ulysses_attention"]


@eager
@tells
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """Attention over a sequence of which every rank of a group holds a part, with the result and the
    gradients that one process would give for these rows.

    Keys and values go around the ranks while each computes with those that it has.

    Args:
        query: (..., H, L, E), this rank's rows, as :func:`shard_sequence` deals them out.
        key: (..., H, S, E), likewise.
        value: (..., H, S, Ev), likewise.
        attn_mask: broadcastable to (..., H, L, S of all ranks): this rank's rows, and all keys in the order
            of the whole sequence. bool or floating, as in
            :func:`selfattn_ext.scaled_dot_product_attention`; gets a gradient if it requires one.
        dropout_p, is_causal, scale, enable_gqa, window_size, softcap, query_offset: as that function
            takes them, in positions of the whole sequence. Rank 0 draws the seed of dropout.
        group: a ProcessGroup or a DeviceMesh of one dimension; the default group by default.
        layout: how the sequence is dealt out: in one span for each rank (contiguous), or in two, so that
            under the causal rule all have as much to do (zigzag). head-tail is the zigzag of torch's own
            context parallelism, which begins spans at any row: dropout needs multiples of 4.
        rotate: whether blocks of keys and values go around, so that a rank holds at most two beside its own,
            or all come at once.
        alibi_slopes, sinks: as that function takes them, the same on every rank. Each rank gets the part of
            their gradient that comes from its rows: the gradient of one process is the sum over the ranks.
        return_lse: also return the log-sum-exp of this rank's rows.
        return_aux: an :class:`selfattn_ext.AuxRequest`, the same on every rank: also return the statistics of
            this rank's rows, and the weights that its keys receive from the queries of all ranks.

    Returns:
        out (..., H, L, Ev), this rank's rows, or (out, lse), with an :class:`selfattn_ext.AuxOutput` at the
        end for return_aux. All are differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed; on every rank if
            ranks make different calls or one of them is refused, naming the rank and what differs, before
            keys and values are exchanged.
        RuntimeError: torch.distributed is not initialised, or a rank does not come within the group's
            timeout.

    Every rank of the group has to call it, and to compute the gradient if one does. The method is that of Liu
    et al. (2023), "Ring Attention with Blockwise Transformers for Near-Infinite Context"; the zigzag layout
    is that of Zhu (2024), github.com/zhuzilin/ring-flash-attention.

    Example:
        >>> import torch
        >>> from selfattn_ext.distributed import ring_attention, shard_sequence
        >>> def attend(tokens):  # in every process, as torchrun starts them
        ...     rows = shard_sequence(tokens, dim=2)
        ...     return ring_attention(rows, rows, rows, is_causal=True)
        >>> attend(torch.randn(1, 4, 64, 16)).shape  # one process has all rows
        torch.Size([1, 4, 64, 16])
    """
    choices(layout, rotate)
    ranks = ranks_of(group)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, False, return_lse, return_aux,
    )  # fmt: skip
    wants = Wanted(lse=True) if return_aux is None else wanted(return_aux, False, True)

    def compute(call: AttentionCall) -> Any:
        part = part_of_call(call)
        together = split("ring_attention", part, ranks, layout, rotate=rotate, return_aux=wants)
        check_columns(part.tensors.mask, part.tensors.query, together.keys.length)
        out, found = _ring(part.recording(together.flags), together, rotate, 0, wants)
        return _in_users_form(part, options, out, found)

    return attend(AttentionCall(query, key, value, options), compute, check)


@eager
@tells
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Any = None,
    ring_group: Any = None,
    layout: LayoutName = "zigzag",
    rotate: Literal["p2p", "allgather"] = "p2p",
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """Attention over a split sequence by an exchange of heads: while it computes, each rank has some of the
    heads and the whole sequence.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale: as :func:`ring_attention` takes them.
        enable_gqa, window_size, softcap, alibi_slopes, sinks, query_offset: likewise.
        return_lse, return_aux: likewise.
        group: the ranks that exchange heads, as :func:`ring_attention` takes it. Query heads are dealt out as
            evenly as they can be; kv heads go where their query heads are, so that there may be fewer of them
            than ranks.
        ring_group: combines both ways on a mesh of two dimensions: the ranks that stand where this one
            stands in ``group``. The sequence is dealt out over this group by ``layout``, and what each gets
            over ``group`` in order: ``shard_sequence(shard_sequence(x, dim, group=ring_group), dim,
            group=group, layout="contiguous")``.
        layout, rotate: as :func:`ring_attention` takes them; ``rotate`` is the ring's.

    Returns:
        out (..., H, L, Ev), this rank's rows, or (out, lse). Differentiable any number of times, or once with
        a ring.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ring_attention` does; also for a ring_group that
            shares other processes than this one with ``group``.

    The method is that of Jacobs et al. (2023), "DeepSpeed Ulysses".

    Example:
        >>> import torch
        >>> from selfattn_ext.distributed import shard_sequence, ulysses_attention
        >>> def attend(tokens):  # in every process, as torchrun starts them
        ...     rows = shard_sequence(tokens, dim=2)
        ...     return ulysses_attention(rows, rows, rows, is_causal=True)
        >>> attend(torch.randn(1, 4, 64, 16)).shape  # one process has all rows
        torch.Size([1, 4, 64, 16])
    """
    choices(layout, rotate)
    ranks = ranks_of(group)
    ring = None if ring_group is None else ranks_of(ring_group)
    if ring is not None:
        crossing(ranks, ring)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, False, return_lse, return_aux,
    )  # fmt: skip
    wants = Wanted(lse=True) if return_aux is None else wanted(return_aux, False, True)

    def compute(call: AttentionCall) -> Any:
        part = part_of_call(call)
        own = split(
            "ulysses_attention", part, ranks, layout if ring is None else "contiguous",
            mask=digest_of_mask(part.tensors.mask), return_lse=return_lse, return_aux=wants,
        )  # fmt: skip
        together = own
        if ring is not None:
            together = split_again("ulysses_attention", part, own, ring, layout, rotate=rotate)
        check_columns(part.tensors.mask, part.tensors.query, together.keys.length)
        part = part.recording(together.flags)
        deal = _deal(own, part.tensors.query.size(1), Flags.RECORDS in together.flags)
        dealt = part._replace(tensors=_some_heads(part.tensors, own, deal, together.flags))
        first_head = deal.heads[ranks.rank][0]
        if ring is None:
            asked = wants if return_lse or return_aux is not None else Wanted()
            out, found = _whole(dealt, own, first_head, asked)
        else:
            out, found = _ring(dealt, together, rotate, first_head, wants)
        return _in_users_form(part, options, *_rows_of_all_heads(deal, own, out, found))

    return attend(AttentionCall(query, key, value, options), compute, check)


def _in_users_form(part: Part, options: AttentionOptions, out: Tensor, found: AuxOutput) -> Any:
    """The results of an attention function in the form that its caller gave."""
    results = shapes.restored(part.form, out, None, found.lse if options.return_lse else None)
    return results if options.return_aux is None else (*results, aux_output(options, part.form, found))


def _ring(
    part: Part, together: Split, rotate: str, first_head: int, wants: Wanted
) -> tuple[Tensor, AuxOutput]:
    query, key, value, mask, slopes, sinks, _ = part.tensors
    plan = Plan(
        together.ranks, together.queries, together.keys, rotate, part.scale, part.keywords,
        part.query_offset, query.device, together.seed, first_head,
    )  # fmt: skip
    out, *rest = RingAttention.apply(query, key, value, mask, slopes, sinks, plan, wants)
    return out, AuxOutput(**dict(zip(wants.names(), rest, strict=True)))


def _whole(part: Part, own: Split, first_head: int, wants: Wanted) -> tuple[Tensor, AuxOutput]:
    """Attention of this rank's heads over the whole sequence."""
    tensors, keywords = part.tensors, part.keywords
    if part.query_offset:
        keywords = {**keywords, "query_offset": part.query_offset}
    if "dropout_p" in keywords:
        origin = torch.tensor([own.seed, 0, first_head, 0, 0], device=tensors.query.device)
        tensors = tensors._replace(seed=origin)
    if wants.of_rows() or wants.key_weights:
        out, _, found = statistics_with_gradient(tensors, part.scale, keywords, wants)
        return out, found
    out, _, lse = attention_with_gradient(tensors, part.scale, keywords, False, wants.lse)
    return out, AuxOutput(lse)


def _rows_of_all_heads(deal: Deal, own: Split, out: Tensor, found: AuxOutput) -> tuple[Tensor, AuxOutput]:
    """Exchanges the results of this rank's heads for those of its rows and keys."""
    named = {name: each for name, each in found._asdict().items() if each is not None}
    of_keys, fixed = deal._replace(layout=own.keys), deal._replace(differentiated=False)
    deals = {"key_weights": of_keys, "max_scores": fixed}
    out, *columns = to_rows(
        [out, *(each.unsqueeze(-1) for each in named.values())],
        [deal, *(deals.get(name, deal) for name in named)],
    )
    return out, AuxOutput(**{name: each.squeeze(-1) for name, each in zip(named, columns, strict=True)})


def _deal(own: Split, heads: int, differentiated: bool) -> Deal:
    """Heads of query dealt out evenly."""
    size = own.ranks.size
    of_ranks = tuple(heads_of_rank(heads, rank, size) for rank in range(size))
    return Deal(own.ranks, own.queries, of_ranks, heads, differentiated)


def _some_heads(tensors: Tensors, own: Split, deal: Deal, flags: Flags) -> Tensors:
    """All rows of the heads that this rank computes. ``flags`` are those of all ranks together."""
    query, key, value, mask, slopes, sinks, _ = tensors
    heads = query.size(1)
    begin, end = deal.heads[own.ranks.rank]
    of_keys = _deal_of_keys(deal, own, key.size(1))
    if of_keys is None:
        # Groups are cut in the middle: every query head gets a kv head of its own.
        group = heads // key.size(1)
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        of_keys = deal._replace(layout=own.keys)
    sent = [query, key, value]
    deals = [
        deal,
        of_keys._replace(differentiated=Flags.KEY in flags),
        of_keys._replace(differentiated=Flags.VALUE in flags),
    ]
    if mask is not None and own.masks_differ:
        # Ranks may have one row, head or batch where others have all.
        batch = query.size(0) if Flags.MASK_BATCH in flags else 1
        of_mask = deal._replace(differentiated=Flags.MASK in flags)
        if Flags.MASK_HEADS not in flags:
            of_mask = of_mask._replace(heads=((0, 1),) * own.ranks.size, total=1)
        sent.append(mask.expand(batch, of_mask.total, query.size(2), -1))
        deals.append(of_mask)

    def of_heads(numbers: OptionalTensor) -> OptionalTensor:
        return None if numbers is None else numbers[:, begin:end].contiguous()

    query, key, value, *masks = to_heads(sent, deals)
    if masks:
        mask = masks[0]
    elif mask is not None and mask.size(1) != 1:
        mask = mask[:, begin:end]
    return Tensors(query, key, value, mask, of_heads(slopes), of_heads(sinks))


def _deal_of_keys(deal: Deal, own: Split, kv_heads: int) -> Deal | None:
    """The kv heads of each rank's query heads; None if ranks would have different groups."""
    group = deal.total // kv_heads if kv_heads else 1
    found = []
    for begin, end in deal.heads:
        first, last = begin // group, -(-end // group)
        whole = begin % group == 0 and end % group == 0
        if begin == end:
            first = last = 0
        elif not whole and last - first > 1:
            return None
        found.append((first, last))
    return deal._replace(layout=own.keys, heads=tuple(found), total=kv_heads)
