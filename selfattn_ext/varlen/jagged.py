"""Nested tensors of torch's jagged layout as packed sequences, and back.

A jagged tensor is a packed one with its offsets: (B, H, j, E) holds (H, rows, E), (B, j, E) holds (rows, E).
This module takes it apart and puts the result together; the attention is that of :mod:`.packed_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import AttentionCall, PackedCall, checks
from .packed_attention import packed_attention

__all__ = ["attention", "without_columns"]


def attention(call: AttentionCall) -> Any:
    """:func:`selfattn_ext.scaled_dot_product_attention` if any of query, key and value is jagged.

    query (B, H, jq, E), key (B, Hk, jk, E) and value (B, Hk, jk, Ev), or (B, jq, E), (B, jk, E) and
    (B, jk, Ev). Masks and weights are dense: (B, H, Lmax, Smax), without H for three dimensions.

    Raises:
        ValueError, TypeError: as that function does.
    """
    query: Any = call.query
    options, mask = call.options, call.options.attn_mask
    _check(query, call.key, call.value)
    heads_apart = query.dim() == 4
    if mask is not None or options.return_weights:
        _need_longest(query, call.key)
    q, k, v = _packed(query), _packed(call.key), _packed(call.value)
    if not heads_apart and isinstance(mask, Tensor) and mask.dim() == 3:
        options = options._replace(attn_mask=mask.unsqueeze(1))
    packed = PackedCall(
        q.rows, k.rows, v.rows, q.starts, k.starts, q.longest, k.longest, None, None, None, None, options
    )
    results: Any = packed_attention(packed)
    out, *rest = results if isinstance(results, tuple) else (results,)
    out = _jagged(out.transpose(0, 1) if heads_apart else out.squeeze(1), query, q.places)
    if options.return_weights and not heads_apart:
        rest[0] = rest[0].squeeze(1)
    aux = [] if options.return_aux is None else [rest.pop()]
    if options.return_lse:
        rest[-1] = _jagged(rest[-1] if heads_apart else rest[-1].squeeze(0), query, q.places, -torch.inf)
    for found in aux:
        rest.append(_jagged_statistics(found, query, call.key, q.places, k.places))
    return (out, *rest) if rest else out


def _jagged_statistics(
    found: Any, query: Any, key: Any, of_queries: Tensor | None, of_keys: Tensor | None
) -> Any:
    """An AuxOutput of jagged tensors (B, H, j), or (B, j), from one of packed rows."""
    jagged = {}
    for name, rows in found._asdict().items():
        like, places = (key, of_keys) if name == "key_weights" else (query, of_queries)
        if rows is not None:
            nothing = -torch.inf if name in ("lse", "max_scores") else 0.0
            # The heads of key_weights are those of the query, or of the key.
            values = rows if query.dim() == 4 else rows.squeeze(0)
            jagged[name] = _jagged(values, like, places, nothing)
    return found._replace(**jagged)


def without_columns(tensor: Any) -> Tensor:
    """The same sequences with a head dim of 0: a value for callers that want the weights alone."""
    return _of_structure(tensor.values()[..., :0], tensor)


class _Packed(NamedTuple):
    """rows (total, H, E), their starts (B + 1,), the longest length, and the places of the rows in the buffer
    if it has other rows between them.
    """

    rows: Tensor
    starts: Tensor
    longest: int
    places: Tensor | None


def _packed(tensor: Any) -> _Packed:
    values, offsets, lengths = tensor.values(), tensor.offsets(), tensor.lengths()
    rows = values.unsqueeze(1) if tensor.dim() == 3 else values.transpose(0, 1)
    longest = _longest(tensor) if offsets.shape[0] > 1 else 0
    if lengths is None:
        return _Packed(rows, offsets, longest, None)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(int(starts[-1]), device=starts.device)
    sequence = torch.searchsorted(starts, places, right=True) - 1
    places = places + (offsets[:-1] - starts[:-1])[sequence]
    return _Packed(rows.index_select(0, places), starts, longest, places)


def _longest(tensor: Any) -> int:
    """The longest length; if a compiler would have to read offsets for it, a number that is not smaller."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo traces a property that is the constant 1, but no method that returns it.
        known = tensor._maybe_max_seqlen
        return tensor.values().shape[tensor._ragged_idx - 1] if known is None else known
    return tensor._get_max_seqlen()


def _is_longest_unknown(tensor: Any) -> bool:
    return torch.compiler.is_dynamo_compiling() and tensor._maybe_max_seqlen is None


def _need_longest(query: Any, key: Any) -> None:
    """Checks that the longest lengths are known, for results whose shapes depend on them."""
    for name, tensor in (("query", query), ("key", key)):
        if _is_longest_unknown(tensor):
            raise ValueError(
                f"under torch.compile, attn_mask and return_weights need the longest length of {name}: make "
                "it by torch.nested.nested_tensor_from_jagged(..., max_seqlen=...)"
            )


def _jagged(values: Tensor, like: Any, places: Tensor | None, elsewhere: float = 0.0) -> Tensor:
    """A jagged tensor of the structure of another one, from the values of its rows."""
    if places is not None:
        dim, shape = like._ragged_idx - 1, list(values.shape)
        shape[dim] = like.values().shape[dim]
        values = values.new_full(shape, elsewhere).index_copy(dim, places, values)
    return _of_structure(values, like)


def _of_structure(values: Tensor, like: Any) -> Tensor:
    """A jagged tensor with other values and the same offsets, so that it has the same symbolic size."""
    # torch.nested.nested_tensor_from_jagged calls this, but from torch 2.13 on it warns of tracers first.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    return nested_view_from_values_offsets_lengths(
        values,
        like.offsets(),
        like.lengths(),
        ragged_idx=like._ragged_idx,
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )


def _check(query: Any, key: Any, value: Any) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not checks.is_jagged(tensor):
            kind = "a nested tensor of another layout" if getattr(tensor, "is_nested", False) else ""
            raise TypeError(
                "query, key and value must all be nested tensors of layout=torch.jagged, or none of them, "
                f"but {name} is {kind or checks.described(tensor)}"
            )
        if tensor.dim() not in (3, 4) or tensor._ragged_idx != tensor.dim() - 2:
            raise ValueError(
                f"{name} must be (B, H, j, E) or (B, j, E) with the ragged dimension j second from the end, "
                f"got {tuple(tensor.shape)}; of (B, j, H, E), take transpose(1, 2)"
            )
        if (tensor.dim(), tensor.shape[0]) != (query.dim(), query.shape[0]):
            raise ValueError(
                "query, key and value must have the same number of dimensions and of sequences, but query is "
                f"{tuple(query.shape)} and {name} {tuple(tensor.shape)}"
            )
    if key.shape[-2] != value.shape[-2] and not _same_lengths(key, value):
        raise ValueError(
            f"key and value must have the same sequence lengths, but key is {tuple(key.shape)} and value "
            f"{tuple(value.shape)}"
        )


def _same_lengths(key: Any, value: Any) -> bool:
    """Whether two tensors whose structures are not known to be the same have equal lengths."""
    lengths = (
        tensor.offsets().diff() if tensor.lengths() is None else tensor.lengths() for tensor in (key, value)
    )
    return torch.equal(*lengths)
