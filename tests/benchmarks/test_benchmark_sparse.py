"""benchmarks/sparse_attention.py at a small size."""

from __future__ import annotations

import re

import pytest
import sparse_attention
import torch
from sparse_attention import Shape

from selfattn_ext.bench.timer import Effort

SHAPE = Shape(heads=4, kv_heads=2, queries=70, keys=70, head_dim=16)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["blocks", "causal blocks", "keys"])
def test_contenders_compute_the_same(kind: str, backward: bool) -> None:
    if kind == "keys":
        selection = sparse_attention.keys(SHAPE, 9)
    else:
        selection = sparse_attention.blocks(SHAPE, 16, 2, kind == "causal blocks")
    found = {
        name: call()
        for name, call in sparse_attention.calls_of(SHAPE, torch.float64, selection, backward).items()
    }
    assert set(found) == {"sparse", "ours", "torch"}
    for name in ("ours", "torch"):
        torch.testing.assert_close(found[name], found["sparse"], msg=name)


def test_selections_have_the_size_that_was_asked_for() -> None:
    of_blocks = sparse_attention.blocks(SHAPE, 16, 2, False).mask
    assert (of_blocks.sum(-1) >= 16 + 70 % 16).all()
    assert of_blocks.triu(1).any()
    of_blocks = sparse_attention.blocks(SHAPE, 16, 2, True).mask
    assert of_blocks.shape == (1, 4, 70, 70)
    assert of_blocks.diagonal(dim1=-2, dim2=-1).all()  # each query's own block
    assert not of_blocks.triu(1).any()
    assert (of_blocks[..., 32:, :].view(1, 4, 38, 70).sum(-1) > 16).all()  # and one before it, in full
    of_keys = sparse_attention.keys(SHAPE, 9).mask
    assert (of_keys.sum(-1) == 9).all()


def test_all_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(sparse_attention, "QUICK", Effort(seconds=0.0, min_rounds=1))
    sizes = {"length": 40, "block-size": 8, "selected": 2, "queries": 2, "keys": 50, "selected-keys": 5}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    given += ["--quick", "--head-dims", "8", "--threads", "1", "--dtypes", "float32"]
    assert sparse_attention.main(given) == 0
    printed = capsys.readouterr().out
    assert "2 of 5 blocks of 8 keys per query, 40 tokens" in printed
    assert "2 of 5 blocks of 8 keys per query, causal, 40 tokens, 8 query heads, 2 key-value heads" in printed
    assert "5 of 50 keys per query, 2 queries" in printed
    assert len(re.findall(r"^ *8 +float32 +1 +f(?:\+b)? +[\d. to]+$", printed, re.M)) == 6
