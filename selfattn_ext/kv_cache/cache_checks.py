"""Checks of the arguments of attention_with_kvcache and of KVCache.

``append``, ``attend`` and ``attention`` look for the reason once something has refused a call (Note
[Refusals] in :mod:`selfattn_ext.functional`); every call goes through some of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .. import capture
from ..arguments import (
    Keywords,
    KVCacheCall,
    SparseCall,
    autocast,
    call_checks,
    checks,
    sequence_checks,
    shapes,
)
from ..sparse.sequences import check_sequences

__all__ = [
    "Step",
    "append",
    "as_cast",
    "attend",
    "attention",
    "first_feature",
    "fits",
    "lengths",
    "no_causal_bias",
    "no_derivatives",
    "page_table",
    "sequence_number",
    "sequence_numbers",
    "step_of",
    "token_counts",
    "values",
]

_INTEGERS = (torch.int32, torch.int64)
_NO_DERIVATIVES = (
    "attention_with_kvcache has no derivatives, as it writes to the cache: call it under torch.no_grad(), "
    "and scaled_dot_product_attention where a derivative is wanted"
)


def fits(query: Tensor, key_cache: Tensor, key: Tensor | None, heads: int) -> bool:
    """Whether dimension ``heads``, 1 or 2, can be the one of the heads, and the other one the length."""
    kv_heads = key_cache.size(heads)
    if kv_heads == 0:
        return False
    divides = query.size(heads) % kv_heads == 0
    if divides is not True and not shapes.known(divides):
        return False
    rows = 3 - heads
    return key is None or (
        key.size(heads) == kv_heads and key.size(rows) == query.size(rows) and query.dim() == key.dim() == 4
    )


def no_causal_bias(mask: Any) -> None:
    """Refuses a mask that is a CausalBias."""
    if checks.is_causal_bias(mask):
        raise TypeError(
            "attn_mask is a CausalBias, whose rule does not know the lengths of caches; pass is_causal=True"
        )


def first_feature(key: Tensor, value: Tensor) -> int | None:
    """The first of the features of key that value is a view of, None if it is no such view."""
    if key.shape[:-1] != value.shape[:-1] or key.stride() != value.stride() or not key.stride(-1):
        return None
    if key.untyped_storage()._cdata != value.untyped_storage()._cdata:
        return None
    first, rest = divmod(int(value.storage_offset() - key.storage_offset()), key.stride(-1))
    return first if rest == 0 <= first <= key.size(-1) - value.size(-1) else None


def no_derivatives(tensors: Sequence[Tensor | None], advice: str = _NO_DERIVATIVES) -> None:
    """Refuses calls whose derivatives would be lost: gradients, transforms of torch.func, tangents."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError(f"{advice}; here a transform of torch.func is active")
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise ValueError(f"{advice}; here an argument requires grad")
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in given
    ):
        raise ValueError(f"{advice}; here an argument has a tangent")


def values(key_cache: Tensor, key: Tensor | None, keywords: Keywords, query_offset: Any = None) -> None:
    """Checks positions, lengths and pages of a cache on a GPU. It reads them, which waits for the GPU."""
    if capture.is_capturing(key_cache) or isinstance(key_cache, FakeTensor):
        return
    sequence_checks.check_positions_on_cuda(query_offset)
    after, table = keywords.get("seqlens_k"), keywords.get("block_table")
    if after is None or after.dim() != 1 or (table is not None and table.dim() != 2):
        return  # the operator refuses that
    new = 0 if key is None else key.size(2)
    lengths(after.cpu() - new, new, key_cache, None if table is None else table.cpu())


def lengths(
    before: Tensor, new: int, key_cache: Tensor, table: Tensor | None, name: str = "cache_seqlens"
) -> None:
    """Checks lengths (B,) and a table, both on the CPU, against a cache with its heads in dimension 1."""
    count, rows = key_cache.size(0), key_cache.size(2)
    capacity = rows if table is None else table.size(1) * rows
    wrong = (before < 0) | (before > capacity - new)
    if wrong.any():
        b = int(wrong.nonzero()[0])
        held = int(before[b])
        if 0 <= held <= capacity:
            raise ValueError(
                f"sequence {b} of the cache is full: cache_seqlens says that it holds {held} keys, "
                f"{new} more are given, and its capacity is {capacity}"
            )
        raise ValueError(f"{name} must lie between 0 and the capacity {capacity}, got {held} for {b}")
    if table is None or rows == 0:
        return
    starts = torch.arange(table.size(1), device=before.device) * rows
    used = starts < (before + new).unsqueeze(1)
    wrong = used & ((table < 0) | (table >= count))
    if wrong.any():
        b, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table[{b}, {column}] is {int(table[b, column])}, but there are {count} pages, and the "
            f"sequence has {int(before[b]) + new} keys in pages of {rows}"
        )
    positions = before.unsqueeze(1) + torch.arange(new, device=before.device)
    places = table.long().gather(1, positions // rows) * rows + positions % rows
    if places.unique().numel() < places.numel():
        ordered, order = places.flatten().sort()
        first = int((ordered[1:] == ordered[:-1]).nonzero()[0])
        pair = sorted(int(order[first + n]) // new for n in range(2))
        raise ValueError(
            f"block_table has the new keys of sequences {pair[0]} and {pair[1]} written to the same row of "
            f"page {int(ordered[first]) // rows}"
        )


def as_cast(tokens: dict[str, Any], cache: Any) -> dict[str, Any]:
    """query, key and value as the call has them: under autocast in the dtype of the cache."""
    if any(not isinstance(tensor, Tensor) or tensor.is_meta for tensor in (cache, *tokens.values())):
        return tokens  # the checks that follow refuse them
    return dict(zip(tokens, autocast(*tokens.values(), dtype=cache.dtype), strict=True))


def page_table(value: Any, query: Tensor, batch: int) -> None:
    """Checks a block_table for that many sequences."""
    checks.dense_tensor("block_table", value)
    if value.dtype not in _INTEGERS:
        raise TypeError(f"block_table must be int32 or int64, got {value.dtype}")
    checks.on_device("block_table", value, "query", query.device)
    if value.dim() != 2 or value.size(0) != batch:
        raise ValueError(
            f"block_table must have a row for each of the {batch} sequences, but its shape is "
            f"{tuple(value.shape)}"
        )


def _shapes(tensors: dict[str, Tensor], transposed: bool, table: Tensor | None) -> None:
    """Checks the shapes of query, key_cache, value_cache and, if given, key and value."""
    heads, rows = (2, 1) if transposed else (1, 2)
    layout = "blhd" if transposed else "bhld"
    said = shapes.shown(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, but the shapes are {said}")
    query, keys, values = tensors["query"], tensors["key_cache"], tensors["value_cache"]
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"key_cache and value_cache must agree in all but the head dim: {said}")
    if table is None and keys.size(0) != query.size(0):
        raise ValueError(f"the caches must have the batch of query: {said}")
    if keys.size(3) != query.size(3):
        raise ValueError(f"query and key_cache must have the same head dim: {said}")
    if keys.size(heads) == 0 or query.size(heads) % keys.size(heads):
        raise ValueError(
            f"in the layout {layout!r} the cache has {keys.size(heads)} heads, which do not divide the "
            f"{query.size(heads)} of query: {said}"
        )
    for name, cache in (("key", keys), ("value", values)):
        if name not in tensors:
            continue
        given, wanted = tuple(tensors[name].shape), list(cache.shape)
        wanted[0], wanted[rows] = query.size(0), tensors["key"].size(rows)
        if given != tuple(wanted):
            raise ValueError(f"{name} must be {tuple(wanted)} in the layout {layout!r}: {said}")
    for name, cache in (("key_cache", keys), ("value_cache", values)):
        if cache.stride(3) != 1 and cache.size(3) > 1:
            raise ValueError(
                f"{name} must be dense in its last dimension (stride 1), but its strides are {cache.stride()}"
            )


def attention(call: KVCacheCall, transposed: bool) -> None:
    """Checks every argument of :func:`selfattn_ext.attention_with_kvcache`; ``transposed`` says whether a
    layout of None was taken for "blhd".
    """
    query, key_cache, value_cache, key, value, cache_seqlens, block_table, layout, _, _, options = call[:11]
    if layout not in (None, "bhld", "blhd"):
        raise ValueError(f'layout must be "bhld", "blhd" or None, got {layout!r}')
    if (key is None) != (value is None):
        raise ValueError("key and value must be given together, or neither")
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    tokens = {"query": query}
    if key is not None and value is not None:
        tokens |= {"key": key, "value": value}
    tensors |= as_cast(tokens, key_cache)
    checks.floats(tensors)
    if block_table is not None:
        page_table(block_table, query, query.size(0))
    _shapes(tensors, transposed, block_table)
    heads, rows = (2, 1) if transposed else (1, 2)
    batch, new = query.size(0), 0 if key is None else key.size(rows)
    capacity = key_cache.size(rows) * (1 if block_table is None else block_table.size(1))
    if cache_seqlens is not None:
        sequence_checks.per_sequence("cache_seqlens", cache_seqlens, query, batch)
    elif key is not None:
        raise ValueError("cache_seqlens must be given where key and value are: they go behind that many keys")
    if options.query_offset is not None:
        sequence_checks.per_sequence("query_offset", options.query_offset, query, batch)
        if isinstance(options.query_offset, Tensor) and options.query_offset.dim():
            sequence_checks.position_values(options.query_offset)
    no_derivatives((*tensors.values(), options.attn_mask, options.alibi_slopes, options.sinks))
    if block_table is not None and key_cache.size(rows) == 0:
        raise ValueError(f"pages must have at least one row, but key_cache is {tuple(key_cache.shape)}")
    scores = (batch, query.size(heads), query.size(rows), capacity)
    call_checks.options(query, scores, options, scores[:2])
    no_causal_bias(options.attn_mask)
    if torch.compiler.is_dynamo_compiling() or isinstance(key_cache, FakeTensor):
        return
    if isinstance(cache_seqlens, Tensor):
        before = cache_seqlens.detach().cpu().long().expand(batch)
    else:
        before = torch.full((batch,), capacity if cache_seqlens is None else int(cache_seqlens), device="cpu")
    table = None if block_table is None else block_table.cpu()
    four = (query, key_cache, value_cache)
    if transposed:
        four = (query.transpose(1, 2), key_cache.transpose(1, 2), value_cache.transpose(1, 2))
    lengths(before, new, four[1], table)
    keywords: Keywords = {"seqlens_k": before.to(query.device) + new}
    if block_table is not None:
        keywords["block_table"] = block_table
    check_sequences(shapes.Canonical(*four, (batch,), 4), call[-3:], keywords)


class Step(NamedTuple):
    """The numbers of tokens in a step of a :class:`selfattn_ext.KVCache`."""

    batch: int  # the number of sequences
    total: int  # the tokens of all sequences
    longest: int  # the most tokens of a sequence
    uniform: int | None  # the tokens of each sequence, if all have as many


def step_of(counts: Sequence[int]) -> Step:
    longest = max(counts, default=0)
    return Step(len(counts), sum(counts), longest, longest if len(set(counts)) <= 1 else None)


def sequence_number(name: str, sequence: Any, count: int) -> int:
    """Checks the number of one of ``count`` sequences."""
    number = checks.integer(name, sequence)
    if not 0 <= number < count:
        raise ValueError(f"{name}: the cache holds sequences 0 to {count - 1}, got {number}")
    return number


def sequence_numbers(sequences: Any, count: int) -> list[int]:
    """Checks the numbers of some of ``count`` sequences; None stands for all."""
    if sequences is None:
        return list(range(count))
    if not isinstance(sequences, Iterable):
        raise TypeError(f"sequences must be numbers of sequences, got {checks.described(sequences)}")
    numbers = [
        sequence_number(f"sequences[{index}]", sequence, count) for index, sequence in enumerate(sequences)
    ]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"sequences must name each sequence once, got {numbers}")
    return numbers


def token_counts(counts: Any, sequences: int) -> list[int]:
    """The number of new tokens for each sequence of a step."""
    if not isinstance(counts, Iterable):
        return [checks.integer("counts", counts, 0)] * sequences
    numbers = checks.integers("counts", counts, 0)
    if len(numbers) != sequences:
        raise ValueError(f"counts must be an int or {sequences} numbers, got {len(numbers)}")
    return numbers


def append(cache: Any, now: Step, layer: Any, key: Any, value: Any) -> None:
    """Checks every argument of KVCache.append."""
    _check_tokens(cache, now, layer, {"key": key, "value": value})


def attend(cache: Any, now: Step, layer: Any, call: SparseCall) -> None:
    """Checks every argument of KVCache.attend."""
    query, key, value, options = call[:4]
    tokens: dict[str, Any] = {"query": query, "key": key, "value": value}
    _check_tokens(cache, now, layer, tokens)
    heads = 2 if cache.layout == "blhd" and query.dim() == 4 else 1
    kv_heads = key.size(heads)
    if query.size(heads) % kv_heads:
        raise ValueError(
            f"the cache has {kv_heads} heads, which do not divide the {query.size(heads)} of query: "
            f"{shapes.shown(tokens)}"
        )
    no_derivatives((options.attn_mask, options.alibi_slopes, options.sinks))
    capacity = -(-cache.capacity // cache.page_size) * cache.page_size
    scores = (now.batch, query.size(heads), now.longest, capacity)
    call_checks.options(query, scores, options, scores[:2])
    no_causal_bias(options.attn_mask)
    keywords: Keywords = {
        "seqlens_k": cache.cache_seqlens + cache.cu_seqlens.diff(),
        "max_seqlen_k": capacity,
    }
    four = (query, key, value)
    if query.dim() == 3:
        four = (shapes.of_packed(query), shapes.of_packed(key), shapes.of_packed(value))
        keywords |= {"cu_seqlens_q": cache.cu_seqlens}
    elif cache.layout == "blhd":
        four = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    check_sequences(shapes.Canonical(*four, (now.batch,), 4, query.dim() == 3), call[-3:], keywords)


def _check_tokens(cache: Any, now: Step, layer: Any, tokens: dict[str, Any]) -> None:
    """Checks a layer of a KVCache and the tokens of a step for it."""
    if not -len(cache.keys) <= checks.integer("layer", layer) < len(cache.keys):
        raise ValueError(f"layer must be below {len(cache.keys)}, got {layer}")
    keys, values = cache.keys[layer], cache.values[layer]
    checks.floats({"the cache": keys, **as_cast(tokens, keys)})
    said, rank = shapes.shown(tokens), tokens["key"].dim()
    if rank not in (3, 4) or any(tensor.dim() != rank for tensor in tokens.values()):
        raise ValueError(f"{', '.join(tokens)} must all have 4 dimensions, or 3 if packed: {said}")
    transposed = cache.layout == "blhd"
    kv_heads = keys.size(2 if transposed else 1)
    heads, rows = (1, 0) if rank == 3 else (2, 1) if transposed else (1, 2)
    for name, tensor in tokens.items():
        if now.total == 0 and tensor.size(rows):
            raise ValueError(f"the step has no tokens, and {name} has some: extend() begins a step")
        if rank == 3 and tensor.size(0) != now.total:
            raise ValueError(f"the step has {now.total} tokens, but packed {name} {tensor.size(0)}: {said}")
        if rank == 4 and (tensor.size(0), tensor.size(rows)) != (now.batch, now.uniform):
            asked = "different numbers of" if now.uniform is None else now.uniform
            raise ValueError(
                f"the step has {now.batch} sequences with {asked} tokens each, but {name} has a batch of "
                f"{tensor.size(0)} with {tensor.size(rows)} in the layout {cache.layout!r}; pack tokens as "
                f"(total, H, E) where their numbers differ: {said}"
            )
        width = (values if name == "value" else keys).size(-1)
        if tensor.size(-1) != width:
            raise ValueError(f"{name} must have the head dim {width} of the cache: {said}")
        if name != "query" and tensor.size(heads) != kv_heads:
            raise ValueError(f"{name} must have the {kv_heads} heads of the cache: {said}")
    no_derivatives(list(tokens.values()))
