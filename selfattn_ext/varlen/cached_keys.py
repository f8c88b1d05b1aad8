"""varlen_attention with ``seqused_k`` or ``block_table``: packed queries on the keys of a cache.

Sequences have different numbers of queries; the cache has slots with rows to spare, or pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..arguments import Keywords, PackedCall, checks, keywords_for, position, sequence_checks, shapes
from ..kv_cache import cache_checks
from ..kv_cache.step import attend_to_cache, page_numbers
from ..kv_cache.step_with_functions import attend_with_functions
from ..sparse.sequences import check_sequences, with_selection

__all__ = ["check", "computed"]

_NO_GRADIENTS = (
    "varlen_attention has no gradients with seqused_k or block_table: call it under torch.no_grad(), or give "
    "it packed keys and values of these lengths"
)


def computed(call: PackedCall) -> Any:
    """:func:`selfattn_ext.varlen_attention` if seqused_k or block_table is given."""
    query, options = call.query, call.options
    form, keywords = _places(call)
    keys, values = form.key, form.value
    if call.block_table is not None:
        _check_longest(call)
    if not options.enable_gqa and keys.size(1) not in (1, query.size(1)):
        raise ValueError("groups of heads that were not asked for")
    if call.seqused_k is not None and call.cu_seqlens_k is not None and call.block_table is None:
        _check_slots(call.seqused_k, call.cu_seqlens_k)
    if query.is_cuda and not torch.compiler.is_dynamo_compiling():
        _check_values_on_cuda(call, keys, keywords)
    keywords |= position(options.query_offset)
    keywords |= keywords_for(options, keys)
    has_functions = call.score_mod is not None or call.mask_mod is not None
    options, keywords = with_selection(form, call[-3:], options, keywords, has_functions)
    step = (form.query, keys, values, None, None, form.lead[0], options, keywords)
    if not has_functions:
        results = attend_to_cache(*step)
    else:
        results = attend_with_functions(*step, call.score_mod, call.mask_mod)
    return *shapes.restored_packed(*results[:3]), *results[3:]


def _places(call: PackedCall) -> tuple[shapes.Canonical, Keywords]:
    """The tensors in the operators' form, and the keywords that say where sequences are."""
    keywords: Keywords = {
        "cu_seqlens_q": sequence_checks.indices("cu_seqlens_q", call.cu_seqlens_q),
        "max_seqlen_q": checks.integer("max_seqlen_q", call.max_seqlen_q, 0),
        "seqlens_k": _lengths(call),
    }
    if call.block_table is not None:
        keys, values = call.key.transpose(1, 2), call.value.transpose(1, 2)
        keywords["block_table"] = page_numbers(call.block_table)
    else:
        keys, values = (shapes.dense_rows(shapes.of_packed(tensor)) for tensor in (call.key, call.value))
        keywords["cu_seqlens_k"] = sequence_checks.indices("cu_seqlens_k", call.cu_seqlens_k)
        keywords["max_seqlen_k"] = checks.integer("max_seqlen_k", call.max_seqlen_k, 0)
    batch = call.cu_seqlens_q.shape[0] - 1
    return shapes.Canonical(shapes.of_packed(call.query), keys, values, (batch,), 4, packed=True), keywords


def check(call: PackedCall) -> None:
    """Checks every argument of :func:`selfattn_ext.varlen_attention` with seqused_k or block_table."""
    key, value, table, options = call.key, call.value, call.block_table, call.options
    query = cache_checks.as_cast({"query": call.query}, key)["query"]
    call = call._replace(query=query)
    checks.floats({"query": query, "key": key, "value": value})
    if isinstance(options.attn_mask, (list, tuple)):
        raise TypeError("attn_mask must be one tensor where seqused_k or block_table is given, got a list")
    if table is None:
        sequence_checks.packed_attention(call)
        _check_lengths("seqused_k", call.seqused_k, query, call.cu_seqlens_q.shape[0] - 1)
    else:
        _check_pages(query, key, value, options.enable_gqa)
        sequence_checks.offsets("q", call.cu_seqlens_q, call.max_seqlen_q, query, query)
        batch = call.cu_seqlens_q.shape[0] - 1
        cache_checks.page_table(table, query, batch)
        name, counts = "seqused_k", call.seqused_k
        if counts is None:
            name, counts = "cu_seqlens_k.diff()", _lengths(call)
        _check_lengths(name, counts, query, batch)
        # One row of each page stands for the keys, and offsets of 0 stand for the table and the lengths.
        sequence_checks.packed_attention(
            call._replace(
                key=key[:, 0],
                value=value[:, 0],
                cu_seqlens_k=call.cu_seqlens_q.new_zeros(batch + 1),
                max_seqlen_k=table.size(1) * key.size(1),
            )
        )
        if not (torch.compiler.is_dynamo_compiling() or isinstance(counts, FakeTensor)):
            cache_checks.lengths(counts.cpu().long(), 0, key.transpose(1, 2), table.cpu(), name)
    form, keywords = _places(call)
    check_sequences(form, call[-3:], keywords)
    tensors = (query, key, value, options.attn_mask, options.alibi_slopes, options.sinks)
    cache_checks.no_derivatives(tensors, _NO_GRADIENTS)


def _lengths(call: PackedCall) -> Tensor:
    """The number of keys of each sequence, (B,)."""
    if call.seqused_k is not None:
        return sequence_checks.indices("seqused_k", call.seqused_k)
    return sequence_checks.indices("cu_seqlens_k", call.cu_seqlens_k).diff()


def _check_longest(call: PackedCall) -> None:
    """Checks max_seqlen_k, which the operators do not need for keys in pages."""
    longest = checks.integer("max_seqlen_k", call.max_seqlen_k, 0)
    lengths: Sequence[int] | None = None
    if call.seqused_k is not None:
        lengths = sequence_checks.values("seqused_k", call.seqused_k)
    elif call.cu_seqlens_k is not None:
        starts = sequence_checks.values("cu_seqlens_k", call.cu_seqlens_k)
        lengths = starts and [after - before for before, after in itertools.pairwise(starts)]
    if lengths and max(lengths) > longest:
        raise ValueError(
            f"max_seqlen_k must be at least the length of the longest sequence, {max(lengths)} of number "
            f"{lengths.index(max(lengths))}, got {longest}"
        )


def _check_slots(seqused_k: Tensor, cu_seqlens_k: Tensor) -> None:
    """Checks seqused_k against the rows of each sequence, to which the operators would limit it silently."""
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


def _check_values_on_cuda(call: PackedCall, keys: Tensor, keywords: Keywords) -> None:
    """Checks values on CUDA, which the operators do not; ``keys`` is key in the operators' form."""
    sequence_checks.offset_values("q", call.query, call.cu_seqlens_q, keywords["max_seqlen_q"])
    if call.cu_seqlens_k is not None and "cu_seqlens_k" in keywords:
        sequence_checks.offset_values("k", call.key, call.cu_seqlens_k, keywords["max_seqlen_k"])
    else:
        cache_checks.values(keys, None, keywords)
    sequence_checks.check_positions_on_cuda(call.options.query_offset)


def _check_lengths(name: str, value: Any, query: Tensor, batch: int) -> None:
    """Checks the number of keys of each sequence, as a user gives it."""
    if sequence_checks.indices(name, value).shape[0] != batch:
        raise ValueError(
            f"{name} must have a length for each of the {batch} sequences, got {checks.described(value)}"
        )
    checks.on_device(name, value, "query", query.device)


def _check_pages(query: Tensor, key: Tensor, value: Tensor, enable_gqa: Any) -> None:
    """Checks the shapes of keys and values in pages."""
    tensors = {"query": query, "key": key, "value": value}
    said = shapes.shown(tensors)
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
