"""The examples of docs/heatmaps.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from pages import blocks

assert transformers, "this client must be installed"


def test_heatmaps_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights_of_model, entropy_of_model = blocks("docs/heatmaps.md")
    # The second example goes on with the names of the first.
    names = weights_of_model._replace(code=weights_of_model.code + entropy_of_model.code).run()
    assert names["model"].config._attn_implementation == "selfattn_ext"
    for weights in names["attentions"]:
        assert weights.shape == (1, 4, 12, 12)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 12))
        assert not weights.triu(1).any()
    for name in ("layers", "heads", "head", "entropy"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
