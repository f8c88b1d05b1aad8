"""Packed queries, of different numbers per sequence, on the keys of a cache, in slots with room or in pages:
what :func:`selfattn_ext.varlen_attention` does with ``seqused_k`` and ``block_table``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import attend
from ..arguments import OptionalTensor, Options, checks, sequence_checks, shapes
from ..kv_cache import checks as cache_checks
from ..kv_cache.attention import attend_to_cache, page_numbers

__all__ = ["attention"]

_NO_GRADIENTS = (
    "varlen_attention has no gradients with seqused_k or block_table: call it under torch.no_grad(), or give "
    "it packed keys and values of these lengths"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: OptionalTensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: OptionalTensor,
    sinks: OptionalTensor,
    query_offset: int | Tensor,
    seqused_k: OptionalTensor,
    block_table: OptionalTensor,
    return_weights: bool,
    return_lse: bool,
) -> Any:
    """:func:`selfattn_ext.varlen_attention` where one of seqused_k and block_table is given.

    Raises:
        ValueError, TypeError: as there.
    """
    try:
        checks.flags(
            is_causal=is_causal, enable_gqa=enable_gqa, return_weights=return_weights, return_lse=return_lse
        )
        options: Options = {
            "cu_seqlens_q": sequence_checks.indices("cu_seqlens_q", cu_seqlens_q),
            "max_seqlen_q": checks.integer("max_seqlen_q", max_seqlen_q, 0),
            "seqlens_k": _lengths(cu_seqlens_k, seqused_k),
        }
        keys, values = key, value
        if block_table is not None:
            keys, values = key.transpose(1, 2), value.transpose(1, 2)
            options["block_table"] = page_numbers(block_table)
            _within_longest(seqused_k, cu_seqlens_k, max_seqlen_k)
        else:
            keys, values = (
                shapes.dense_rows(shapes.of_packed(key)),
                shapes.dense_rows(shapes.of_packed(value)),
            )
            options["cu_seqlens_k"] = sequence_checks.indices("cu_seqlens_k", cu_seqlens_k)
            options["max_seqlen_k"] = checks.integer("max_seqlen_k", max_seqlen_k, 0)
        if not enable_gqa and keys.size(1) not in (1, query.size(1)):
            raise ValueError("groups of heads that were not asked for")
        if seqused_k is not None and cu_seqlens_k is not None and block_table is None:
            _within_slots(seqused_k, cu_seqlens_k)
        if query.is_cuda and not torch.compiler.is_dynamo_compiling():
            _check_values_on_cuda(query, key, keys, cu_seqlens_q, cu_seqlens_k, query_offset, options)
        attend.add_position(options, query_offset)
        attend.add_rules(options, window_size, softcap)
        if is_causal:
            options["is_causal"] = True
        out, weights, lse = attend_to_cache(
            shapes.of_packed(query), keys, values, None, None, options, cu_seqlens_q.shape[0] - 1, attn_mask,
            dropout_p, scale, alibi_slopes, sinks, return_weights, return_lse,
        )  # fmt: skip
    except checks.REFUSALS as refusal:
        raise checks.explained(
            refusal, _check, query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            seqused_k, block_table, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale_=scale, enable_gqa=enable_gqa, window_size=window_size, softcap_=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, query_offset=query_offset,
        ) from None  # fmt: skip
    return attend.results(out.squeeze(0).transpose(0, 1), weights, None if lse is None else lse.squeeze(0))


def _lengths(cu_seqlens_k: Any, seqused_k: OptionalTensor) -> Tensor:
    """How many keys each sequence has, (B,)."""
    if seqused_k is not None:
        return sequence_checks.indices("seqused_k", seqused_k)
    return sequence_checks.indices("cu_seqlens_k", cu_seqlens_k).diff()


def _within_longest(seqused_k: OptionalTensor, cu_seqlens_k: OptionalTensor, max_seqlen_k: Any) -> None:
    """The operators, who find the keys of a sequence by its pages, have no use for the longest length."""
    longest = checks.integer("max_seqlen_k", max_seqlen_k, 0)
    lengths: Sequence[int] | None = None
    if seqused_k is not None:
        lengths = sequence_checks.values("seqused_k", seqused_k)
    elif cu_seqlens_k is not None:
        starts = sequence_checks.values("cu_seqlens_k", cu_seqlens_k)
        lengths = starts and [after - before for before, after in itertools.pairwise(starts)]
    if lengths and max(lengths) > longest:
        raise ValueError(
            f"max_seqlen_k must be at least the length of the longest sequence, {max(lengths)} of number "
            f"{lengths.index(max(lengths))}, got {longest}"
        )


def _within_slots(seqused_k: Tensor, cu_seqlens_k: Tensor) -> None:
    """The operators would take as many rows as there are for a number that is too large."""
    used = sequence_checks.values("seqused_k", seqused_k)
    starts = sequence_checks.values("cu_seqlens_k", cu_seqlens_k)
    if used is None or starts is None:
        return
    slots = itertools.pairwise(starts)
    for index, (count, (start, end)) in enumerate(zip(used, slots, strict=False)):
        if not 0 <= count <= end - start:
            raise ValueError(
                f"seqused_k must lie between 0 and the {end - start} rows that cu_seqlens_k has for sequence "
                f"{index}, got {count}"
            )


def _check_values_on_cuda(
    query: Tensor,
    key: Tensor,
    keys: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Any,
    query_offset: int | Tensor,
    options: Options,
) -> None:
    """The check of values on CUDA, where the operators have none; ``keys`` is key in their form."""
    sequence_checks.offset_values("q", query, cu_seqlens_q, options["max_seqlen_q"])
    if "block_table" in options:
        cache_checks.values(keys, None, options)
    else:
        sequence_checks.offset_values("k", key, cu_seqlens_k, options["max_seqlen_k"])
    if isinstance(query_offset, Tensor) and query_offset.dim() == 1:
        sequence_checks.position_values(query_offset)


def _check(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_k: Any,
    block_table: Any,
    **options: Any,
) -> None:
    """Every argument of :func:`selfattn_ext.varlen_attention` with seqused_k or block_table; ``options`` are
    those that :func:`selfattn_ext.arguments.sequence_checks.varlen` knows.
    """
    query = cache_checks.as_cast({"query": query}, key)["query"]
    checks.floats({"query": query, "key": key, "value": value})
    if isinstance(options["attn_mask"], (list, tuple)):
        raise TypeError("attn_mask must be one tensor where seqused_k or block_table is given, got a list")
    if block_table is None:
        offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        sequence_checks.varlen(query, key, value, *offsets, **options)
        _check_lengths("seqused_k", seqused_k, query, cu_seqlens_q.shape[0] - 1)
    else:
        _pages(query, key, value, options["enable_gqa"])
        sequence_checks.offsets("q", cu_seqlens_q, max_seqlen_q, query, query)
        batch = cu_seqlens_q.shape[0] - 1
        cache_checks.page_table(block_table, query, batch)
        name, counts = "seqused_k", seqused_k
        if seqused_k is None:
            name, counts = "cu_seqlens_k.diff()", _lengths(cu_seqlens_k, None)
        _check_lengths(name, counts, query, batch)
        capacity = block_table.size(1) * key.size(1)
        # Any row of each page stands for the keys, and nowhere for what the table and the lengths say.
        offsets = (cu_seqlens_q, cu_seqlens_q.new_zeros(batch + 1), max_seqlen_q, capacity)
        sequence_checks.varlen(query, key[:, 0], value[:, 0], *offsets, **options)
        if not (torch.compiler.is_dynamo_compiling() or isinstance(counts, FakeTensor)):
            cache_checks.lengths(counts.cpu().long(), 0, key.transpose(1, 2), block_table.cpu(), name)
    tensors = (query, key, value, *(options[name] for name in ("attn_mask", "alibi_slopes", "sinks")))
    cache_checks.no_derivatives(tensors, _NO_GRADIENTS)


def _check_lengths(name: str, value: Any, query: Tensor, batch: int) -> None:
    """How many keys each sequence has, as a user gives it."""
    if sequence_checks.indices(name, value).shape[0] != batch:
        raise ValueError(
            f"{name} must have a length for each of the {batch} sequences, got {checks.described(value)}"
        )
    checks.on_device(name, value, "query", query.device)


def _pages(query: Tensor, key: Tensor, value: Tensor, enable_gqa: Any) -> None:
    """Shapes of keys and values in pages."""
    tensors = {"query": query, "key": key, "value": value}
    said = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    if query.dim() != 3 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "with a block_table, query must be (total, H, E), key (pages, page_size, Hk, E) and value "
            f"(pages, page_size, Hk, Ev), got {said}"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value must agree in pages, page_size and heads, got {said}")
    if key.size(1) == 0:
        raise ValueError(f"pages must have at least one row, got {said}")
    if key.size(3) != query.size(2):
        raise ValueError(f"query and key must have the same last dimension (head dim), got {said}")
    for name in ("key", "value"):
        if tensors[name].stride(3) != 1 and tensors[name].size(3) > 1:
            raise ValueError(
                f"{name} in pages must be dense in its last dimension (stride 1), but its strides are "
                f"{tensors[name].stride()}"
            )
    shapes.check_heads(query.size(1), key.size(2), value.size(2), bool(enable_gqa), tensors)
