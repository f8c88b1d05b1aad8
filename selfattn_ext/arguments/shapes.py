"""Conversion of the shapes that users have to the four dimensions of the operators, and back.

(L, E) is one head of one batch, (H, L, E) one batch, (B, H, L, E) the operators' own form; further leading
dimensions are part of the batch. Leading dimensions broadcast, by views with stride 0 where that is possible.
A kv head count of 1 is left as it is: the operators read that head for every query head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Canonical",
    "Results",
    "canonical",
    "check_heads",
    "dense_rows",
    "four_dimensional",
    "head_numbers",
    "known",
    "mask_four_dimensional",
    "of_packed",
    "packed",
    "restored",
    "restored_packed",
    "shown",
    "with_lead",
]

#: out, weights, lse.
Results = tuple[Tensor, Tensor | None, Tensor | None]


class Canonical(NamedTuple):
    """query, key and value in four dimensions; the leading dimensions and the rank of the result."""

    query: Tensor
    key: Tensor
    value: Tensor
    lead: tuple[int, ...]
    rank: int
    #: Whether the batch is one of packed sequences, query, key and value (1, H, total, E).
    packed: bool = False


def of_packed(tensor: Tensor) -> Tensor:
    """Returns packed rows (total, H, E) in the operators' form (1, H, total, E)."""
    if tensor.dim() != 3:
        raise ValueError("packed tensors have three dimensions")
    return tensor.transpose(0, 1).unsqueeze(0)


def packed(tensors: Sequence[Tensor], batch: int, enable_gqa: bool) -> Canonical:
    """Returns packed query, key and value of ``batch`` sequences in the operators' form."""
    query, key, value = map(of_packed, tensors)
    return canonical(query, key, value, enable_gqa)._replace(lead=(batch,), packed=True)


def dense_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1, which the operators need: itself if it has that."""
    # is_contiguous would ask for sizes, which may depend on data in a graph; strides less often do.
    is_dense = tensor.stride()[-1] == 1
    if is_dense is True or known(is_dense) or known(tensor.shape[-1] <= 1):
        return tensor
    return tensor.contiguous()


def known(condition: bool | torch.SymBool) -> bool:
    """Tells whether a condition on sizes and strides is known to hold: False if it depends on data."""
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def four_dimensional(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Expands a tensor (..., H, L, E) to the leading dimensions ``lead`` and makes these one batch."""
    rank = tensor.dim()
    if rank < 4:
        tensor = tensor.unsqueeze(0) if rank == 3 else tensor.unsqueeze(0).unsqueeze(0)
    if len(lead) == 1:
        return tensor if tensor.size(0) == lead[0] else tensor.expand(lead[0], -1, -1, -1)
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(math.prod(lead), *tensor.shape[-3:])


def canonical(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, dense: bool = True) -> Canonical:
    """Brings the three into the operators' form, with last strides of 1 where ``dense``.

    Raises:
        ValueError: fewer than two dimensions, or leading dimensions or heads that do not match.
    """
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if (
        len(query_shape) == len(key_shape) == len(value_shape) == 4
        and query_shape[0] == key_shape[0] == value_shape[0]
        and query_shape[1] == key_shape[1] == value_shape[1]
    ):
        if dense:
            query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
        return Canonical(query, key, value, (query_shape[0],), 4)

    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, (..., length, head dim), but its shape is "
                f"{tuple(tensor.shape)}"
            )
    rank = max(query.dim(), key.dim(), value.dim())
    lead: tuple[int, ...] = (1,)
    if rank >= 4:
        try:
            lead = tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
        except RuntimeError:
            raise ValueError(
                "the batch dimensions of query, key and value (all before the last three) must be equal or "
                f"broadcast, but their shapes are {shown(tensors)}"
            ) from None
    query, key, value = (four_dimensional(tensor, lead) for tensor in tensors.values())
    if dense:
        query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)

    heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    kv_heads = check_heads(heads, key_heads, value_heads, enable_gqa, tensors)
    if key_heads != value_heads:
        key, value = (tensor.expand(-1, kv_heads, -1, -1) for tensor in (key, value))
    if heads != kv_heads and heads == 1:
        query = query.expand(-1, kv_heads, -1, -1)
    return Canonical(query, key, value, lead, rank)


def check_heads(
    heads: int, key_heads: int, value_heads: int, enable_gqa: bool, tensors: dict[str, Tensor]
) -> int:
    """Returns the common number of heads of key and value.

    It is that of the query, or 1, or, with enable_gqa, a divisor of that of the query.

    Raises:
        ValueError: the numbers of heads do not match; the message shows the shapes of ``tensors``.
    """
    if key_heads != value_heads and key_heads != 1 != value_heads:
        raise ValueError(
            "key and value must have the same number of heads, or one of them a single head, but "
            f"key has {key_heads} and value {value_heads}: {shown(tensors)}"
        )
    # A graph can know that two numbers are equal even if they depend on data.
    kv_heads = value_heads if key_heads != value_heads and key_heads == 1 else key_heads
    if heads == kv_heads or heads == 1 or kv_heads == 1:
        return kv_heads
    if not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key and value have {kv_heads}: they must be equal, or key and "
            f"value have 1, unless enable_gqa=True groups the query heads; shapes are {shown(tensors)}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            "with enable_gqa=True the heads of key and value must divide those of query, but query has "
            f"{heads} and key and value have {kv_heads}: {shown(tensors)}"
        )
    return kv_heads


def shown(tensors: dict[str, Tensor]) -> str:
    """Returns the shapes of tensors, for a message."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def restored(form: Canonical, out: Tensor, weights: Tensor | None, lse: Tensor | None) -> Results:
    """Returns results (B, H, ...) in the leading dimensions that the user gave, or packed."""
    if form.packed:
        return restored_packed(out, weights, lse)
    return (
        with_lead(out, form),
        None if weights is None else with_lead(weights, form),
        None if lse is None else with_lead(lse, form),
    )


def restored_packed(out: Tensor, weights: Tensor | None, lse: Tensor | None) -> Results:
    """Returns results (1, H, total, ...) in the form of packed rows; weights are padded."""
    return out.squeeze(0).transpose(0, 1), weights, None if lse is None else lse.squeeze(0)


def with_lead(tensor: Tensor, form: Canonical) -> Tensor:
    """Returns a result (B, H, ...) in the leading dimensions that the user gave."""
    if form.rank == 4:
        return tensor
    if form.rank > 4:
        return tensor.reshape(*form.lead, *tensor.shape[1:])
    return tensor.squeeze(0) if form.rank == 3 else tensor.squeeze(0).squeeze(0)


def mask_four_dimensional(mask: Tensor, form: Canonical) -> Tensor:
    """Returns a mask that broadcasts to the scores (..., L, S) as (B | 1, H | 1, L | 1, S | 1).

    It is a view wherever possible.
    """
    rank = mask.dim()
    if rank == 4 and len(form.lead) == 1:
        return mask
    while rank > len(form.lead) + 3 and mask.shape[0] == 1:
        mask, rank = mask.squeeze(0), rank - 1
    if rank == 2:
        return mask.view(1, 1, *mask.shape)
    if rank < 4:
        return mask.view(*(1,) * (4 - rank), *mask.shape)
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*form.lead, *mask.shape[-3:]).reshape(math.prod(form.lead), *mask.shape[-3:])


def head_numbers(numbers: Tensor, form: Canonical, dtype: torch.dtype) -> Tensor:
    """Returns numbers per head that broadcast to (..., H) as a contiguous (B | 1, H) of ``dtype``."""
    if not numbers.is_floating_point():
        raise TypeError("numbers per head must have a floating-point dtype")
    heads = form.query.size(1)
    numbers = numbers.to(dtype)
    if math.prod(numbers.shape[:-1]) == 1:
        return numbers.reshape(1, -1).expand(1, heads).contiguous()
    return numbers.expand(*form.lead, heads).reshape(-1, heads).contiguous()
