"""Checks of the offsets and lengths of packed sequences.

Note [Values of offsets]
    On the CPU the operators check the values of index tensors whenever they run. On CUDA only a copy to the
    CPU shows the values, and that waits for the GPU. So Python copies them once per tensor, and remembers
    them as long as the tensor lives and nobody writes into it. While a CUDA graph records or a compiler
    traces, the values are not checked; kernels limit starts and lengths to the tensors that they read.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import capture
from . import call_checks, checks, shapes
from .call import PackedCall

__all__ = [
    "check_offsets_on_cuda",
    "check_positions_on_cuda",
    "indices",
    "mask_list",
    "offset_values",
    "packed_attention",
    "per_sequence",
    "position_values",
    "values",
]

_INTEGERS = (torch.int32, torch.int64)
_functorch = torch._C._functorch

#: Tensors on CUDA whose values are known: (their version, the values).
_remembered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def indices(name: str, value: Any) -> Tensor:
    """Copies a one-dimensional int32 or int64 tensor to the int64, contiguous form of the operators.

    It always copies, as callers write the next batch's offsets into the same tensor before a backward runs.
    """
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {checks.described(value)}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got a tensor of shape {tuple(value.shape)}")
    return _unwrapped(name, value).to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def _unwrapped(name: str, value: Tensor) -> Tensor:
    """Returns the tensor that torch.func's transforms have wrapped, as integers have no derivative."""
    if torch.compiler.is_dynamo_compiling():
        return value
    while _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            raise ValueError(f"{name} must not be mapped by torch.func.vmap: call once for each packing")
        value = _functorch.get_unwrapped(value)
    return value


def values(name: str, tensor: Tensor) -> tuple[int, ...] | None:
    """Returns an index tensor's values, None if they cannot be read: see Note [Values of offsets]."""
    if torch.compiler.is_dynamo_compiling():
        return None
    tensor = _unwrapped(name, tensor)
    if isinstance(tensor, FakeTensor):
        return None
    if _on_host(tensor):
        return _numbers(tensor)
    # A tensor made in inference mode has no version, so its values are read each time.
    version = None if tensor.is_inference() else tensor._version
    known = _remembered.get(tensor)
    if known is not None and known[0] == version and version is not None:
        return known[1]
    if capture.is_capturing(tensor):
        return None
    found = _numbers(tensor)
    _remembered[tensor] = (version, found)
    return found


def _on_host(tensor: Tensor) -> bool:
    return not tensor.is_cuda


def _numbers(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.tolist())


def check_offsets_on_cuda(call: PackedCall) -> None:
    """Checks the values of offsets on CUDA, where the operators do not check them."""
    assert call.cu_seqlens_k is not None
    offset_values("q", call.query, call.cu_seqlens_q, call.max_seqlen_q)
    offset_values("k", call.key, call.cu_seqlens_k, call.max_seqlen_k)
    check_positions_on_cuda(call.options.query_offset)


def check_positions_on_cuda(query_offset: Any) -> None:
    if isinstance(query_offset, Tensor) and query_offset.dim() == 1:
        position_values(query_offset)


def offset_values(side: str, tensor: Tensor, offsets: Tensor, longest: Any) -> None:
    """Checks the values of cu_seqlens_q or cu_seqlens_k against the packed tensor, if they can be read."""
    name, of = f"cu_seqlens_{side}", "query" if side == "q" else "key"
    numbers = values(name, offsets)
    if numbers is None:
        return
    if numbers[0] != 0:
        raise ValueError(f"{name} must start with 0, got {numbers[0]}")
    for index, (before, after) in enumerate(itertools.pairwise(numbers)):
        if after < before:
            raise ValueError(f"{name} must not decrease, but {before} at {index} is followed by {after}")
    if numbers[-1] > tensor.shape[0]:
        raise ValueError(
            f"{name} must end within {of}, which has {tensor.shape[0]} rows, got {numbers[-1]} at the end"
        )
    lengths = [after - before for before, after in itertools.pairwise(numbers)]
    most = max(lengths, default=0)
    if checks.integer(f"max_seqlen_{side}", longest, 0) < most:
        raise ValueError(
            f"max_seqlen_{side} must be at least the length of the longest sequence, {most} (sequence "
            f"{lengths.index(most)}), got {longest}"
        )


def position_values(positions: Tensor) -> None:
    """Checks the values of a query_offset that has one per sequence."""
    checks.integers("query_offset", values("query_offset", positions) or ())


def per_sequence(name: str, value: Any, query: Tensor, batch: int) -> None:
    """Checks an argument that is one int for all sequences or a tensor of one for each."""
    allowed = f"{name} must be an int, or an int32 or int64 tensor with one for each of the {batch} sequences"
    if isinstance(value, Tensor) and value.dim():
        if checks.dense_tensor(name, value).dtype not in _INTEGERS:
            raise TypeError(f"{allowed}, got {checks.described(value)}")
        checks.on_device(name, value, "query", query.device)
        if tuple(value.shape) != (batch,):
            raise ValueError(f"{allowed}, got {checks.described(value)}")
        return
    try:
        checks.integer(name, value)
    except TypeError:
        raise TypeError(f"{allowed}, got {checks.described(value)}") from None


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def offsets(side: str, value: Any, longest: Any, tensor: Tensor, query: Tensor) -> None:
    """Checks cu_seqlens_q or cu_seqlens_k together with its max_seqlen."""
    name = f"cu_seqlens_{side}"
    if isinstance(value, Tensor):
        checks.dense_tensor(name, value)
    indices(name, value)
    checks.on_device(name, value, "query", query.device)
    if value.shape[0] == 0:
        raise ValueError(f"{name} must have one element more than there are sequences, got an empty tensor")
    checks.integer(f"max_seqlen_{side}", longest, 0)
    offset_values(side, tensor, value, longest)


def mask_list(call: PackedCall) -> None:
    """Checks a list that holds one mask per sequence."""
    masks, query, longest = call.options.attn_mask, call.query, (call.max_seqlen_q, call.max_seqlen_k)
    batch, lengths = call.cu_seqlens_q.shape[0] - 1, _lengths(call)
    if len(masks) != batch:
        raise ValueError(f"attn_mask must have one mask for each of {batch} sequences, got {len(masks)}")
    for index, mask in enumerate(masks):
        name = f"attn_mask[{index}]"
        if checks.is_causal_bias(mask):
            raise TypeError(f"{name} is a CausalBias; pass is_causal and query_offset instead")
        checks.mask(name, mask)
        checks.dense_tensor(name, mask)
        checks.on_device(name, mask, "query", query.device)
        if mask.dtype != masks[0].dtype:
            raise TypeError(
                f"{name} is {mask.dtype} and attn_mask[0] {masks[0].dtype}: they must have the same dtype"
            )
        if lengths is not None:
            full = (query.shape[1], *lengths[index])
            checks.broadcasts(name, mask.shape, full, "the scores of its sequence")
        elif any(size > most for size, most in zip(reversed(mask.shape), reversed(longest), strict=False)):
            raise ValueError(
                f"{name} must not be longer than the longest sequence, {longest}, got {tuple(mask.shape)}"
            )


def _lengths(call: PackedCall) -> list[tuple[int, int]] | None:
    """Returns (queries, keys) of each sequence, None if the offsets cannot be read."""
    assert call.cu_seqlens_k is not None
    starts_q = values("cu_seqlens_q", call.cu_seqlens_q)
    starts_k = values("cu_seqlens_k", call.cu_seqlens_k)
    if starts_q is None or starts_k is None:
        return None
    sides = (
        [after - before for before, after in itertools.pairwise(starts)] for starts in (starts_q, starts_k)
    )
    return list(zip(*sides, strict=True))


def packed_attention(call: PackedCall) -> None:
    """Checks every argument of :func:`selfattn_ext.varlen_attention`, those of caches excepted."""
    query, key, value, options = call.query, call.key, call.value, call.options
    starts_q: Any = call.cu_seqlens_q
    starts_k: Any = call.cu_seqlens_k
    tensors = {"query": query, "key": key, "value": value}
    checks.floats(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions, (all rows, heads, head dim), got {tuple(tensor.shape)}"
            )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query and key must have the same last dimension (head dim), but query is {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if key.shape[0] != value.shape[0]:
        raise ValueError(
            f"key and value must have the same number of rows, but key is {tuple(key.shape)} and value "
            f"{tuple(value.shape)}"
        )
    checks.flags(enable_gqa=options.enable_gqa)
    shapes.check_heads(query.shape[1], key.shape[1], value.shape[1], options.enable_gqa, tensors)
    # Counts come before values: offsets of another packing also break rules whose errors would mislead.
    counts = [starts.shape[0] for starts in (starts_q, starts_k) if _is_vector(starts)]
    if len(counts) == 2 and 0 not in counts and counts[0] != counts[1]:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same number of elements, one more than there are "
            f"sequences, but they have {counts[0]} and {counts[1]}"
        )
    offsets("q", starts_q, call.max_seqlen_q, query, query)
    offsets("k", starts_k, call.max_seqlen_k, key, query)
    batch = starts_q.shape[0] - 1
    per_sequence("query_offset", options.query_offset, query, batch)
    if isinstance(options.query_offset, Tensor) and options.query_offset.dim():
        position_values(options.query_offset)
    scores = (batch, query.shape[1], call.max_seqlen_q, call.max_seqlen_k)
    if isinstance(options.attn_mask, (list, tuple)):
        mask_list(call)
        options = options._replace(attn_mask=None)
    elif checks.is_causal_bias(options.attn_mask):
        raise TypeError(
            "attn_mask is a CausalBias, whose rule fits only one length; pass is_causal and query_offset "
            "instead"
        )
    call_checks.options(query, scores, options, scores[:2])
