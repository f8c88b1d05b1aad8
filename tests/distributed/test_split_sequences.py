"""Packed sequences split over processes have the results of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import turns
from cases import exact_inputs
from processes import both_raise, ranks
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import varlen_attention
from selfattn_ext.distributed import ring_varlen_attention, shard_sequence, unshard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

#: Different lengths, among them empty sequences and some that are shorter than spans.
LENGTHS = (37, 0, 1, 64, 9, 130, 3)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)

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
#: Options that differ between the sequences of a batch: slopes, masks and patterns of dropout.
ALONE = OPTIONS[5:]


#: The dimension of a rank's rows. The gradients of slopes and sinks are sums over ranks instead.
ROWS = {"out": 0, "lse": 1, "query": 0, "key": 0, "value": 0, "attn_mask": 1}


def drawn(options: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors of all sequences, and the other options. A mask has the rows of all sequences, and each
    row's own sequence's keys; its numbers past these must not matter.
    """
    options = dict(options)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    total, longest = sum(LENGTHS), max(LENGTHS)
    found = {"query": normal(total, 4, 8), "key": normal(total, 2, 8), "value": normal(total, 2, 5)}
    found |= {"grad of out": normal(total, 4, 5), "grad of lse": normal(4, total)}
    if options.pop("slopes", False):
        found["alibi_slopes"] = normal(4)
    if options.pop("slopes of each", False):
        found["alibi_slopes"] = normal(len(LENGTHS), 4)
    if options.pop("sinks", False):
        found["sinks"] = normal(4)
    kind = options.pop("mask", None)
    if kind is not None:
        mask = normal(1 if kind == "bool" else 4, total, longest)
        found["attn_mask"] = mask > -0.5 if kind == "bool" else mask
    return found, options


def results(tensors: dict[str, Tensor], attention: Callable[..., Any]) -> dict[str, Tensor]:
    """Returns the results of attention and the gradients."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
        if not name.startswith("grad of")
    }
    torch.manual_seed(3)
    out, lse = attention(**leaves)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    given = [tensors["grad of out"], tensors["grad of lse"].to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], list(wanted.values()), given)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def of_one_process(tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **extra: Tensor) -> Any:
        masks = None
        if (mask := extra.pop("attn_mask", None)) is not None:
            # Each sequence's mask has its own rows and keys.
            places = pairwise(STARTS.tolist())
            masks = [mask[:, begin:end, : end - begin] for begin, end in places]
        return varlen_attention(
            query, key, value, STARTS, STARTS, max(LENGTHS), max(LENGTHS), masks,
            enable_gqa=True, return_lse=True, **options, **extra,
        )  # fmt: skip

    return results(tensors, attention)


def compare(options: dict[str, Any], layout: Any, rotate: Any, dtype: torch.dtype) -> None:
    """Runs on a rank: its rows, and the gradients of all ranks, are as accurate as one process's."""
    whole, options = drawn(options, dtype)
    exact = of_one_process(exact_inputs(whole), options)
    peer = of_one_process(whole, options)

    def part(tensor: Tensor, dim: int) -> Tensor:
        return shard_sequence(tensor, dim, layout=layout, cu_seqlens=STARTS)

    def attention(query: Tensor, key: Tensor, value: Tensor, **extra: Tensor) -> Any:
        return ring_varlen_attention(
            query, key, value, STARTS, enable_gqa=True, layout=layout, rotate=rotate, return_lse=True,
            **options, **extra,
        )  # fmt: skip

    dims = {name: ROWS.get(name.removeprefix("grad of ")) for name in whole}
    own = {name: tensor if dims[name] is None else part(tensor, dims[name]) for name, tensor in whole.items()}
    found = results(own, attention)
    for name, result in found.items():
        dim = ROWS.get(name)
        if dim is None:
            dist.all_reduce(result)
        else:
            result = unshard_sequence(result, dim, layout=layout, cu_seqlens=STARTS)
        assert_accurate(name, result, exact[name], peer[name], float(exact[name].abs().max()))


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
    says = "dropout needs spans that begin at multiples of 4 rows"
    both_raise(ValueError, says, compare, OPTIONS[5], "contiguous", "p2p", torch.float64)
