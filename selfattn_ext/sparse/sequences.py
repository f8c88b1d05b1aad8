"""What queries of packed sequences and of caches select, as keywords of the operators or as a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import AttentionOptions, Keywords, OptionalTensor, checks, shapes
from ..masks import selected_pairs
from .selection import Selection, check, joined, needs_mask, selection_of

__all__ = ["check_sequences", "with_selection"]

#: indices, block_indices and block_size, as a user gave them.
Chosen = tuple[OptionalTensor, OptionalTensor, Any]


def with_selection(
    form: shapes.Canonical, chosen: Chosen, options: AttentionOptions, keywords: Keywords, has_functions: bool
) -> tuple[AttentionOptions, Keywords]:
    """Returns the options and the keywords of a call with its selection, if it has one.

    It becomes a mask where Note [Selected keys as a mask] in sparse_attention.py says so, and with functions
    of scores.

    Args:
        form: query, key and value of the call; the key is what the operators get, which may be pages.
        chosen: the arguments that select.
        options, keywords: those of the call without a selection.
        has_functions: whether score_mod or mask_mod is given.
    """
    if not _selects(chosen):
        return options, keywords
    mask = options.attn_mask
    selection = selection_of(form, *chosen)
    as_mask = has_functions or needs_mask(form.query, mask, options, keywords)
    if as_mask and ("mask_shapes" in keywords or checks.is_causal_bias(mask)):
        other = "a list" if "mask_shapes" in keywords else "a CausalBias"
        raise TypeError(f"attn_mask must be one tensor where {selection.name} become a mask, got {other}")
    if as_mask or form.query.device.type != "cpu":  # the CPU's operators check lists themselves
        check(selection, form, _keys_of_rows(form, keywords))
    if not as_mask:
        return options, {**keywords, **selection.keywords(_most_keys(form, keywords))}
    return options._replace(attn_mask=joined(mask, _as_mask(selection, form, keywords))), keywords


def check_sequences(form: shapes.Canonical, chosen: Chosen, keywords: Keywords) -> None:
    """Checks what a call selects, if it does. ``keywords`` need those of lengths and pages alone."""
    if _selects(chosen):
        check(selection_of(form, *chosen), form, _keys_of_rows(form, keywords))


def _selects(chosen: Chosen) -> bool:
    indices, block_indices, block_size = chosen
    return indices is not None or block_indices is not None or block_size is not None


def _most_keys(form: shapes.Canonical, keywords: Keywords) -> int:
    """The keys that a sequence has room for."""
    table = keywords.get("block_table")
    rows: int = form.key.size(2)
    return keywords.get("max_seqlen_k", rows) if table is None else table.size(1) * rows


def _keys_of_rows(form: shapes.Canonical, keywords: Keywords) -> int | Tensor:
    """The number of keys that there are for each row of indices, as :func:`.selection.check` takes it."""
    most, starts = _most_keys(form, keywords), keywords.get("cu_seqlens_q")
    lengths = keywords.get("seqlens_k")
    if lengths is None:
        if "cu_seqlens_k" not in keywords:
            return most
        lengths = keywords["cu_seqlens_k"].diff()
    if starts is None:
        return lengths.view(-1, 1, 1, 1)
    # Rows of no sequence are not read.
    padded = torch.cat([lengths, lengths.new_full((1,), most)])
    return padded[_sequence_of_rows(form, starts)].view(1, 1, -1, 1)


def _sequence_of_rows(form: shapes.Canonical, starts: Tensor) -> Tensor:
    """The number of the sequence that each packed row is in; that after the last one for rows of none."""
    rows = torch.arange(form.query.size(2), device=starts.device)
    return torch.searchsorted(starts[1:].contiguous(), rows, right=True)


def _as_mask(selection: Selection, form: shapes.Canonical, keywords: Keywords) -> Tensor:
    """Returns the mask (B | 1, H | 1, L, S) that a selection means, for the longest sequence."""
    _, rows, size = selection
    heads, most, starts = form.query.size(1), _most_keys(form, keywords), keywords.get("cu_seqlens_q")
    pairs = selected_pairs(rows, form.query.size(2), most, heads, size)
    if starts is None:
        return pairs
    # Rows of no sequence go to one that is not in the call, and to a row that is not, either.
    sequence, longest = _sequence_of_rows(form, starts), keywords["max_seqlen_q"]
    place = torch.arange(pairs.size(2), device=starts.device) - starts[sequence]
    mask = pairs.new_zeros(starts.size(0), pairs.size(1), longest + 1, most)
    mask[sequence, :, place.clamp(max=longest)] = pairs[0].transpose(0, 1)
    return mask[:-1, :, :longest]
