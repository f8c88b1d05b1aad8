"""Attention in the graphs of torch.onnx.export: ONNX's Attention operator, or the formula.

Note [ONNX]
    torch.onnx.export decomposes every operator that it has no translation for, and so runs the functions of
    our composed operators (:mod:`.graph_operators`). These ask :func:`is_exporting`, and then compute here,
    with torch's own operations, which torch translates. So this package needs no table of translations.

    torch translates its own attention operator to ONNX's Attention from opset 23 on, and to primitive
    operators for lower opsets. Causal rules, windows, offsets, lengths of sequences, ALiBi slopes and mask
    functions become the mask of that operator. What it lacks is the formula of :mod:`selfattn_ext.reference`.
    torch's operator has no softcap, but ONNX's has: such a call is an operator of its own,
    ``capped_attention``, which is the formula unless a user has :mod:`selfattn_ext.integrations.onnx`
    translate it. It cannot do so by itself, as nothing tells a decomposition which opset is asked for.

    The results are those of the kernels up to rounding, with one exception: a hidden key or value is
    multiplied by 0, so that one that holds NaN or infinity makes NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops, reference
from ..arguments import Keywords, OptionalTensor, Tensors
from ..fake_results import has_rows_outside
from ..formula_steps import usable_softcap
from ..masks import alibi_bias, visible_pairs
from ..reference import AttentionResult

__all__ = ["CAPPED", "append", "attention", "cached", "chosen", "is_exporting", "wanted"]

is_exporting = torch.onnx.is_in_onnx_export

#: Keywords that the graphs apply, and those that concern kernels alone.
_APPLIED = {
    "is_causal", "window_left", "window_right", "query_offset", "query_offsets", "softcap", "seqlens_k",
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
_OF_KERNELS = {"float32_precision", "kernel_name", "batch_invariant"}
_REFUSED = {
    "dropout_p": "dropout_p: ONNX graphs are for inference. Pass 0, or call eval() of the model",
    "mask_shapes": "attn_mask as a list of one mask for each sequence. Pass one padded mask to "
    "scaled_dot_product_attention instead",
}


def attention(
    tensors: Tensors,
    scale: float,
    keywords: Keywords,
    score_function: Callable[..., Tensor] | None = None,
    visible: OptionalTensor = None,
    *,
    want_weights: bool = False,
    want_lse: bool = False,
) -> AttentionResult:
    """Computes a call in the operators' form as Note [ONNX] says.

    Args:
        score_function: is given all scores (B, H, L, S) and returns others.
        visible: bool, broadcastable to (B, H, L, S): hides keys besides the options.

    Returns:
        out, in memory as the kernels make it, weights and lse; the last two are empty tensors where they are
        neither wanted nor computed.

    Raises:
        NotImplementedError: for what no ONNX graph of this package computes; the message names it.
    """
    _refuse(tensors, keywords, want_weights, score_function is not None)
    query, key, value, mask, slopes, sinks, _ = tensors
    offset, own = _places(query, key, keywords)
    rules = _Rules(
        keywords.get("is_causal", False),
        (keywords.get("window_left", -1), keywords.get("window_right", -1)),
        offset,
        _both(own, visible),
        usable_softcap(keywords.get("softcap", 0.0), torch.float32),
    )
    has_operator = (
        query.dtype != torch.float64  # ONNX Runtime has no Attention of float64
        and score_function is None
        and sinks is None
        and key.size(1) == value.size(1)
        and value.size(3) > 0
        and not (want_weights or want_lse)
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
        and (slopes is None or query.dtype == torch.float32)  # 16 bits are too few for far keys
    )
    if has_operator:
        empty = query.new_empty(0)
        return AttentionResult(_in_order(_by_operator(tensors, scale, rules), query), empty, empty)
    result = reference.attention(
        query, key, value, mask, scale=scale, is_causal=rules.is_causal, window_size=rules.window_size,
        query_offset=offset, softcap=rules.softcap, alibi_slopes=slopes, sinks=sinks,
        score_function=score_function, visible=rules.visible,
    )  # fmt: skip
    lse = result.lse
    if "cu_seqlens_q" in keywords:
        # A query of no sequence has no sink.
        lse = torch.where(_exist(keywords["cu_seqlens_q"], query.size(2)), lse, -torch.inf)
    return AttentionResult(_in_order(result.out, query), result.weights, lse)


class _Rules(NamedTuple):
    """What hides keys; the position of query 0, which broadcasts with (B, H, L, S); the bound of scores."""

    is_causal: bool
    window_size: tuple[int, int]
    query_offset: Any
    visible: OptionalTensor
    softcap: float


def _by_operator(tensors: Tensors, scale: float, rules: _Rules) -> Tensor:
    """out by torch's operator, which has a mask for all that hides keys or is added to scores."""
    query, key, value, mask, slopes, _, _ = tensors
    is_causal, window_size, offset, visible, softcap = rules
    needs_no_mask = mask is None and slopes is None and visible is None and window_size == (-1, -1)
    if needs_no_mask and (not is_causal or (isinstance(offset, int) and offset == 0)):
        return _operator(query, key, value, None, scale, is_causal, softcap)
    length, keys = query.size(2), key.size(2)
    seen = visible_pairs(
        length, keys, is_causal=is_causal, window_size=window_size, query_offset=offset, device=query.device
    )
    seen = _both(seen, visible)
    bias = None if slopes is None else alibi_bias(slopes, length, keys, offset)
    if mask is not None and mask.dtype == torch.bool:
        seen = _both(seen, mask)
    elif mask is not None:
        seen = _both(seen, mask != -torch.inf)
        bias = mask if bias is None else bias + mask
    given = seen if bias is None else bias if seen is None else torch.where(seen, bias, -torch.inf)
    assert given is not None
    out = _operator(query, key, value, given.expand(*given.shape[:-2], length, keys), scale, False, softcap)
    # A query that sees no key has output 0. What the operator makes of such a row is not defined.
    return out if seen is None else torch.where(seen.any(-1, keepdim=True), out, 0.0)


def _in_order(out: Tensor, query: Tensor) -> Tensor:
    """The result in memory as the kernels make it, which views that were traced before rely on."""
    if has_rows_outside(query):
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def wanted(
    tensors: Tensors, scale: float, keywords: Keywords, want_weights: bool, want_lse: bool
) -> list[Tensor]:
    """out, and those of weights and lse that are wanted, of :func:`attention`."""
    result = attention(tensors, scale, keywords, want_weights=want_weights, want_lse=want_lse)
    return chosen(result, want_weights, want_lse)


def chosen(result: AttentionResult, want_weights: bool, want_lse: bool) -> list[Tensor]:
    """out, and those of weights and lse that are wanted."""
    return [result.out, *[result.weights] * want_weights, *[result.lse] * want_lse]


def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: OptionalTensor,
    scale: float,
    is_causal: bool,
    softcap: float,
) -> Tensor:
    if softcap:
        return CAPPED(query, key, value, mask, scale, is_causal, softcap)
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: OptionalTensor,
    scale: float,
    is_causal: bool,
    softcap: float,
) -> Tensor:
    options: Any = {"scale": scale, "is_causal": is_causal, "softcap": softcap}
    return reference.attention(query, key, value, mask, **options).out


_library = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_library.define(
    "capped_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float scale, "
    "bool is_causal, float softcap) -> Tensor"
)
_library.impl("capped_attention", _capped, "CompositeImplicitAutograd")
#: Attention with a bound of its scores, before the mask.
CAPPED = getattr(torch.ops, ops.NAMESPACE).capped_attention.default


def _both(first: OptionalTensor, second: OptionalTensor) -> OptionalTensor:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _places(query: Tensor, key: Tensor, keywords: Keywords) -> tuple[Any, OptionalTensor]:
    """The position of query 0 among the keys, and which keys are those of a query's own sequence.

    The position is an int, or a tensor that broadcasts with (B, H, L, S); the mask likewise, None if all are.
    """
    offset: Any = keywords.get("query_offset", 0)
    if "cu_seqlens_q" in keywords:
        return _packed_places(query, key, keywords)
    if "query_offsets" in keywords:
        offset = keywords["query_offsets"].view(-1, 1, 1, 1)
    if "seqlens_k" not in keywords:
        return offset, None
    columns = torch.arange(key.size(2), device=key.device)
    return offset, columns < keywords["seqlens_k"].view(-1, 1, 1, 1)


def _packed_places(query: Tensor, key: Tensor, keywords: Keywords) -> tuple[Tensor, Tensor]:
    """:func:`_places` of packed sequences, whose rows are all rows of one batch element."""
    starts_q, starts_k = keywords["cu_seqlens_q"], keywords["cu_seqlens_k"]

    of_query, of_key = _sequences(starts_q, query.size(2)), _sequences(starts_k, key.size(2))
    exists = _exist(starts_q, query.size(2))
    own = (of_query.unsqueeze(-1) == of_key) & exists.unsqueeze(-1)
    offset = (starts_k - starts_q)[of_query] + keywords.get("query_offset", 0)
    if "query_offsets" in keywords:
        offsets = keywords["query_offsets"]
        offset = offset + torch.cat((offsets, offsets.new_zeros(1)))[of_query]
    return offset.unsqueeze(-1), own


def _sequences(starts: Tensor, rows: int) -> Tensor:
    """The number of each row's sequence, (rows,); rows of none have the number of one after the last."""
    numbers = torch.arange(rows, device=starts.device)
    return (numbers.unsqueeze(-1) >= starts[1:]).sum(-1)


def _exist(starts: Tensor, rows: int) -> Tensor:
    """Whether each row is one of a sequence."""
    return torch.arange(rows, device=starts.device) < starts[-1]


def _refuse(tensors: Tensors, keywords: Keywords, want_weights: bool, has_function: bool) -> None:
    """Raises NotImplementedError for a call that no graph computes."""
    others = keywords.keys() - _APPLIED - _OF_KERNELS
    reasons = [_REFUSED.get(name, f"{name}: its graphs have no such option") for name in sorted(others)]
    if "cu_seqlens_q" in keywords:
        if "seqlens_k" in keywords:
            reasons.append("varlen_attention with seqused_k or block_table. Use attention_with_kvcache")
        given = {
            "attn_mask": tensors.mask is not None,
            "return_weights": want_weights,
            "score_mod and mask_mod": has_function,
            "alibi_slopes of each sequence": tensors.slopes is not None and tensors.slopes.size(0) != 1,
            "sinks of each sequence": tensors.sinks is not None and tensors.sinks.size(0) != 1,
        }
        reasons += [f"{name} of varlen_attention" for name, is_given in given.items() if is_given]
    if reasons:
        raise NotImplementedError(f"torch.onnx.export cannot export {reasons[0]}")


def append(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor,
    cu_seqlens: OptionalTensor = None,
    block_table: OptionalTensor = None,
) -> None:
    """Writes keys and values (B, Hk, L, .) after the ``before`` (B,) rows of each sequence, in place.

    Raises:
        NotImplementedError: they are packed.
    """
    if cu_seqlens is not None:
        raise NotImplementedError("torch.onnx.export cannot export packed keys that are written to a cache")
    batch, _, rows, _ = key.shape
    places = before.unsqueeze(-1) + torch.arange(rows, device=key.device)
    if block_table is None:
        first = torch.arange(batch, device=key.device).unsqueeze(-1)
    else:
        size = key_cache.size(2)
        first, places = block_table.long().gather(1, places // size), places % size
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.transpose(1, 2).index_put_((first, places), new.transpose(1, 2))


def cached(tensors: Tensors, keywords: Keywords) -> tuple[Tensors, Keywords]:
    """A call on a cache as one of keys (B, Hk, capacity, E): pages are gathered."""
    keywords = dict(keywords)
    table = keywords.pop("block_table", None)
    if table is None:
        return tensors, keywords

    def rows(pages: Tensor) -> Tensor:
        # Entries past the last key may be any number.
        return pages[table.long().clamp(0, pages.size(0) - 1)].transpose(1, 2).flatten(2, 3)

    return tensors._replace(key=rows(tensors.key), value=rows(tensors.value)), keywords
