"""Split attention has one process's results and gradients, with every option and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import turns
from cases import STATISTICS, Case, Judge, cotangents_of, gradients, statistics_of
from processes import ranks
from torch import Tensor
from torch.distributed import init_device_mesh

from selfattn_ext import distributed

# One group keeps these tests in one process, which starts its ranks once.
pytestmark = pytest.mark.xdist_group("split_attention")

SMALL = Case(queries=37, keys=37, head_dim=8, value_dim=5, lse=True, dtype=torch.float64)

#: Calls to be split, which together have all options.
CASES = [
    dataclasses.replace(SMALL, **options, statistics=number % 4 != 2)
    for number, options in enumerate(
        (
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
ROWS |= dict.fromkeys(("max_scores", "entropy", "mean_score", "key_weights"), 2)


def split_results(case: Case, way: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on a rank; returns a case's results and gradients, those of all ranks joined."""
    how, inputs = dict(way), case.inputs()
    name = how.pop("name")
    function = distributed.ring_attention if name == "ring" else distributed.ulysses_attention
    steps: list[dict[str, Any]] = [{"layout": how["layout"]}]
    if name == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        how |= {"group": mesh["heads"], "ring_group": mesh["ring"]}
        steps = [{"group": mesh["ring"], **steps[0]}, {"group": mesh["heads"], "layout": "contiguous"}]

    def part(tensor: Tensor, dim: int) -> Tensor:
        for step in steps:
            tensor = distributed.shard_sequence(tensor.detach(), dim, **step)
        return tensor

    def is_whole(name: str) -> bool:
        """Tells whether every rank has the whole tensor."""
        return name not in ROWS or (name == "attn_mask" and inputs[name].size(-2) == 1)

    tensors = {
        name: (tensor.detach() if is_whole(name) else part(tensor, ROWS[name])).requires_grad_(
            tensor.requires_grad
        )
        for name, tensor in inputs.items()
    }
    torch.manual_seed(case.seed)
    out, lse, *aux = function(
        **tensors, **case.numbers(), **how, enable_gqa=case.heads != case.kv_heads, return_lse=True,
        return_aux=STATISTICS if case.statistics else None,
    )  # fmt: skip
    results = {"out": out, "lse": lse}
    for found in aux:
        results |= statistics_of(found)
    whole = {name: each.new_empty(shapes_of(case)[name]) for name, each in results.items()}
    cotangents = {name: part(tensor, 2) for name, tensor in cotangents_of(whole, case.seed).items()}
    found = results | gradients(results, cotangents, tensors)
    for name, tensor in found.items():
        of = name.removeprefix("grad of ")
        if is_whole(of):
            dist.all_reduce(tensor)
            continue
        for step in reversed(steps):
            tensor = distributed.unshard_sequence(tensor.detach(), ROWS[of], **step)
        found[name] = tensor
    return found


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a case's results, in their order."""
    rows = (case.batch, case.heads, case.queries)
    of_rows = dict.fromkeys(("lse", "max_scores", "entropy", "mean_score"), rows)
    return {"out": (*rows, case.value_dim), **of_rows, "key_weights": (*rows[:2], case.keys)}


def check_split(case: Case, way: dict[str, Any], count: int) -> None:
    results, *_ = ranks(count)(split_results, case, way)
    tensors = case.inputs()
    whole = {name: results[name] for name in shapes_of(case) if name in results}
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
