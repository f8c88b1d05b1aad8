"""A call in the form of the operators, and the same call by the formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
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
    "with_options",
]

# Looked up once: an attribute chain costs as much as the call at its end. And it asks for no device's name.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class Tensors(NamedTuple):
    """The tensors of a call in the operators' form."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: OptionalTensor = None
    slopes: OptionalTensor = None
    sinks: OptionalTensor = None
    #: Of dropout.
    seed: OptionalTensor = None


#: A call in the operators' form: its tensors, without the seed, which is drawn when it is computed, the
#: scale, the keywords, and where the tensors come from. A plain tuple costs a call the least.
Prepared = tuple[Tensors, float, Keywords, shapes.Canonical]


def prepare(call: AttentionCall) -> Prepared:
    """A call of :func:`selfattn_ext.scaled_dot_product_attention`."""
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
    """The tensors and the scale among the options in the operators' form, beside what has it already.

    ``keywords`` have the shapes of own masks, if it is those that attn_mask holds.
    """
    query, key, value = form[:3]
    mask, slopes, sinks, scale = options.attn_mask, options.alibi_slopes, options.sinks, options.scale
    if mask is not None and "mask_shapes" not in keywords:
        mask = shapes.mask_four_dimensional(checks.mask("attn_mask", mask), form)
    if slopes is not None or sinks is not None:
        dtype = reference.accumulation_dtype(query.dtype)
        slopes = None if slopes is None else shapes.head_numbers(slopes, form, dtype)
        sinks = None if sinks is None else shapes.head_numbers(sinks, form, dtype)
    scale = reference.default_scale(query.size(3)) if scale is None else checks.scale(scale)
    return Tensors(query, key, value, mask, slopes, sinks), scale, keywords, form


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast, casts as it does for torch's attention: all but float64 to the autocast dtype, or
    to the one given.
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
    """The same attention by the formula of :mod:`selfattn_ext.reference`; the last two are as the function
    there takes them that is for one batch or for packed sequences.
    """
    query, key, value, mask, slopes, sinks, seed = tensors
    options: Keywords = {
        "scale": scale,
        "is_causal": keywords.get("is_causal", False),
        "window_size": (keywords.get("window_left", -1), keywords.get("window_right", -1)),
        "query_offset": keywords.get("query_offset", 0),
        "softcap": keywords.get("softcap", 0.0),
        "alibi_slopes": slopes,
        "sinks": sinks,
        "dropout_p": keywords.get("dropout_p", 0.0),
        "dropout_seed": seed,
        "score_function": score_function,
        "visible": visible,
    }
    if not is_packed(keywords):
        return reference.attention(query, key, value, mask, **options)
    if "query_offsets" in keywords:
        options["query_offset"] = keywords["query_offsets"]
    masks = (
        _own_masks(mask, keywords["mask_shapes"]) if mask is not None and "mask_shapes" in keywords else mask
    )
    out, weights, lse = reference.varlen_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        keywords["cu_seqlens_q"],
        keywords["cu_seqlens_k"],
        keywords["max_seqlen_q"],
        keywords["max_seqlen_k"],
        masks,
        **options,
    )
    return reference.AttentionResult(out.transpose(0, 1).unsqueeze(0), weights, lse.unsqueeze(0))


def is_packed(keywords: Keywords) -> bool:
    """Whether a call's query, key and value are sequences packed one behind the other."""
    return "cu_seqlens_q" in keywords and "cu_seqlens_k" in keywords


def joined_masks(masks: Sequence[Tensor]) -> tuple[OptionalTensor, Keywords]:
    """A mask for each sequence as the operators take them: all numbers, one mask behind the other, and the
    shapes as a keyword.
    """
    if not masks:
        return None, {}
    sizes = [size for mask in masks for size in (*(1,) * (3 - mask.dim()), *mask.shape[-3:])]
    return torch.cat([mask.reshape(-1) for mask in masks]), {"mask_shapes": sizes}


def _own_masks(numbers: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The masks that :func:`joined_masks` was given, in three dimensions."""
    three = [tuple(sizes[at : at + 3]) for at in range(0, len(sizes), 3)]
    parts = numbers.split([math.prod(shape) for shape in three])
    return [part.reshape(shape) for part, shape in zip(parts, three, strict=True)]


def keywords_of(tensors: Tensors, keywords: Keywords) -> Keywords:
    """The operators' keyword arguments: those given, and of the tensors behind value those that are there."""
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
