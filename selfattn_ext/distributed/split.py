"""A rank's part of a call in the operators' form, and what all ranks agree about."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..arguments import AttentionCall, Keywords, OptionalTensor, Tensors, call_checks, checks, prepare, shapes
from ..attend import dropout_seed
from .agreement import Flags, Numbers, agree, digest_of
from .group import Ranks
from .row_layout import ALIGNMENT, LAYOUTS, Layout
from .taking_part import recorded, recording

__all__ = [
    "Part",
    "Split",
    "check",
    "check_alignment",
    "check_columns",
    "check_length",
    "check_plain",
    "check_plain_call",
    "choices",
    "digest_of_mask",
    "laid_out",
    "part_of_call",
    "split",
    "split_again",
]

ROTATIONS = ("p2p", "allgather")

#: The operators' keywords that ranks must have in common: keyword -> (the name that users know, default).
_OPTIONS: dict[str, tuple[str, Any]] = {
    "is_causal": ("is_causal", False),
    "softcap": ("softcap", 0.0),
    "dropout_p": ("dropout_p", 0.0),
    "batch_invariant": ("batch_invariant", False),
    "float32_precision": ("torch.get_float32_matmul_precision()", "highest"),
    "kernel_name": ("backends.forced_kernel()", ""),
}


class Part(NamedTuple):
    """A rank's part of a call. The mask (B | 1, H | 1, L | 1, S | 1) has the keys of all ranks."""

    tensors: Tensors
    scale: float
    keywords: Keywords
    query_offset: int
    form: shapes.Canonical

    def description(self) -> dict[str, Any]:
        """The properties that ranks must have in common."""
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
            "window_size": tuple(self.keywords.get(f"window_{side}", -1) for side in ("left", "right")),
        }
        # Before the options: where one rank has a mask, another one may have an option in its place.
        described["attn_mask"] = None if mask is None else f"{mask.dtype} for {mask.size(3)} keys"
        for keyword, (name, default) in _OPTIONS.items():
            described[name] = self.keywords.get(keyword, default)
        for name, numbers in (("alibi_slopes", slopes), ("sinks", sinks)):
            described[name] = None if numbers is None else f"of shape {tuple(numbers.shape)}"
        return described

    def flags(self) -> Flags:
        """Facts that the other ranks must know."""
        _, key, value, mask, _, _, _ = self.tensors
        flags = recorded(*self.tensors)
        if flags == Flags.RECORDS:
            for flag, tensor in ((Flags.KEY, key), (Flags.VALUE, value), (Flags.MASK, mask)):
                if tensor is not None and tensor.requires_grad:
                    flags |= flag
        if mask is not None:
            sizes = mask.shape[:3]
            for flag, size in zip((Flags.MASK_BATCH, Flags.MASK_HEADS, Flags.MASK_ROWS), sizes, strict=True):
                if size != 1:
                    flags |= flag
        return flags

    def recording(self, together: Flags) -> Part:
        """The part, with a query that records a gradient if any rank records one."""
        query = recording(self.tensors.query, together)
        return self._replace(tensors=self.tensors._replace(query=query))


class Split(NamedTuple):
    """The layouts of the rows of all ranks, the seed of dropout, and the flags of all ranks together."""

    ranks: Ranks
    queries: Layout
    keys: Layout
    seed: int
    flags: Flags
    #: Whether ranks have different masks, each of its own rows.
    masks_differ: bool


def check(call: AttentionCall) -> None:
    """Checks every argument but the number of the mask's columns, which only all ranks together know."""
    given = call.options
    mask = given.attn_mask
    check_plain_call(call)
    call_checks.flags(given)
    call_checks.attention(call._replace(options=given._replace(attn_mask=None)))
    if mask is None:
        return
    checks.dense_tensor("attn_mask", checks.mask("attn_mask", mask))
    checks.on_device("attn_mask", mask, "query", call.query.device)
    rows = call.query.size(-2)
    if mask.dim() > 1 and mask.size(-2) not in (1, rows):
        raise ValueError(
            f"attn_mask must have this rank's {rows} rows, or one, but its shape is {tuple(mask.shape)}"
        )


def check_plain(**tensors: Any) -> None:
    """Checks that tensors hold numbers that can be sent, and do not stand for others."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("torch.func transforms, vmap included, cannot be split over processes")
    dtensors = sys.modules.get("torch.distributed.tensor")
    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor):
            raise NotImplementedError(f"{name} is a FakeTensor, which has no numbers to exchange")
        if dtensors is not None and isinstance(tensor, dtensors.DTensor):
            raise TypeError(f"{name} must be this rank's part, which {name}.to_local() is, got a DTensor")
        is_dual = forward_ad._current_level >= 0 and isinstance(tensor, Tensor)
        if is_dual and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: forward mode cannot be split over processes")


def check_plain_call(call: AttentionCall) -> None:
    """Checks the tensors of a call by :func:`check_plain`."""
    query, key, value, given = call
    check_plain(
        query=query, key=key, value=value, attn_mask=given.attn_mask, alibi_slopes=given.alibi_slopes,
        sinks=given.sinks,
    )  # fmt: skip


def part_of_call(call: AttentionCall) -> Part:
    """This rank's part of a call, once it is checked."""
    given = call.options
    check(call)
    tensors, scale, keywords, form = prepare(
        call._replace(options=given._replace(attn_mask=None, query_offset=0))
    )
    if given.attn_mask is not None:
        mask = given.attn_mask if given.attn_mask.dim() else given.attn_mask.view(1)
        full = (*form.lead, *tensors.query.shape[1:3], mask.size(-1))
        checks.broadcasts("attn_mask", mask.shape, full, "this rank's queries and its own columns")
        tensors = tensors._replace(mask=shapes.mask_four_dimensional(mask, form))
    return Part(tensors, scale, keywords, checks.integer("query_offset", given.query_offset), form)


def split(function: str, part: Part, ranks: Ranks, layout: str, *, mask: int = 0, **how: Any) -> Split:
    """The split that all ranks have in common, once they agree about the call and ``how`` it is computed.

    Dropout's seed is rank 0's, drawn from its generator. ``mask`` may be a :func:`digest_of_mask`.

    Raises:
        ValueError: on every rank, if they make different calls or have other rows than the layout gives them.
    """
    query, key = part.tensors[:2]
    seed = int(dropout_seed(query)) if "dropout_p" in part.keywords else 0
    own = Numbers(query.size(2), key.size(2), seed, part.flags(), mask)
    return _split(function, part, ranks, layout, own, how)


def split_again(function: str, part: Part, before: Split, ranks: Ranks, layout: str, **how: Any) -> Split:
    """The same for groups of ranks, each of which has agreed ``before`` and counts as one rank."""
    own = Numbers(before.queries.length, before.keys.length, before.seed, before.flags)
    how["the place in group"] = f"{before.ranks.rank} of {before.ranks.size}"
    return _split(function, part, ranks, layout, own, how)


def _split(function: str, part: Part, ranks: Ranks, layout: str, own: Numbers, how: dict[str, Any]) -> Split:
    described = {"the function": function, **part.description(), "layout": layout, **how}
    numbers, flags = agree(ranks, described, own)
    queries = laid_out(layout, "query", [each.query_rows for each in numbers])
    keys = laid_out(layout, "key", [each.key_rows for each in numbers])
    if "dropout_p" in part.keywords:
        check_alignment(keys)
    differ = Flags.MASK_ROWS in flags or len({each.mask for each in numbers}) > 1
    return Split(ranks, queries, keys, numbers[0].seed, flags, differ)


def digest_of_mask(mask: OptionalTensor) -> int:
    """A digest by which ranks compare masks that are the same for all rows; 0 for other masks."""
    if mask is None or mask.size(2) != 1:
        return 0
    content = mask.detach().cpu().contiguous()
    return digest_of(repr(mask.shape).encode() + ctypes.string_at(content.data_ptr(), content.nbytes))


def check_columns(mask: OptionalTensor, query: Tensor, keys: int) -> None:
    """Checks that a mask, if there is one, is for so many keys."""
    if mask is not None:
        full = (*query.shape[:3], keys)
        checks.broadcasts("attn_mask", mask.shape, full, "this rank's queries and the keys of all ranks")


def choices(layout: Any, rotate: Any = "p2p") -> None:
    """Checks that the layout and the rotation are known."""
    for name, given, known in (("layout", layout, LAYOUTS), ("rotate", rotate, ROTATIONS)):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, but it is {given!r}")


def check_alignment(keys: Layout) -> None:
    """Checks that spans begin where dropout draws random numbers."""
    spans = [span for rank in range(keys.ranks) for span in keys.spans(rank)]
    if any(begin % ALIGNMENT and begin < end for span in spans for begin, end in span.intervals):
        raise ValueError(
            f"dropout needs spans that begin at multiples of {ALIGNMENT} rows, which those of the "
            f"{keys.name} layout of {keys.length} rows do not; those of zigzag do"
        )


def laid_out(name: str, of: str, sizes: list[int], starts: tuple[int, ...] | None = None) -> Layout:
    """The layout in which ranks have so many rows; ValueError if it gives them others."""
    length = sum(sizes)
    layout = Layout(name, starts or (0, length), len(sizes))
    check_length(layout.starts, length)
    expected = [layout.size(rank) for rank in range(layout.ranks)]
    if expected != sizes:
        raise ValueError(
            f"the ranks have {sizes} rows of {of}, but the {name} layout of {length} rows gives them "
            f"{expected}: see shard_sequence"
        )
    return layout


def check_length(starts: tuple[int, ...], length: int) -> None:
    """Checks that packed sequences with these ``starts`` have so many rows."""
    if starts[-1] != length:
        raise ValueError(f"cu_seqlens ends at {starts[-1]}, but there are {length} rows")
