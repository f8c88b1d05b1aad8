"""A rank's part of a call in the operators' form, and what all must know before they exchange anything."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import (
    REFUSALS,
    AttentionCall,
    Keywords,
    OptionalTensor,
    Tensors,
    call_checks,
    checks,
    prepare,
    shapes,
)
from ..attend import dropout_seed
from .group import REFUSED, Ranks, agree
from .layout import ALIGNMENT, LAYOUTS, Layout

__all__ = ["Part", "Split", "check", "check_alignment", "check_columns", "choices", "part_of_call", "split"]

ROTATIONS = ("p2p", "allgather")


class Part(NamedTuple):
    """What a rank has. The mask (B | 1, H | 1, L | 1, S | 1) has the keys of all ranks."""

    tensors: Tensors
    scale: float
    keywords: Keywords
    query_offset: int
    form: shapes.Canonical

    def description(self) -> dict[str, Any]:
        """What ranks must have in common."""
        query, key, value, mask, slopes, sinks, _ = self.tensors
        described: dict[str, Any] = {
            "dtype": str(query.dtype),
            "the batch": query.size(0),
            "the number of query heads": query.size(1),
            "the number of key heads": key.size(1),
            "head_dim": query.size(3),
            "the last dimension of value": value.size(3),
            "scale": self.scale,
            "query_offset": self.query_offset,
            **self.keywords,
        }
        for name, numbers in (("alibi_slopes", slopes), ("sinks", sinks)):
            described[name] = None if numbers is None else f"of shape {tuple(numbers.shape)}"
        if mask is not None:
            described["attn_mask"] = f"{mask.dtype} for {mask.size(3)} keys"
        return described


class Split(NamedTuple):
    """How the rows of all ranks lie, and the seed of dropout."""

    ranks: Ranks
    queries: Layout
    keys: Layout
    seed: int


def check(call: AttentionCall) -> None:
    """Every argument but the number of the mask's columns, which only all ranks together know."""
    given = call.options
    call_checks.flags(given)
    call_checks.attention(call._replace(options=given._replace(attn_mask=None)))
    mask = given.attn_mask
    if mask is None:
        return
    checks.dense_tensor("attn_mask", checks.mask("attn_mask", mask))
    checks.on_device("attn_mask", mask, "query", call.query.device)
    rows = call.query.size(-2)
    if mask.dim() > 1 and mask.size(-2) not in (1, rows):
        raise ValueError(
            f"attn_mask must have this rank's {rows} rows, or one, but its shape is {tuple(mask.shape)}"
        )


def part_of_call(call: AttentionCall, ranks: Ranks) -> Part:
    """This rank's part. Where it is refused, the others, who wait for this rank, get to know."""
    given = call.options
    try:
        check(call)
        tensors, scale, keywords, form = prepare(
            call._replace(options=given._replace(attn_mask=None, query_offset=0))
        )
        if given.attn_mask is not None:
            tensors = tensors._replace(mask=shapes.mask_four_dimensional(given.attn_mask, form))
        return Part(tensors, scale, keywords, checks.integer("query_offset", given.query_offset), form)
    except REFUSALS as refusal:
        device = call.query.device if isinstance(call.query, Tensor) else torch.device("cpu")
        agree(ranks, device, {REFUSED: str(refusal)}, (0, 0, 0))
        raise


def split(part: Part, ranks: Ranks, layout: str, seed: int | None = None, **how: Any) -> Split:
    """What all ranks have together, once they agree about the call and ``how`` it is to be computed.

    Dropout's seed is rank 0's, drawn from its generator where none is given.

    Raises:
        ValueError: on every rank, where they make unlike calls or have other rows than the layout gives them.
    """
    query, key = part.tensors[:2]
    if seed is None:
        seed = int(dropout_seed(query)) if "dropout_p" in part.keywords else 0
    description = {**part.description(), "layout": layout, **how}
    everybody = agree(ranks, query.device, description, (query.size(2), key.size(2), seed))
    queries, keys = (_layout(layout, name, everybody[:, at]) for at, name in enumerate(("query", "key")))
    if "dropout_p" in part.keywords:
        check_alignment(keys)
    return Split(ranks, queries, keys, int(everybody[0, 2]))


def check_columns(mask: OptionalTensor, query: Tensor, keys: int) -> None:
    """That a mask, if there is one, is for so many keys."""
    if mask is not None:
        full = (*query.shape[:3], keys)
        checks.broadcasts("attn_mask", mask.shape, full, "this rank's queries and the keys of all ranks")


def choices(layout: Any, rotate: Any) -> None:
    """That both are known."""
    for name, given, known in (("layout", layout, LAYOUTS), ("rotate", rotate, ROTATIONS)):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, but it is {given!r}")


def check_alignment(keys: Layout) -> None:
    """That pieces begin where dropout draws random numbers."""
    pieces = [piece for rank in range(keys.ranks) for piece in keys.pieces(rank)]
    if any(begin % ALIGNMENT and begin < end for piece in pieces for begin, end in piece.spans):
        raise ValueError(
            f"dropout needs pieces that begin at multiples of {ALIGNMENT} rows, which those of the "
            f"{keys.name} layout of {keys.length} rows do not; those of zigzag do"
        )


def _layout(name: str, of: str, sizes: Tensor) -> Layout:
    """The layout in which ranks have so many rows."""
    layout = Layout(name, (0, int(sizes.sum())), len(sizes))
    expected = [layout.size(rank) for rank in range(layout.ranks)]
    if expected != sizes.tolist():
        raise ValueError(
            f"the ranks have {sizes.tolist()} rows of {of}, but the {name} layout of {layout.length} rows "
            f"gives them {expected}: see shard_sequence"
        )
    return layout
