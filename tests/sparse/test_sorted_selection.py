"""The lists that are made of a user's indices, and the checks of lists: rows of every kind, on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selfattn_ext import ops

#: Numbers of a row and blocks: rows with many numbers are sorted by other means than those with few.
SIZES = [
    (0, 5), (1, 1), (2, 1), (3, 63), (7, 64), (8, 65), (5, 2**31 - 1), (8, 4096), (8, 4097), (67, 34304),
    (67, 34305), (300, 40), (2048, 8191),
]  # fmt: skip


def by_hand(indices: Tensor) -> Tensor:
    """Returns what the operator returns, one row at a time."""
    rows = [sorted(set(row) - {-1}) for row in indices.flatten(0, 2).tolist()]
    filled = [row + [-1] * (indices.size(3) - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device="cpu").reshape(indices.shape)


def rows_of(kind: str, count: int, blocks: int) -> Tensor:
    """Returns indices (2, 3, 11, count)."""
    generator = torch.Generator().manual_seed(count)
    shape = (2, 3, 11, count)
    least = 0 if kind == "in full" else -1
    indices = torch.randint(least, blocks, shape, generator=generator, device="cpu")
    if kind == "ascending":
        return indices.sort(-1).values  # -1 in front of the others, and some numbers more than once
    if kind == "lists":
        return by_hand(indices).long()
    if kind == "one number":
        return indices[..., :1].expand(shape)
    if kind == "nothing":
        return torch.full(shape, -1, device="cpu")
    return indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "kind", ["at random", "in full", "ascending", "descending", "lists", "one number", "nothing"]
)
@pytest.mark.parametrize(("count", "blocks"), SIZES)
def test_rows(count: int, blocks: int, kind: str, dtype: torch.dtype) -> None:
    indices = rows_of("ascending" if kind == "descending" else kind, count, blocks).to(dtype)
    if kind == "descending":
        indices = indices.flip(-1)
    expected = by_hand(indices)
    for given in (indices, indices.transpose(1, 3).contiguous().transpose(1, 3)):
        lists = ops.sorted_selection(given, blocks)
        assert lists.is_contiguous()
        assert torch.equal(lists, expected)


@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 4097])
def test_threads(rows: int, one_thread: None) -> None:
    """Many rows become items of several threads, which write all of them and no others."""
    indices = torch.randint(-1, 6, (1, 2, rows, 6), device="cpu")
    alone = ops.sorted_selection(indices, 6)
    assert torch.equal(alone, by_hand(indices))
    torch.set_num_threads(3)
    assert torch.equal(ops.sorted_selection(indices, 6), alone)


#: Places (head, row, number) of wrong numbers. The first is the one that a refusal names.
PLACES = [[(0, 0, 0), (0, 0, 3)], [(1, 2999, 39), (1, 2999, 40)], [(0, 7, 2), (0, 8, 0), (1, 2999, 0)]]


@pytest.mark.parametrize("places", PLACES, ids=range(len(PLACES)))
@pytest.mark.parametrize("wrong", [-2, 100, 2**32, -(2**63)])
def test_the_first_wrong_index_is_named(places: list[tuple[int, int, int]], wrong: int) -> None:
    indices = torch.zeros(1, 2, 3000, 41, dtype=torch.int64, device="cpu")
    for place in places:
        indices[0][place] = wrong if place == places[0] else 101
    row = places[0][0] * 3000 + places[0][1]
    for _ in range(10):
        with pytest.raises(ValueError, match=rf"between 0 and 99, .* but row {row} has {wrong}$"):
            ops.sorted_selection(indices, 100)


@pytest.mark.parametrize("places", PLACES, ids=range(len(PLACES)))
@pytest.mark.parametrize("lengths", [False, True])
def test_the_first_wrong_list_is_named(places: list[tuple[int, int, int]], lengths: bool) -> None:
    query = torch.zeros(1, 2, 3000, 1, device="cpu")
    keys = torch.zeros(1, 2, 100, 1, device="cpu")
    lists = torch.arange(41, dtype=torch.int32, device="cpu").expand(1, 2, 3000, 41).contiguous()
    for place in places:
        lists[0][place] = 100
    head, row, number = places[0]
    options: dict[str, Any] = {"seqlens_k": torch.tensor([100], device="cpu")} if lengths else {}
    for _ in range(10):
        with pytest.raises(
            ValueError, match=rf"from 0 to 99 .* but row {head * 3000 + row} has 100 after {number - 1}$"
        ):
            ops.attention_forward(query, keys, keys, 1.0, selection=lists, selection_size=[1, 1], **options)
