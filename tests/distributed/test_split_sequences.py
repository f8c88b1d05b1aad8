"""Packed sequences that are split over processes, against one process that has all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import turns
from processes import ranks

from selfattn_ext import varlen_attention
from selfattn_ext.distributed import ring_varlen_attention, shard_sequence, unshard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

#: Unlike lengths, empty ones, and such as are shorter than pieces.
LENGTHS = (37, 0, 1, 64, 9, 130, 3)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "window_size": (20, 0), "softcap": 2.0},
    {"window_size": (5, 9)},
    {"is_causal": True, "slopes": True, "sinks": True},
    {"dropout_p": 0.3, "slopes": True},
    {"mask": "float", "is_causal": True, "slopes of each": True, "sinks": True},
    {"mask": "bool", "window_size": (20, 3), "dropout_p": 0.2},
]
#: What each sequence of a batch has for itself: its own slopes, mask and pattern of dropout.
ALONE = OPTIONS[5:]


def masks_of(mask: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    """As one process takes them: of each sequence its own rows and keys."""
    return [mask[:, begin:end, : end - begin] for begin, end in pairwise(starts.tolist())]


def compare(options: dict[str, Any], layout: Any, rotate: Any, dtype: torch.dtype) -> None:
    """On a rank: its rows, and the gradients of all ranks together."""
    options = dict(options)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    total, longest = sum(LENGTHS), max(LENGTHS)
    whole = [normal(total, 4, 8), normal(total, 2, 8), normal(total, 2, 5)]
    extra = {}
    if options.pop("slopes", False):
        extra["alibi_slopes"] = normal(4)
    if options.pop("slopes of each", False):
        extra["alibi_slopes"] = normal(len(LENGTHS), 4)
    if options.pop("sinks", False):
        extra["sinks"] = normal(4)
    kind = options.pop("mask", None)
    # Rows of all sequences by keys of their own; what is beyond these must not matter.
    mask = None if kind is None else normal(1 if kind == "bool" else 4, total, longest)
    if kind == "bool":
        mask = mask > -0.5
    torch.manual_seed(3)
    expected, lse = varlen_attention(
        *whole, starts, starts, longest, longest, None if mask is None else masks_of(mask, starts),
        enable_gqa=True, return_lse=True, **options, **extra,
    )  # fmt: skip
    cotangents = normal(*expected.shape).detach(), normal(*lse.shape).detach()
    masks = [mask] if kind == "float" else []
    leaves = [*whole, *masks, *extra.values()]
    of_whole = torch.autograd.grad([expected, lse], leaves, [cotangents[0], cotangents[1].to(lse.dtype)])

    def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return shard_sequence(tensor.detach(), dim, layout=layout, cu_seqlens=starts)

    own = [part(tensor).requires_grad_() for tensor in whole]
    shared = {name: tensor.detach().requires_grad_() for name, tensor in extra.items()}
    own_mask = None if mask is None else part(mask, 1)
    own_masks = [own_mask.requires_grad_()] if kind == "float" else []
    torch.manual_seed(3)
    out, own_lse = ring_varlen_attention(
        *own,
        starts,
        own_mask,
        enable_gqa=True,
        layout=layout,
        rotate=rotate,
        return_lse=True,
        **options,
        **shared,
    )
    given = [part(cotangents[0]), part(cotangents[1], 1).to(own_lse.dtype)]
    grads = torch.autograd.grad([out, own_lse], [*own, *own_masks, *shared.values()], given)
    close = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(out, part(expected), **close)
    torch.testing.assert_close(own_lse, part(lse, 1), **close)
    for found, wanted in zip(grads[:3], of_whole[:3], strict=True):
        torch.testing.assert_close(found, part(wanted), **close)
    if own_masks:
        torch.testing.assert_close(grads[3], part(of_whole[3], 1), **close)
    for found, wanted in zip(grads[3 + len(masks) :], of_whole[3 + len(masks) :], strict=True):
        dist.all_reduce(found)
        torch.testing.assert_close(found, wanted, **close)
    back = unshard_sequence(out.detach(), 0, layout=layout, cu_seqlens=starts)
    torch.testing.assert_close(back, expected.detach(), **close)


@pytest.mark.parametrize(
    ("layout", "rotate"), [("zigzag", "p2p"), ("contiguous", "p2p"), ("zigzag", "allgather")]
)
def test_results_of_one_process(layout: str, rotate: str) -> None:
    for options in (OPTIONS[0], OPTIONS[2], OPTIONS[4], *(ALONE if layout == "zigzag" else ALONE[1:2])):
        ranks(2)(compare, options, layout, rotate, torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", turns.chosen([torch.float64, torch.float32]), ids=str)
@pytest.mark.parametrize("rotate", ["p2p", "allgather"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_and_way(options: dict[str, Any], layout: str, rotate: str, dtype: torch.dtype) -> None:
    for count in (1, 2, 3):
        if layout == "zigzag" or "dropout_p" not in options or count == 1:
            ranks(count)(compare, options, layout, rotate, dtype)


def test_dropout_wants_pieces_where_it_draws_numbers() -> None:
    for outcome in ranks(2).outcomes(compare, OPTIONS[5], "contiguous", "p2p", torch.float64):
        with pytest.raises(ValueError, match="dropout needs pieces that begin at multiples of 4 rows"):
            raise outcome


def wrong_mask(mask: torch.Tensor) -> None:
    rows = shard_sequence(torch.zeros(24, 2, 8), 0, cu_seqlens=WRONG_STARTS)
    ring_varlen_attention(rows, rows, rows, WRONG_STARTS, mask)


WRONG_STARTS = torch.tensor([0, 8, 24])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(12, 24), r"attn_mask of shape \(12, 24\) does not broadcast to \(2, 12, 16\)"),
        (torch.zeros(2, 1, 12, 16), r"does not broadcast to \(2, 12, 16\)"),
        (torch.zeros(12, 16, dtype=torch.int64), r"attn_mask must be bool \(True = attend\) or float64"),
    ],
    ids=["keys of all sequences", "four dimensions", "integers"],
)
def test_masks_that_do_not_fit(mask: torch.Tensor, message: str) -> None:
    for outcome in ranks(2).outcomes(wrong_mask, mask):
        with pytest.raises((ValueError, TypeError), match=message):
            raise outcome
