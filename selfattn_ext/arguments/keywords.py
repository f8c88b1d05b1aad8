"""Conversion of the options of a call to the keyword arguments of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import batch_invariance, checks, forced_kernel, precision, sequence_checks, shapes
from .call import DEFAULT_QUERY_OFFSET, DEFAULT_WINDOW, AttentionOptions

__all__ = ["Keywords", "causal_bias", "keywords_for", "position", "rules"]

# Looked up once: an attribute chain costs as much as the call at its end.
_is_compiling = torch.compiler.is_dynamo_compiling
_FLOAT32 = torch.float32

#: Keyword arguments of the operators, without mask, slopes, sinks and seed; those at a default are left out.
Keywords = dict[str, Any]


def keywords_for(options: AttentionOptions, query: Tensor) -> Keywords:
    """Returns the keywords of the options, positions excepted, and of the process's settings.

    These settings are the precision of float32 products, a forced kernel, and batch invariance. A backward
    has the keywords of its forward, so that it computes the same scores even if the settings have changed.
    """
    keywords: Keywords = {}
    if options.is_causal:
        keywords["is_causal"] = True
    if options.window_size is not DEFAULT_WINDOW or _is_given(options.softcap):
        keywords |= rules(options.window_size, options.softcap)
    dropout_p = options.dropout_p
    # The type comes first, as False is not a probability.
    if type(dropout_p) is not float or dropout_p:
        probability = checks.probability("dropout_p", dropout_p)
        if probability:
            keywords["dropout_p"] = probability
    if query.dtype is _FLOAT32:
        asked = precision.of_graph(query.is_cuda) if _is_compiling() else precision.current_for(query)
        if asked != "highest":
            keywords["float32_precision"] = asked
    if forced_kernel.forcing and (kernel := forced_kernel.current()):
        keywords["kernel_name"] = kernel
    if batch_invariance.asked:
        keywords["batch_invariant"] = True
    return keywords


def rules(window_size: Sequence[int], softcap: float) -> Keywords:
    """Returns keywords for the limited sides of a window and for the bound of the scores."""
    result: Keywords = {}
    if window_size is not DEFAULT_WINDOW:
        left, right = checks.window(window_size)
        if left >= 0:
            result["window_left"] = left
        if right >= 0:
            result["window_right"] = right
    if _is_given(softcap) and (bound := checks.softcap(softcap)):
        result["softcap"] = bound
    return result


def _is_given(softcap: Any) -> bool:
    # Identity with the default does not decide, as Dynamo may take it for a number that changes.
    return type(softcap) is not float or bool(softcap)


def position(query_offset: Any) -> Keywords:
    """Returns the keyword for query 0's position: a number for all sequences, or a tensor of one for each."""
    if isinstance(query_offset, Tensor) and query_offset.dim():
        return {"query_offsets": sequence_checks.indices("query_offset", query_offset)}
    if query_offset is DEFAULT_QUERY_OFFSET:
        return {}
    return {"query_offset": checks.integer("query_offset", query_offset)}


def causal_bias(bias: Any, form: shapes.Canonical, given: Keywords, has_alibi: bool) -> Keywords:
    """Returns keywords for a CausalBias's rule, ``j <= i + limit``, that fit the keywords in ``given``."""
    length, keys = form.query.size(2), form.key.size(2)
    if (bias.seq_len_q, bias.seq_len_kv) != (length, keys):
        raise ValueError("a CausalBias of another size")
    limit = 0 if bias.variant.name == "UPPER_LEFT" else keys - length
    offset = given.get("query_offset", 0)
    if not has_alibi and "window_left" not in given and "window_right" not in given:
        # Nothing else uses positions, so the offset may follow the rule.
        return {"query_offset": min(limit, offset) if "is_causal" in given else limit, "is_causal": True}
    if limit >= offset:
        # The rule becomes a window, as a mask must not move the positions that the other options use.
        return {"window_right": min(limit - offset, given.get("window_right", limit - offset))}
    raise ValueError(
        f"attn_mask is a CausalBias that ends before the query's own position {offset}, which does not "
        "combine with a window or ALiBi slopes; pass a bool tensor, or is_causal and query_offset"
    )
