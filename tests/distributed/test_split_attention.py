"""Split attention has one process's results and gradients, with every option and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import turns
from cases import Case, Judge, cotangents_of, gradients
from processes import ranks
from torch import Tensor
from torch.distributed import init_device_mesh

from selfattn_ext import distributed
from selfattn_ext.distributed.row_layout import Layout, put_rows

# One group keeps these tests in one process, which starts its ranks once.
pytestmark = pytest.mark.xdist_group("split_attention")

SMALL = Case(queries=37, keys=37, head_dim=8, value_dim=5, lse=True, dtype=torch.float64)

#: Calls to be split, which together have all options.
CASES = [
    dataclasses.replace(SMALL, **options)
    for options in (
        {},
        {"is_causal": True, "heads": 6, "kv_heads": 2},
        {"is_causal": True, "alibi": 1, "sinks": 1, "queries": 64, "keys": 64},
        {"window": (9, 3), "sinks": 2, "heads": 4},
        {"mask": "float", "alibi": 2, "softcap": 1.5},
        {"mask": "float rows", "is_causal": True, "query_offset": 5, "queries": 3, "keys": 50},
        {"mask": "bool keys", "dropout_p": 0.4, "heads": 4, "kv_heads": 1},
        {"window": (-1, 5), "query_offset": -4, "dropout_p": 0.3, "is_causal": True, "batch": 3},
        {"mask": "float square", "heads": 3, "kv_heads": 3, "dropout_p": 0.2, "sinks": 1},
        {"queries": 5, "keys": 0},
        {"queries": 0, "keys": 7},
        {"queries": 1, "keys": 1, "is_causal": True},
        {"dtype": torch.float32, "queries": 130, "keys": 130, "is_causal": True},
        {"dtype": torch.bfloat16, "queries": 130, "keys": 257, "heads": 4, "kv_heads": 2, "sinks": 1},
        {"dtype": torch.float16, "queries": 200, "keys": 200, "window": (40, 0), "is_causal": True},
    )
]

#: The ways to split a sequence, as the functions take them.
WAYS: dict[str, dict[str, Any]] = {
    f"{name} {layout}" + (f" {rotate}" if name == "ring" else ""): {
        "name": name,
        "layout": layout,
        "rotate": rotate,
    }
    for name in ("ring", "ulysses")
    for layout in ("zigzag", "contiguous")
    for rotate in (("p2p", "allgather") if name == "ring" else ("p2p",))
}
BOTH = {"name": "both", "layout": "zigzag", "rotate": "p2p"}

#: The sequence's dimension in the tensors of a case.
ROWS = {"query": 2, "key": 2, "value": 2, "out": 2, "lse": 2, "attn_mask": -2}


def split_results(case: Case, way: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on a rank; returns its part of a case's results and gradients."""
    how = dict(way)
    name = how.pop("name")
    function = distributed.ring_attention if name == "ring" else distributed.ulysses_attention
    if name == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        how |= {"group": mesh["heads"], "ring_group": mesh["ring"]}

    def part(tensor: Tensor, dim: int) -> Tensor:
        if tensor.size(dim) == 1 and dim == -2:
            return tensor.detach()
        if name == "both":
            outer = distributed.shard_sequence(tensor.detach(), dim, group=mesh["ring"], layout=how["layout"])
            return distributed.shard_sequence(outer, dim, group=mesh["heads"], layout="contiguous")
        return distributed.shard_sequence(tensor.detach(), dim, layout=how["layout"])

    tensors = {
        name: (part(tensor, ROWS[name]) if name in ROWS else tensor.detach()).requires_grad_(
            tensor.requires_grad
        )
        for name, tensor in case.inputs().items()
    }
    torch.manual_seed(case.seed)
    out, lse = function(
        **tensors, **case.numbers(), **how, enable_gqa=case.heads != case.kv_heads, return_lse=True
    )
    results = {"out": out, "lse": lse}
    shapes = {"out": (case.batch, case.heads, case.queries, case.value_dim)}
    shapes["lse"] = shapes["out"][:-1]
    whole = {name: torch.empty(shape, dtype=results[name].dtype) for name, shape in shapes.items()}
    cotangents = {name: part(tensor, 2) for name, tensor in cotangents_of(whole, case.seed).items()}
    found = results | gradients(results, cotangents, tensors)
    return {name: tensor.detach() for name, tensor in found.items()}


def joined(parts: list[dict[str, Tensor]], case: Case, way: dict[str, Any]) -> dict[str, Tensor]:
    """Joins tensors of which ranks have parts, and sums tensors that every rank has whole."""
    found = {}
    for name, first in parts[0].items():
        of_ranks = [part[name] for part in parts]
        dim = ROWS.get(name.removeprefix("grad of "))
        if dim is None or (dim == -2 and first.dim() > 1 and case.inputs()["attn_mask"].size(-2) == 1):
            found[name] = torch.stack(of_ranks).sum(0)
            continue
        size = sum(part.size(dim) for part in of_ranks)
        if way["name"] == "both":
            of_ranks = [torch.cat(of_ranks[at : at + 2], dim) for at in (0, 2)]
        layout = Layout(way["layout"], (0, size), len(of_ranks))
        shape = [*first.shape]
        shape[dim] = size
        found[name] = first.new_empty(shape)
        for rank, part in enumerate(of_ranks):
            put_rows(found[name], part, layout, rank, dim)
    return found


def check_split(case: Case, way: dict[str, Any], count: int) -> None:
    results = joined(ranks(count)(split_results, case, way), case, way)
    tensors = case.inputs()
    whole = {name: results[name] for name in ("out", "lse")}
    Judge(case, tensors, cotangents_of(whole, case.seed)).assert_accurate(results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_of_one_process(case: Case) -> None:
    """All options occur, and each way to split with some of the cases."""
    number = CASES.index(case)
    check_split(case, WAYS[[*WAYS][number % len(WAYS)]], 2 + number % 2)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, way: str) -> None:
    for count in turns.chosen((2, 3)):
        check_split(case, WAYS[way], count)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number % 4 == 2 else pytest.mark.thorough)
        for number, case in enumerate(CASES)
    ],
    ids=str,
)
def test_ring_and_heads_together(case: Case) -> None:
    check_split(case, BOTH, 4)
