"""The functions that users call on their part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import (
    REFUSALS,
    AttentionCall,
    AttentionOptions,
    OptionalTensor,
    Prepared,
    call_checks,
    checks,
    prepare,
    shapes,
)
from ..arguments.call import DEFAULT_QUERY_OFFSET, DEFAULT_SOFTCAP, DEFAULT_WINDOW
from ..attend import attend, dropout_seed
from .group import Ranks, agree, ranks_of
from .layout import LAYOUTS, Layout
from .plan import Plan
from .ring import RingAttention

__all__ = ["ring_attention"]

ROTATIONS = ("p2p", "allgather")


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
    layout: Literal["zigzag", "contiguous"] = "zigzag",
    rotate: Literal["p2p", "allgather"] = "p2p",
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_lse: bool = False,
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
        dropout_p, is_causal, scale, enable_gqa, window_size, softcap, query_offset: as there, in positions of
            the whole sequence. Of dropout rank 0 draws the seed.
        group: a ProcessGroup or a DeviceMesh of one dimension; the default group by default.
        layout: how the sequence is dealt out: in one piece for each rank, or in two, so that under the causal
            rule all have as much to do.
        rotate: whether blocks of keys and values go around, so that a rank holds at most two beside its own,
            or all come at once.
        alibi_slopes, sinks: as there, the same on every rank. Each rank gets the part of their gradient that
            comes from its rows: the gradient of one process is the sum over the ranks.
        return_lse: also return the log-sum-exp of this rank's rows.

    Returns:
        out (..., H, L, Ev), this rank's rows, or (out, lse). Both are differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed; on every rank where
            ranks make unlike calls, naming what differs, before keys and values are exchanged.
        RuntimeError: torch.distributed is not initialised, or a rank does not come within the group's timeout.

    Every rank of the group has to call it, and to compute the gradient if one does. The method is that of Liu
    et al. (2023), "Ring Attention with Blockwise Transformers for Near-Infinite Context"; the zigzag layout
    is that of Zhu (2024), github.com/zhuzilin/ring-flash-attention.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, but it is {layout!r}")
    if rotate not in ROTATIONS:
        raise ValueError(f"rotate must be one of {', '.join(ROTATIONS)}, but it is {rotate!r}")
    ranks = ranks_of(group)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, False, return_lse,
    )  # fmt: skip

    call = AttentionCall(query, key, value, options)
    return attend(call, lambda call: _computed(call, ranks, layout, rotate), _check)


def _computed(call: AttentionCall, ranks: Ranks, layout: str, rotate: str) -> shapes.Results:
    given = call.options
    try:
        _check(call)
        prepared = prepare(call._replace(options=given._replace(attn_mask=None, query_offset=0)))
        tensors, scale, keywords, form = prepared
        mask = None if given.attn_mask is None else shapes.mask_four_dimensional(given.attn_mask, form)
        description = _description(prepared, mask, given) | {"layout": layout, "rotate": rotate}
    except REFUSALS as refusal:
        # The other ranks wait for this one: they have to know.
        agree(ranks, _device_of(call), {"what is given": f"refused ({refusal})"}, (0, 0, 0))
        raise
    query, key, value, _, slopes, sinks, _ = tensors
    seed = int(dropout_seed(query)) if "dropout_p" in keywords else 0
    everybody = agree(ranks, query.device, description, (query.size(2), key.size(2), seed))
    queries, keys = (_layout(layout, name, everybody[:, at]) for at, name in enumerate(("query", "key")))
    if mask is not None:
        scores = (query.size(0), query.size(1), query.size(2), keys.length)
        checks.broadcasts("attn_mask", mask.shape, scores, "this rank's queries and the keys of all ranks")
    offset = checks.integer("query_offset", given.query_offset)
    plan = Plan(
        ranks, queries, keys, rotate, scale, keywords, offset, query.device, int(everybody[0, 2])
    )
    out, lse = RingAttention.apply(query, key, value, mask, slopes, sinks, plan)
    return shapes.restored(form, out, None, lse if given.return_lse else None)


def _check(call: AttentionCall) -> None:
    """Every argument but the number of the mask's columns, which only all ranks together know."""
    given = call.options
    call_checks.flags(given)
    call_checks.attention(call._replace(options=given._replace(attn_mask=None)))
    mask = given.attn_mask
    if mask is None:
        return
    checks.dense_tensor("attn_mask", checks.mask("attn_mask", mask))
    checks.on_device("attn_mask", mask, "query", call.query.device)
    if mask.dim() > 1 and mask.size(-2) not in (1, call.query.size(-2)):
        raise ValueError(
            f"attn_mask must have this rank's {call.query.size(-2)} rows, or 1, but its shape is {tuple(mask.shape)}"
        )


def _device_of(call: AttentionCall) -> torch.device:
    return call.query.device if isinstance(call.query, Tensor) else torch.device("cpu")


def _description(prepared: Prepared, mask: OptionalTensor, given: AttentionOptions) -> dict[str, Any]:
    """What ranks must have in common."""
    tensors, scale, keywords, _ = prepared
    query, key, value, _, slopes, sinks, _ = tensors
    described: dict[str, Any] = {
        "dtype": str(query.dtype),
        "the batch": query.size(0),
        "the number of query heads": query.size(1),
        "the number of key heads": key.size(1),
        "head_dim": query.size(3),
        "the last dimension of value": value.size(3),
        "scale": scale,
        "query_offset": given.query_offset,
        **keywords,
    }
    for name, numbers in (("alibi_slopes", slopes), ("sinks", sinks)):
        described[name] = None if numbers is None else f"of shape {tuple(numbers.shape)}"
    if mask is not None:
        described["attn_mask"] = f"{mask.dtype} for {mask.size(3)} keys"
    return described


def _layout(name: str, of: str, sizes: Tensor) -> Layout:
    """The layout in which ranks have so many rows."""
    layout = Layout(name, int(sizes.sum()), len(sizes))
    expected = [layout.size(rank) for rank in range(layout.ranks)]
    if expected != sizes.tolist():
        raise ValueError(
            f"the ranks have {sizes.tolist()} rows of {of}, but the {name} layout of {layout.length} rows "
            f"gives them {expected}: see shard_sequence"
        )
    return layout
