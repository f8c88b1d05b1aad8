"""The example of docs/heatmaps.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from pages import blocks

assert transformers, "this client must be installed"


def test_heatmaps_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/heatmaps.md")
    names = example.run()
    assert names["model"].config._attn_implementation == "selfattn_ext"
    for weights in names["attentions"]:
        assert weights.shape == (1, 4, 12, 12)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 12))
        assert not weights.triu(1).any()
    for name in ("layers", "heads", "head"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
