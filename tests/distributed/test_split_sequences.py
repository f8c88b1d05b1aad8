"""Packed sequences that are split over processes, against one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
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
]


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
    if options.pop("sinks", False):
        extra["sinks"] = normal(4)
    expected, lse = varlen_attention(
        *whole, starts, starts, longest, longest, enable_gqa=True, return_lse=True, **options, **extra
    )
    cotangents = normal(*expected.shape).detach(), normal(*lse.shape).detach()
    leaves = [*whole, *extra.values()]
    of_whole = torch.autograd.grad([expected, lse], leaves, [cotangents[0], cotangents[1].to(lse.dtype)])

    def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return shard_sequence(tensor.detach(), dim, layout=layout, cu_seqlens=starts)

    own = [part(tensor).requires_grad_() for tensor in whole]
    shared = {name: tensor.detach().requires_grad_() for name, tensor in extra.items()}
    out, own_lse = ring_varlen_attention(
        *own, starts, enable_gqa=True, layout=layout, rotate=rotate, return_lse=True, **options, **shared
    )
    given = [part(cotangents[0]), part(cotangents[1], 1).to(own_lse.dtype)]
    grads = torch.autograd.grad([out, own_lse], [*own, *shared.values()], given)
    close = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(out, part(expected), **close)
    torch.testing.assert_close(own_lse, part(lse, 1), **close)
    for found, wanted in zip(grads[:3], of_whole[:3], strict=True):
        torch.testing.assert_close(found, part(wanted), **close)
    for found, wanted in zip(grads[3:], of_whole[3:], strict=True):
        dist.all_reduce(found)
        torch.testing.assert_close(found, wanted, **close)
    back = unshard_sequence(out.detach(), 0, layout=layout, cu_seqlens=starts)
    torch.testing.assert_close(back, expected.detach(), **close)


@pytest.mark.parametrize(
    ("layout", "rotate"), [("zigzag", "p2p"), ("contiguous", "p2p"), ("zigzag", "allgather")]
)
def test_results_of_one_process(layout: str, rotate: str) -> None:
    for options in (OPTIONS[0], OPTIONS[2], OPTIONS[4]):
        ranks(2)(compare, options, layout, rotate, torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rotate", ["p2p", "allgather"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_and_way(options: dict[str, Any], layout: str, rotate: str, dtype: torch.dtype) -> None:
    for count in (1, 2, 3):
        ranks(count)(compare, options, layout, rotate, dtype)
