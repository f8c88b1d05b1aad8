"""What each query selects, as the user gave it, brought into the operators' form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .. import capture, ops
from ..arguments import AttentionOptions, Keywords, OptionalTensor, checks, shapes

__all__ = ["Selection", "check", "joined", "needs_mask", "selection_of"]

_INTEGERS = (torch.int32, torch.int64)

#: The kernel that goes through lists, by the type of the device.
_OF_LISTS = {"cpu": "fused", "cuda": "simt"}


class Selection(NamedTuple):
    """Numbers of blocks of keys, -1 for none, in any order and any number of times."""

    #: The name of the argument.
    name: str
    #: (B | 1, 1 | Hk | H, rows, K), int32 or int64.
    indices: Tensor
    #: How many neighbouring queries share a row, and how many keys a block has.
    size: tuple[int, int]

    def keywords(self, keys: int) -> Keywords:
        """Returns the operators' keywords of a selection among ``keys`` keys."""
        blocks = -(-keys // self.size[1])
        on_host = self.indices.device.type == "cpu"
        lists = ops.sorted_selection(self.indices, blocks) if on_host else _sorted(self.indices, blocks)
        return {"selection": lists, "selection_size": list(self.size)}


def _sorted(indices: Tensor, blocks: int) -> Tensor:
    """Does what ops.sorted_selection does, and leaves out numbers of blocks that do not exist."""
    # Numbers that count for nothing become the largest. The second sort takes those that are repeated there.
    given = indices.where((indices >= 0) & (indices < blocks), blocks).sort(-1).values
    given[..., 1:] = given[..., 1:].where(given[..., 1:] != given[..., :-1], blocks)
    found = given.sort(-1).values
    return found.where(found < blocks, -1).int().contiguous()


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
    shared = rows.size(2) != length and rows.size(2) == -(-length // keys) and not form.packed
    return Selection("block_indices", rows, (keys if shared else 1, keys))


def _four_dimensional(name: str, value: Any, form: shapes.Canonical) -> Tensor:
    """Returns indices (..., heads, rows, K), or (..., rows, K) for all heads, as (B | 1, heads, rows, K).

    Those of packed queries have no batch.
    """
    tensor: Tensor = checks.dense_tensor(name, value)
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    checks.on_device(name, tensor, "query", form.query.device)
    if tensor.dim() < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, (..., L, K), got {tuple(tensor.shape)}")
    if form.packed:
        if tensor.dim() > 3:
            raise ValueError(
                f"{name} of packed queries must be (heads, total, K) or (total, K), got {tuple(tensor.shape)}"
            )
        return tensor[(None,) * (4 - tensor.dim())]
    if tensor.dim() == form.rank - 1 and form.rank > 3:
        tensor = tensor.unsqueeze(-3)
    return shapes.mask_four_dimensional(tensor, form)


def check(selection: Selection, form: shapes.Canonical, keys: int | Tensor) -> None:
    """Checks shape and values of a selection; those on a GPU only if they can be read.

    ``keys`` is the number of keys that there are for each row, an int or a tensor that broadcasts to the
    indices.
    """
    name, rows, (queries, size) = selection
    heads, kv_heads = form.query.size(1), form.key.size(1)
    batch, length = form.query.size(0), form.query.size(2)
    needed = -(-length // queries)
    if rows.size(0) not in (1, batch) or rows.size(1) not in (1, kv_heads, heads) or rows.size(2) != needed:
        also = f" or {-(-length // size)}" if name == "block_indices" and not form.packed else ""
        first = "" if form.packed else f"{batch} or 1, "
        shape = tuple(rows.shape[1:] if form.packed else rows.shape)
        raise ValueError(
            f"{name} must have the shape ({first}{heads}, {kv_heads} or 1, {length}{also}, any), in which "
            f"batch and heads may be missing, but in this form its shape is {shape}"
        )
    if torch.compiler.is_compiling() or isinstance(rows, FakeTensor) or rows.numel() == 0:
        return
    if capture.is_capturing(rows):
        return
    blocks = -(-torch.as_tensor(keys, device=rows.device) // size)
    wrong = (rows < -1) | (rows >= blocks)
    if wrong.any():
        place = tuple(wrong.nonzero()[0])
        last = int(blocks.expand(rows.shape)[place]) - 1
        of = "keys" if name == "indices" else f"blocks of {size} keys"
        raise ValueError(
            f"{name} must lie between 0 and {last}, the last of the {of}, or be -1 for none, but one is "
            f"{int(rows[place])}"
        )


def needs_mask(query: Tensor, mask: OptionalTensor, options: AttentionOptions, keywords: Keywords) -> bool:
    """Whether a call has something that kernels do not compute from lists of keys: Note [Selected keys as a
    mask] in sparse_attention.py.
    """
    of_lists = _OF_LISTS.get(query.device.type)
    return (
        of_lists is None
        or keywords.get("kernel_name", of_lists) != of_lists
        or options.return_weights
        or options.return_aux is not None
        or (torch.is_grad_enabled() and mask is not None and mask.requires_grad)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.onnx.is_in_onnx_export()
    )


def joined(mask: OptionalTensor, seen: Tensor) -> Tensor:
    """Returns a mask that hides what either ``mask`` or the bool mask ``seen`` hides."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype is torch.bool else torch.where(seen, mask, -torch.inf)
