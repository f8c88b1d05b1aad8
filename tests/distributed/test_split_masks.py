"""Masks of split attention in every form that a rank may have them, with as few rows as none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import ranks
from torch import Tensor

from selfattn_ext import distributed, scaled_dot_product_attention
from selfattn_ext.distributed import shard_sequence, unshard_sequence
from selfattn_ext.distributed.row_layout import Layout

pytestmark = pytest.mark.xdist_group("split_attention")

#: Shapes of a whole mask with L rows, of which each rank has its own.
WHOLE: dict[str, tuple[int | str, ...]] = {
    "for all": ("L", "L"),
    "of each head": (4, "L", "L"),
    "of each batch": (2, 1, "L", "L"),
    "of each": (2, 4, "L", "L"),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def attend(function: str, length: int, layout: str, form: str) -> None:
    """Runs on a rank; checks that its rows and their gradients are those of one process."""
    how = {"layout": layout}
    rank, count = dist.get_rank(), dist.get_world_size()
    whole = [drawn(2, 4, length, 8 + place).narrow(-1, 0, 8).clone() for place in range(4)]
    own = [shard_sequence(tensor, 2, **how).requires_grad_() for tensor in whole[:3]]
    rows = [Layout(layout, (0, length), count).size(each) for each in range(count)]
    owner = unshard_sequence(torch.full((rows[rank],), rank), 0, **how)
    if form in WHOLE:
        mask = drawn(*(length if size == "L" else size for size in WHOLE[form]))
        given = shard_sequence(mask, -2, **how)
    elif form == "one row":
        mask = given = drawn(1, length)
    elif form == "one row of each rank":
        of_ranks = drawn(count, length)
        mask, given = of_ranks[owner], of_ranks[rank : rank + 1]
    else:
        # Ranks have the same numbers in different forms: rank 0's form is the smallest that broadcasts.
        mask = drawn(1, 4, 1, length) if form == "unlike rows" else drawn(1, length, length)
        mask = mask.expand(2, 4, length, length)
        given = shard_sequence(mask, -2, **how)
        if rank == 0:
            given = given[:1, :, :1] if form == "unlike rows" and rows[rank] else given[:1, :1]
    given = given.clone().requires_grad_()
    attention = getattr(distributed, function)
    out = attention(*own, given, **how)
    (out * shard_sequence(whole[3], 2, **how)).sum().backward()

    leaves = [tensor.requires_grad_() for tensor in (*whole[:3], mask.detach().clone())]
    expected = scaled_dot_product_attention(*leaves)
    (expected * whole[3]).sum().backward()
    torch.testing.assert_close(out, shard_sequence(expected, 2, **how))
    for tensor, leaf in zip(own, leaves, strict=False):
        torch.testing.assert_close(tensor.grad, shard_sequence(leaf.grad, 2, **how))
    if form in WHOLE:
        torch.testing.assert_close(given.grad, shard_sequence(leaves[3].grad, -2, **how))
    elif form == "one row":
        dist.all_reduce(given.grad)
        torch.testing.assert_close(given.grad, leaves[3].grad)


LAYOUTS = ("zigzag", "contiguous", "head-tail")
FORMS = (*WHOLE, "one row", "one row of each rank", "unlike heads", "unlike rows")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", ["ring_attention", "ulysses_attention"])
def test_masks_of_ranks(function: str, form: str, count: int) -> None:
    """The lengths leave ranks with no row, with one, or with more. Layouts take turns, so that two and three
    ranks have different ones of the same form and length.
    """
    for place, length in enumerate((1, 2, 3, 5, 17), FORMS.index(form) + count):
        ranks(count)(attend, function, length, LAYOUTS[place % len(LAYOUTS)], form)
