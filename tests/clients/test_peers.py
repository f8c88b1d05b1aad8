"""The peers of the benchmarks compute the formula, and refuse the cases that they cannot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import turns

from selfattn_ext.bench.accuracy import truth
from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import results, runner

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = Case(2, 4, 150, 32)
CASES = [
    SMALL,
    replace(SMALL, causal=True),
    replace(SMALL, dtype=torch.bfloat16, causal=True),
    replace(SMALL, dtype=torch.float16),
    replace(SMALL, kv_heads=2),
    replace(SMALL, length=1, keys=190),
    replace(SMALL, window=9, causal=True),
    replace(SMALL, mask="bool"),
    replace(SMALL, mask="gradient"),
    replace(SMALL, value_dim=16),
    replace(SMALL, backward=True, causal=True),
    replace(SMALL, backward=True, graph_kept=True),
]
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: The cases for each peer, and how many of them it computes.
PEERS = {
    "onnxruntime": (CASES, 9),
    "openvino": (CASES, 8),
    "jax": (CASES, 10),
    # Each case is compiled, which takes seconds.
    "flex": ([CASES[2], CASES[5], CASES[7], CASES[10]], 3),
}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("peers").PEERS
    for name in [name for name in sys.modules if name.partition(".")[0] == "peers"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", turns.chosen(list(PEERS)))
def test_a_peer_computes_the_same_or_refuses(name: str, peers: dict[str, Any], one_thread: None) -> None:
    wanted, expected = PEERS[name]
    computed, refused = 0, []
    for case in wanted:
        tensors = inputs(case)
        try:
            call = peers[name].prepare(case, tensors)
        except NotImplementedError as refusal:
            refused.append(f"{case.dtype_name} {case.options()} {case.direction}: {refusal}")
            continue
        exact = truth(case, tensors)
        assert exact is not None
        assert exact.error(case, results(call, case, tensors)) < BOUNDS[case.dtype], case
        runner(call, case, tensors)()
        computed += 1
    assert computed == expected, refused


def test_a_peer_that_is_not_installed_says_how_to_get_it(
    peers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        NotImplementedError, match=r"openvino is not installed: pip install 'selfattn_ext\[bench\]'"
    ):
        peers["openvino"].prepare(SMALL, inputs(SMALL))
