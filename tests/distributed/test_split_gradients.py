"""Gradients if ranks have different losses, or want gradients of different tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import ranks
from torch import Tensor

from selfattn_ext import distributed, scaled_dot_product_attention
from selfattn_ext.distributed import shard_sequence, unshard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

SHAPES = {"query": (1, 3, 24, 8), "key": (1, 3, 24, 8), "value": (1, 3, 24, 8), "attn_mask": (1, 3, 24, 24)}
FUNCTIONS = ("ring_attention", "ulysses_attention")


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def loss(results: tuple[Tensor, Tensor], part: str) -> Tensor:
    """Results that ``part`` leaves out have no gradient at all."""
    out, lse = results
    return {"both": out.sin().sum() + lse.sin().sum(), "out": out.sin().sum(), "lse": lse.sin().sum()}[part]


def compare(function: str, wanted: tuple[str, str], parts: tuple[str, str]) -> None:
    """Runs on a rank: the gradients it wants equal one process's, whose loss is the sum of all ranks'."""
    rank, whole = dist.get_rank(), drawn()
    own = {name: shard_sequence(tensor, 2) for name, tensor in whole.items()}
    leaves = wanted[rank].split()
    for name in leaves:
        own[name].requires_grad_()
    results = getattr(distributed, function)(**own, return_lse=True)
    loss(results, parts[rank]).backward()

    for name in SHAPES:
        whole[name].requires_grad_()
    out, lse = scaled_dot_product_attention(**whole, return_lse=True)
    owner = unshard_sequence(torch.full((len(own["query"][0, 0]),), rank), 0)
    of_ranks = [loss((out[:, :, owner == each], lse[:, :, owner == each]), parts[each]) for each in (0, 1)]
    torch.stack(of_ranks).sum().backward()
    for name in leaves:
        torch.testing.assert_close(own[name].grad, shard_sequence(whole[name].grad, 2))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("parts", [("both", "out"), ("both", "lse"), ("lse", "out")])
def test_losses_of_unlike_results(function: str, parts: tuple[str, str]) -> None:
    ranks(2)(compare, function, ("query key value attn_mask",) * 2, parts)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "wanted",
    [("query key", ""), ("", "value"), ("attn_mask", ""), ("query", "key"), ("key value", "attn_mask")],
)
def test_gradients_that_one_rank_wants(function: str, wanted: tuple[str, str]) -> None:
    """The other ranks contribute to these gradients, because their rows see the rank's keys."""
    ranks(2)(compare, function, wanted, ("both", "both"))


def joined(of_rank: int) -> Tensor | None:
    """Runs on a rank; returns the gradient of its part of a sequence, which only one rank wants."""
    part = torch.ones(8, 2, requires_grad=dist.get_rank() == of_rank)
    unshard_sequence(part, 0).sum().backward()
    return part.grad


@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_whole_of_parts_of_which_one_wants_a_gradient(of_rank: int) -> None:
    found = ranks(2)(joined, of_rank)
    assert found[1 - of_rank] is None
    assert torch.equal(found[of_rank], torch.full((8, 2), 2.0))


def second_along(attention: Any, part: Any, losses: Any) -> Tensor:
    """Returns a second derivative, along random numbers, of losses of random numbers' self-attention."""
    generator = torch.Generator().manual_seed(1)
    x, along = (part(torch.randn(1, 2, 25, 8, generator=generator, dtype=torch.float64)) for _ in range(2))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(losses(attention(x, x, x)), x, create_graph=True)
    (second,) = torch.autograd.grad((grad * along).sum(), x)
    return second


def of_loss(out: Tensor, of_rank: int) -> Tensor:
    """The loss of rank 0 is linear, so that out's gradient is a constant there."""
    return out.sum() if of_rank == 0 else out.sin().sum()


def second_of_parts() -> None:
    """Runs on a rank; checks the second derivative of a loss of the whole sequence."""
    rank = dist.get_rank()
    expected = second_along(
        lambda x, *_: x, lambda tensor: tensor, lambda out: of_loss(out, 0) + of_loss(out, 1)
    )
    found = second_along(
        lambda x, *_: unshard_sequence(x, 2),
        lambda tensor: shard_sequence(tensor, 2),
        lambda out: of_loss(out, rank),
    )
    torch.testing.assert_close(found, shard_sequence(expected, 2))


def compare_second(function: str) -> None:
    rank = dist.get_rank()
    owner = unshard_sequence(torch.full_like(shard_sequence(torch.arange(25), 0), rank), 0)

    def of_all(out: Tensor) -> Tensor:
        return of_loss(out[:, :, owner == 0], 0) + of_loss(out[:, :, owner == 1], 1)

    if function == "unshard_sequence":

        def attention(x: Tensor, *_: Tensor) -> Tensor:
            return scaled_dot_product_attention(*3 * (unshard_sequence(x, 2),))[:, :, owner == rank]
    else:
        attention = getattr(distributed, function)
    expected = second_along(scaled_dot_product_attention, lambda tensor: tensor, of_all)
    found = second_along(attention, lambda tensor: shard_sequence(tensor, 2), lambda out: of_loss(out, rank))
    torch.testing.assert_close(found, shard_sequence(expected, 2))


@pytest.mark.parametrize("function", ["ulysses_attention", "unshard_sequence"])
def test_second_derivatives_of_unlike_losses(function: str) -> None:
    ranks(2)(compare_second, function)


def test_second_derivatives_of_a_whole() -> None:
    ranks(2)(second_of_parts)
