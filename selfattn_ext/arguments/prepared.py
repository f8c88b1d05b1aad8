"""A call in the form of the operators, and the same call by the formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..formula_steps import default_scale
from ..masks import selected_pairs
from ..reference_statistics import AuxOutput
from . import checks, shapes
from .call import DEFAULT_QUERY_OFFSET, AttentionCall, AttentionOptions, OptionalTensor
from .keywords import Keywords, causal_bias, keywords_for

__all__ = [
    "Prepared",
    "Tensors",
    "autocast",
    "formula",
    "is_packed",
    "joined_masks",
    "keywords_of",
    "prepare",
    "selected",
    "statistics_formula",
    "with_options",
]

# Looked up once: an attribute chain costs as much as the call at its end. It needs no device's name, either.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class Tensors(NamedTuple):
    """The tensors of a call in the operators' form."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: OptionalTensor = None
    slopes: OptionalTensor = None
    sinks: OptionalTensor = None
    #: The seed of dropout.
    seed: OptionalTensor = None


#: A call in the operators' form: its tensors, the scale, the keywords, and the user's form of the tensors.
#: The seed is missing, as it is drawn when the call is computed. A plain tuple costs a call the least.
Prepared = tuple[Tensors, float, Keywords, shapes.Canonical]


def prepare(call: AttentionCall) -> Prepared:
    """Brings a call of :func:`selfattn_ext.scaled_dot_product_attention` into the operators' form."""
    options = call.options
    query, key, value = autocast(call.query, call.key, call.value)
    form = shapes.canonical(query, key, value, options.enable_gqa)
    keywords = keywords_for(options, form.query)
    if options.query_offset is not DEFAULT_QUERY_OFFSET:
        keywords["query_offset"] = checks.integer("query_offset", options.query_offset)
    if options.attn_mask is not None and checks.is_causal_bias(options.attn_mask):
        keywords |= causal_bias(options.attn_mask, form, keywords, options.alibi_slopes is not None)
        options = options._replace(attn_mask=None)
    return with_options(form, options, keywords)


def with_options(form: shapes.Canonical, options: AttentionOptions, keywords: Keywords) -> Prepared:
    """Adds the tensors and the scale of the options, in the operators' form, to what has this form already.

    If attn_mask joins one mask per sequence, ``keywords`` has their shapes.
    """
    query, key, value = form[:3]
    mask, slopes, sinks, scale = options.attn_mask, options.alibi_slopes, options.sinks, options.scale
    if mask is not None and "mask_shapes" not in keywords:
        mask = shapes.mask_four_dimensional(checks.mask("attn_mask", mask), form)
    if slopes is not None or sinks is not None:
        dtype = reference.accumulation_dtype(query.dtype)
        slopes = None if slopes is None else shapes.head_numbers(slopes, form, dtype)
        sinks = None if sinks is None else shapes.head_numbers(sinks, form, dtype)
    scale = default_scale(query.size(3)) if scale is None else checks.scale(scale)
    return Tensors(query, key, value, mask, slopes, sinks), scale, keywords, form


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Casts under torch.autocast as that does for torch's attention.

    All tensors but those of float64 get the autocast dtype, or ``dtype`` if it is given.
    """
    if not _is_any_autocast_enabled():
        return tensors
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def formula(
    tensors: Tensors,
    scale: float,
    keywords: Keywords,
    score_function: Callable[..., Tensor] | None = None,
    visible: Any = None,
) -> reference.AttentionResult:
    """Computes the same attention by the formula of :mod:`selfattn_ext.reference`.

    score_function and visible are what ``attention`` there takes, or ``varlen_attention`` for packed
    sequences.
    """
    query, key, value, mask, _, _, seed = tensors
    options = _formula_options(tensors, scale, keywords, score_function, visible)
    options |= {"dropout_p": keywords.get("dropout_p", 0.0), "dropout_seed": seed}
    if not is_packed(keywords):
        return reference.attention(query, key, value, mask, **options)
    out, weights, lse = reference.varlen_attention(
        _packed_rows(query),
        _packed_rows(key),
        _packed_rows(value),
        keywords["cu_seqlens_q"],
        keywords["cu_seqlens_k"],
        keywords["max_seqlen_q"],
        keywords["max_seqlen_k"],
        _masks(mask, keywords),
        **options,
    )
    return reference.AttentionResult(out.transpose(0, 1).unsqueeze(0), weights, lse.unsqueeze(0))


def statistics_formula(
    tensors: Tensors,
    scale: float,
    keywords: Keywords,
    score_function: Callable[..., Tensor] | None = None,
    visible: Any = None,
) -> AuxOutput:
    """Computes all statistics of the same call by :func:`selfattn_ext.reference.score_statistics`."""
    query, key, mask = tensors.query, tensors.key, tensors.mask
    options = _formula_options(tensors, scale, keywords, score_function, visible)
    if not is_packed(keywords):
        return reference.score_statistics(query, key, mask, **options)
    found = reference.varlen_score_statistics(
        _packed_rows(query),
        _packed_rows(key),
        keywords["cu_seqlens_q"],
        keywords["cu_seqlens_k"],
        _masks(mask, keywords),
        **options,
    )
    return AuxOutput(*(None if part is None else part.unsqueeze(0) for part in found))


def _formula_options(
    tensors: Tensors, scale: float, keywords: Keywords, score_function: Any, visible: Any
) -> Keywords:
    """The options that every formula has."""
    if "selection" in keywords:
        visible = selected(tensors, keywords)
    return {
        "scale": scale,
        "is_causal": keywords.get("is_causal", False),
        "window_size": (keywords.get("window_left", -1), keywords.get("window_right", -1)),
        "query_offset": keywords.get("query_offsets", keywords.get("query_offset", 0)),
        "softcap": keywords.get("softcap", 0.0),
        "alibi_slopes": tensors.slopes,
        "sinks": tensors.sinks,
        "score_function": score_function,
        "visible": visible,
    }


def selected(tensors: Tensors, keywords: Keywords) -> Any:
    """Returns the keys that each query of a call with selected keys may see, (B | 1, H | 1, L, S).

    For packed sequences it returns a function that ``reference.varlen_attention`` takes as ``visible``.
    """
    query, key, lists = tensors.query, tensors.key, keywords["selection"]
    heads, (queries, keys) = query.size(1), keywords["selection_size"]
    if not is_packed(keywords):
        return selected_pairs(lists, query.size(2), key.size(2), heads, (queries, keys))
    starts = keywords["cu_seqlens_q"]

    def of_sequence(b: int, length: int, keys_of_sequence: int) -> Tensor:
        rows = lists[:, :, starts[b] : starts[b + 1]]
        return selected_pairs(rows, length, keys_of_sequence, heads, (queries, keys))[0]

    return of_sequence


def _packed_rows(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def _masks(mask: OptionalTensor, keywords: Keywords) -> Any:
    """The mask of packed sequences, or a mask for each of them."""
    return (
        mask if mask is None or "mask_shapes" not in keywords else _own_masks(mask, keywords["mask_shapes"])
    )


def is_packed(keywords: Keywords) -> bool:
    """Tells whether a call's query, key and value are packed sequences."""
    return "cu_seqlens_q" in keywords and "cu_seqlens_k" in keywords


def joined_masks(masks: Sequence[Tensor]) -> tuple[OptionalTensor, Keywords]:
    """Joins one mask per sequence to the operators' form: a row of all numbers, and the shapes' keyword."""
    if not masks:
        return None, {}
    sizes = [size for mask in masks for size in (*(1,) * (3 - mask.dim()), *mask.shape[-3:])]
    return torch.cat([mask.reshape(-1) for mask in masks]), {"mask_shapes": sizes}


def _own_masks(numbers: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns the masks that :func:`joined_masks` was given, in three dimensions."""
    three = [tuple(sizes[at : at + 3]) for at in range(0, len(sizes), 3)]
    parts = numbers.split([math.prod(shape) for shape in three])
    return [part.reshape(shape) for part, shape in zip(parts, three, strict=True)]


def keywords_of(tensors: Tensors, keywords: Keywords) -> Keywords:
    """Returns the operators' keyword arguments: ``keywords``, and those tensors after value that exist."""
    _, _, _, mask, slopes, sinks, seed = tensors
    if mask is None and slopes is None and sinks is None and seed is None:
        return keywords
    result = dict(keywords)
    if mask is not None:
        result["attn_mask"] = mask
    if slopes is not None:
        result["alibi_slopes"] = slopes
    if sinks is not None:
        result["sinks"] = sinks
    if seed is not None:
        result["dropout_seed"] = seed
    return result
