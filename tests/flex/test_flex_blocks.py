"""flex_attention with block masks: sizes, blocks of every kind, and unlisted blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from functions import ALL, Functions, flex_attention, gradients, mask_of, tensors
from test_flex_functions import check, exact, judge
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from selfattn_ext import backends

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")


@pytest.mark.parametrize("block_size", [1, 16, 100, (64, 32), (32, 200)], ids=str)
@pytest.mark.parametrize("name", ["causal", "documents", "conjunction", "neighbourhood"])
def test_block_sizes(name: str, block_size: Any) -> None:
    check(name, (1, 2, 150, 133), torch.float64, block_size)


@pytest.mark.parametrize("block_size", [(64, 32), (128, 128), (96, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_every_kind(dtype: torch.dtype, block_size: tuple[int, int]) -> None:
    """Full, partial and hidden blocks lie side by side, the scale is no power of two, and values fill whole
    vectors. Keys that no query sees hold NaN, and their values hold infinities. One judge is for all.
    """
    kinds = torch.randint(3, (2, 5, 14))
    kinds[:, 1], kinds[:, 3, 2:12] = 0, 2
    hidden = torch.zeros(430, dtype=torch.bool)
    hidden[:70], hidden[200:264] = True, True

    def shows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        kind = kinds[h, q // block_size[0], kv // block_size[1]]
        return ~hidden[kv] & ((kind == 2) | ((kind == 1) & ((q + kv) % 3 != 0)))

    given = [torch.randn(1, 2, rows, dim).to(dtype) for rows, dim in ((300, 48), (430, 48), (430, 64))]
    for tensor in given:
        tensor.requires_grad_()
    mask = mask_of(Functions(mask_mod=shows), (1, 2, 300, 430), block_size)
    for score_mod in (None, lambda score, b, h, q, kv: 0.5 * score + 0.01 * kv):
        functions = Functions(score_mod, shows)
        poisoned = [tensor.detach().clone() for tensor in given]
        poisoned[1][:, :, hidden], poisoned[2][:, :, hidden] = torch.nan, torch.inf
        for tensor in poisoned:
            tensor.requires_grad_()
        right, peer = (exact(given, functions, each) for each in (torch.float64, dtype))
        for isa, (name, tensors_of) in itertools.product(
            backends.cpu_isas(), (("clean", given), ("poisoned", poisoned))
        ):
            with backends.use_cpu_isa(isa):
                out = flex_attention(*tensors_of, score_mod, mask)
                results = [out, *gradients(out, tensors_of)]
            for index, each in enumerate(zip(results, right, peer, strict=True)):
                result, wanted, other = (tensor.detach() for tensor in each)
                terms = float(wanted.abs().max())
                assert_accurate(f"{isa} {name} {index}", result, wanted, other, terms, dtype)


def block_mask_of_lists(full: bool) -> BlockMask:
    """Block (i, j) is listed where i + j is even; no function hides anything."""
    rows = 5
    listed = [[j for j in range(rows) if (i + j) % 2 == 0] for i in range(rows)]
    counts = torch.tensor([[[len(row) for row in listed]]], dtype=torch.int32)
    indices = torch.tensor([[[row + [0] * (rows - len(row)) for row in listed]]], dtype=torch.int32)
    empty = torch.zeros_like(counts), torch.zeros_like(indices)
    lists = (*empty, counts, indices) if full else (counts, indices, None, None)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(16, 16), mask_mod=noop_mask)


@pytest.mark.parametrize("full", [False, True])
def test_blocks_that_are_not_listed_are_hidden(full: bool) -> None:
    given = tensors((1, 2, 80, 80), torch.float64)
    blocks = torch.arange(80) // 16
    visible = ((blocks.unsqueeze(-1) + blocks) % 2 == 0).view(1, 1, 80, 80)
    out = flex_attention(*given, None, block_mask_of_lists(full))
    judge("blocks", out, given, Functions(), visible=visible)


def test_a_mask_that_was_cropped() -> None:
    functions = ALL["causal"]((1, 1, 200, 200), torch.float64)
    mask = create_block_mask(functions.mask_mod, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    given = tensors((2, 2, 130, 140), torch.float64)
    with pytest.raises(ValueError, match=r"block_mask was created for .*256, 256.*_adjust"):
        flex_attention(*given, None, mask)
    judge("cropped", flex_attention(*given, None, mask._adjust(130, 140)), given, functions)


@pytest.mark.parametrize(
    "index",
    [
        (slice(1), slice(1, 3), slice(2)),
        (slice(1, 2), slice(None), slice(1, 3)),
        (slice(None), slice(0, 3, 2), slice(4, 5)),
        (slice(None), slice(2), torch.tensor([3, 0])),
    ],
    ids=str,
)
def test_a_mask_that_was_sliced(index: tuple[Any, ...]) -> None:
    """Queries past the mask's blocks are refused, as in torch's compiled kernels: no block covers them."""
    table = torch.randint(2, (2, 3, 300, 280), dtype=torch.bool)
    sizes = (2, 3, 300, 280)
    part = mask_of(Functions(mask_mod=lambda b, h, q, kv: table[b, h, q, kv]), sizes, 64)[index]
    rows = torch.arange(320).view(5, 64)[index[2]].flatten()
    seen = table[index[0], index[1]][:, :, rows[rows < 300]]
    functions = Functions(mask_mod=lambda b, h, q, kv: seen[b, h, q, kv])
    part.mask_mod = functions.mask_mod
    batch, heads, length, _ = seen.shape
    given = tensors((batch, heads, length, 280), torch.float64)
    judge("sliced", flex_attention(*given, None, part._adjust(length, 280)), given, functions)
    more = torch.randn(batch, heads, part.kv_num_blocks.size(2) * 64 + 1, 16)
    part.seq_lengths = (more.size(2), 280)
    with pytest.raises(ValueError, match=r"block_mask has \d blocks of 64 queries, as it was sliced"):
        flex_attention(more, given[1].float(), given[2].float(), None, part)


def test_a_mask_without_its_first_dimension() -> None:
    mask = block_mask_of_lists(False)
    part = BlockMask.from_kv_blocks(mask.kv_num_blocks[0], mask.kv_indices[0], BLOCK_SIZE=(16, 16))
    with pytest.raises(ValueError, match=r"block_mask must keep its dimensions.* \(1, 5\)"):
        flex_attention(*tensors((1, 2, 80, 80)), None, part)
