"""What user arguments mean to the operators and to the formula: windows, causal biases, autocast, options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from . import checks, precision, shapes

__all__ = [
    "DEFAULT_QUERY_OFFSET",
    "DEFAULT_SOFTCAP",
    "DEFAULT_WINDOW",
    "OptionalTensor",
    "Options",
    "Prepared",
    "Tensors",
    "add_causal_bias",
    "add_float32_precision",
    "add_own_masks",
    "add_window",
    "autocast",
    "formula",
    "is_packed",
    "keywords_of",
    "prepared",
]

#: The default query_offset, to be compared by identity: whether a compiler's symbol is 0 must not be asked.
DEFAULT_QUERY_OFFSET = 0
#: The same for window_size,
DEFAULT_WINDOW = (-1, -1)
#: and for softcap.
DEFAULT_SOFTCAP = 0.0

#: The operators' keyword arguments that are no tensors; those at their default are left out.
Options = dict[str, Any]
OptionalTensor = Tensor | None
#: The tensors of a call in the operators' form: query, key, value, mask, slopes, sinks, dropout's seed.
Tensors = tuple[Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor]
#: query, key and value in four dimensions, mask, slopes, sinks, scale; a plain tuple costs a call the least.
Prepared = tuple[shapes.Canonical, OptionalTensor, OptionalTensor, OptionalTensor, float]


def prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alibi_slopes: OptionalTensor,
    sinks: OptionalTensor,
    options: Options,
    batch: int | None = None,
) -> Prepared:
    """Brings the arguments of attention into the operators' form; adds what is no tensor to the options.

    ``options`` have what belongs to positions, the rules and the kernel already, and the shapes of own masks,
    if it is those that attn_mask holds. ``batch`` is the number of sequences where query, key and value are
    packed, (1, H, total, E): for masks and numbers per head.
    """
    if is_causal:
        options["is_causal"] = True
    query, key, value = autocast(query, key, value)
    form = shapes.canonical(query, key, value, enable_gqa)
    if batch is not None:
        form = form._replace(lead=(batch,))
    add_float32_precision(options, form.query)
    mask = None
    if "mask_shapes" in options:
        mask = attn_mask
    elif attn_mask is not None:
        if checks.is_causal_bias(attn_mask):
            add_causal_bias(options, attn_mask, form, alibi_slopes is not None)
        else:
            mask = shapes.mask_four_dimensional(checks.mask("attn_mask", attn_mask), form)
    dtype = reference.accumulation_dtype(form.query.dtype)
    return (
        form,
        mask,
        None if alibi_slopes is None else shapes.head_numbers(alibi_slopes, form, dtype),
        None if sinks is None else shapes.head_numbers(sinks, form, dtype),
        reference.default_scale(form.query.shape[3]) if scale is None else checks.scale(scale),
    )


def add_window(options: Options, window_size: Sequence[int]) -> None:
    """Adds the sides of a window that are limited to the options."""
    left, right = checks.window(window_size)
    if left >= 0:
        options["window_left"] = left
    if right >= 0:
        options["window_right"] = right


def add_causal_bias(options: Options, bias: Any, form: shapes.Canonical, has_alibi: bool) -> None:
    """Adds the rule that a CausalBias stands for, ``j <= i + limit``, to the options."""
    length, keys = form.query.size(2), form.key.size(2)
    if (bias.seq_len_q, bias.seq_len_kv) != (length, keys):
        raise ValueError("a CausalBias of another size")
    limit = 0 if bias.variant.name == "UPPER_LEFT" else keys - length
    offset = options.get("query_offset", 0)
    if not has_alibi and "window_left" not in options and "window_right" not in options:
        # Nothing else counts positions, so that the offset may follow the rule.
        options["query_offset"] = min(limit, offset) if "is_causal" in options else limit
        options["is_causal"] = True
    elif limit >= offset:
        # A mask does not move positions: as a window it leaves them where they are.
        options["window_right"] = min(limit - offset, options.get("window_right", limit - offset))
    else:
        raise ValueError(
            f"attn_mask is a CausalBias that ends before the query's own position {offset}, which does not "
            "combine with a window or ALiBi slopes; pass a bool tensor, or is_causal and query_offset"
        )


def add_float32_precision(options: Options, query: Tensor) -> None:
    """Adds the precision that torch asks of float32 products to the options of a call of that dtype.

    A backward has the options of its forward, so that it computes the same scores whatever the setting is by
    then.
    """
    if query.dtype is not torch.float32:
        return
    if torch.compiler.is_dynamo_compiling():
        asked = precision.of_graph(query.is_cuda)
    else:
        asked = precision.current_on_cuda() if query.is_cuda else precision.current()
    if asked != "highest":
        options["float32_precision"] = asked


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast, casts as it does for torch's attention: all but float64 to the autocast dtype, or
    to the one given.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def formula(tensors: Tensors, scale: float, options: Options) -> reference.AttentionResult:
    """The same attention by the formula of :mod:`selfattn_ext.reference`."""
    query, key, value, mask, slopes, sinks, seed = tensors
    keywords: Options = {
        "scale": scale,
        "is_causal": options.get("is_causal", False),
        "window_size": (options.get("window_left", -1), options.get("window_right", -1)),
        "query_offset": options.get("query_offset", 0),
        "softcap": options.get("softcap", 0.0),
        "alibi_slopes": slopes,
        "sinks": sinks,
        "dropout_p": options.get("dropout_p", 0.0),
        "dropout_seed": seed,
    }
    if not is_packed(options):
        return reference.attention(query, key, value, mask, **keywords)
    if "query_offsets" in options:
        keywords["query_offset"] = options["query_offsets"]
    masks = (
        _own_masks(mask, options["mask_shapes"]) if mask is not None and "mask_shapes" in options else mask
    )
    out, weights, lse = reference.varlen_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        options["cu_seqlens_q"],
        options["cu_seqlens_k"],
        options["max_seqlen_q"],
        options["max_seqlen_k"],
        masks,
        **keywords,
    )
    return reference.AttentionResult(out.transpose(0, 1).unsqueeze(0), weights, lse.unsqueeze(0))


def is_packed(options: Options) -> bool:
    """Whether a call's query, key and value are sequences packed one behind the other."""
    return "cu_seqlens_q" in options and "cu_seqlens_k" in options


def add_own_masks(options: Options, masks: Sequence[Tensor]) -> OptionalTensor:
    """A mask for each sequence as the operators take them: all numbers, one mask behind the other; adds the
    shapes to the options.
    """
    if not masks:
        return None
    options["mask_shapes"] = [size for mask in masks for size in (*(1,) * (3 - mask.dim()), *mask.shape[-3:])]
    return torch.cat([mask.reshape(-1) for mask in masks])


def _own_masks(numbers: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    """The masks that :func:`add_own_masks` was given, in three dimensions."""
    three = [tuple(shapes[at : at + 3]) for at in range(0, len(shapes), 3)]
    pieces = numbers.split([math.prod(shape) for shape in three])
    return [piece.reshape(shape) for piece, shape in zip(pieces, three, strict=True)]


def keywords_of(tensors: Tensors, options: Options) -> Options:
    """The operators' keyword arguments: the options, and of the tensors behind value those that are there."""
    _, _, _, mask, slopes, sinks, seed = tensors
    if mask is None and slopes is None and sinks is None and seed is None:
        return options
    keywords = dict(options)
    if mask is not None:
        keywords["attn_mask"] = mask
    if slopes is not None:
        keywords["alibi_slopes"] = slopes
    if sinks is not None:
        keywords["sinks"] = sinks
    if seed is not None:
        keywords["dropout_seed"] = seed
    return keywords
