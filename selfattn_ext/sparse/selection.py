"""What each query selects, as the user gave it, brought into the operators' form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import capture, ops
from ..arguments import OptionalTensor, checks, shapes

__all__ = ["Selection", "check", "selection_of"]

_INTEGERS = (torch.int32, torch.int64)


class Selection(NamedTuple):
    """Numbers of blocks of keys, -1 for none, in any order and any number of times."""

    #: The name of the argument.
    name: str
    #: (B | 1, 1 | Hk | H, rows, K), int32 or int64.
    indices: Tensor
    #: How many neighbouring queries share a row, and how many keys a block has.
    size: tuple[int, int]

    def lists(self, keys: int) -> Tensor:
        """Returns the operators' form of a selection among ``keys`` keys."""
        return ops.sorted_selection(self.indices, -(-keys // self.size[1]))


def selection_of(
    form: shapes.Canonical, indices: OptionalTensor, block_indices: OptionalTensor, block_size: Any
) -> Selection:
    """Returns the selection of a call, whose values nobody has checked."""
    if (indices is None) == (block_indices is None):
        given = "neither was" if indices is None else "both were"
        raise ValueError(f"one of indices and block_indices must be given, but {given}")
    if indices is not None:
        if block_size is not None:
            raise ValueError("block_size goes with block_indices; indices are those of single keys")
        return Selection("indices", _four_dimensional("indices", indices, form), (1, 1))
    if block_size is None:
        raise ValueError("block_size must be given with block_indices: how many keys a block has")
    keys = checks.integer("block_size", block_size, 1)
    rows = _four_dimensional("block_indices", block_indices, form)
    length = form.query.size(2)
    shared = rows.size(2) != length and rows.size(2) == -(-length // keys)
    return Selection("block_indices", rows, (keys if shared else 1, keys))


def _four_dimensional(name: str, value: Any, form: shapes.Canonical) -> Tensor:
    """Returns indices (..., heads, rows, K), or (..., rows, K) for all heads, as (B | 1, heads, rows, K)."""
    tensor: Tensor = checks.dense_tensor(name, value)
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    checks.on_device(name, tensor, "query", form.query.device)
    if tensor.dim() < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, (..., L, K), got {tuple(tensor.shape)}")
    if tensor.dim() == form.rank - 1 and form.rank > 3:
        tensor = tensor.unsqueeze(-3)
    return shapes.mask_four_dimensional(tensor, form)


def check(selection: Selection, form: shapes.Canonical) -> None:
    """Checks shape and values of a selection; those on a GPU only if they can be read."""
    name, rows, (queries, keys) = selection
    heads, kv_heads = form.query.size(1), form.key.size(1)
    batch, length, blocks = form.query.size(0), form.query.size(2), -(-form.key.size(2) // keys)
    needed = -(-length // queries)
    if rows.size(0) not in (1, batch) or rows.size(1) not in (1, kv_heads, heads) or rows.size(2) != needed:
        also = f" or {-(-length // keys)}" if name == "block_indices" else ""
        raise ValueError(
            f"{name} must have the shape ({batch} or 1, {heads}, {kv_heads} or 1, {length}{also}, any), in "
            f"which batch and heads may be missing, but in this form its shape is {tuple(rows.shape)}"
        )
    if rows.numel() == 0 or capture.is_capturing(rows) or torch.compiler.is_compiling():
        return
    least, most = (int(number) for number in rows.aminmax())
    if least < -1 or most >= blocks:
        wrong = least if least < -1 else most
        of = "keys" if name == "indices" else f"blocks of {keys} keys"
        raise ValueError(
            f"{name} must lie between 0 and {blocks - 1}, the last of the {of}, or be -1 for "
            f"none, but one is {wrong}"
        )
