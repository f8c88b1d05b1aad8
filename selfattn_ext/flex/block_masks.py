"""torch's BlockMask as the operators take it: a byte for each block of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["block_map", "check_size", "visible_blocks"]

#: The marks of a block of scores: no query sees a key; the mask function decides; every query sees every key.
HIDDEN, PARTIAL, FULL = 0, 1, 2


def block_map(block_mask: Any) -> Tensor:
    """(B | 1, H | 1, query blocks, key blocks) of a :class:`torch.nn.attention.flex_attention.BlockMask`,
    uint8.
    """
    result = _marked(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)
    if block_mask.full_kv_num_blocks is not None:
        # A block that is in both lists is full.
        result = torch.maximum(
            result, _marked(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL)
        )
    return result


def _marked(counts: Tensor, indices: Tensor, mark: int) -> Tensor:
    blocks = indices.size(-1)
    listed = torch.arange(blocks, device=indices.device) < counts.unsqueeze(-1)
    # Entries that are not listed go into a column that is cut off.
    places = torch.where(listed, indices, blocks).long()
    outside = listed & ((indices < 0) | (indices >= blocks))
    if indices.device.type == "cuda":
        places = torch.where(outside, blocks, places)  # without waiting for the GPU to raise an error
    elif not torch.onnx.is_in_onnx_export() and bool(outside.any()):
        raise ValueError(f"block_mask lists key blocks outside its {blocks}")
    marks = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.uint8, device=indices.device)
    return marks.scatter_(-1, places, mark)[..., :blocks].contiguous()


def check_size(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Raises ValueError unless the mask is one for these lengths, this batch and these heads.

    query (B, H, L, E), key (B, Hk, S, E).
    """
    if tuple(block_mask.shape[-2:]) != (query.size(-2), key.size(-2)):
        wide = (1 << 30, 1 << 30)
        if tuple(block_mask.BLOCK_SIZE) == wide:
            return  # the mask that torch makes for calls without one
        raise ValueError(
            f"block_mask was created for (Q_LEN, KV_LEN) = {tuple(block_mask.shape[-2:])}, but query has "
            f"{query.size(-2)} rows and key has {key.size(-2)}: create it for these lengths, or crop it "
            "with its method _adjust"
        )
    if block_mask.kv_num_blocks.dim() != 3:
        raise ValueError(
            "block_mask must keep its dimensions (B, H, query blocks) when it is sliced, but kv_num_blocks "
            f"has the shape {tuple(block_mask.kv_num_blocks.shape)}: slice with 0:1 instead of 0"
        )
    batch, heads, blocks = block_mask.kv_num_blocks.shape
    # Slicing does not change the mask's shape. torch's compiled kernels refuse such a mask, too.
    if blocks * block_mask.BLOCK_SIZE[0] < query.size(-2):
        raise ValueError(
            f"block_mask has {blocks} blocks of {block_mask.BLOCK_SIZE[0]} queries, as it was sliced, but "
            f"query has {query.size(-2)} rows: slice query likewise, and crop the mask by its method _adjust"
        )
    for name, given, needed in (("B", batch, query.size(0)), ("H", heads, query.size(1))):
        if given not in (1, needed):
            raise ValueError(
                f"block_mask was created for {name} = {given}, but query has {needed}; 1 serves all"
            )
    if block_mask.kv_num_blocks.device != query.device:
        raise ValueError(
            f"block_mask must be on the query's device, {query.device}, but it is on "
            f"{block_mask.kv_num_blocks.device}"
        )


def visible_blocks(
    blocks: Tensor, block_size: tuple[int, int], queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether the blocks of the scores of these queries and keys are visible, and whether they are full: bool
    (B | 1, H | 1, L, S).
    """
    rows, columns = queries // block_size[0], keys // block_size[1]
    inside = (rows < blocks.size(-2)).unsqueeze(-1) & (columns < blocks.size(-1))
    rows, columns = rows.clamp(max=blocks.size(-2) - 1), columns.clamp(max=blocks.size(-1) - 1)
    each = blocks[..., rows.unsqueeze(-1), columns]
    return inside & (each != HIDDEN), inside & (each == FULL)
