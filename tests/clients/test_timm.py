"""timm's Vision Transformer on this package's kernels, unchanged."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import ran
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from training import SWITCHES, check

from selfattn_ext import as_sdpa

EXAMPLE = Path(__file__).parents[2] / "examples" / "vit_timm.py"


def model(**options: Any) -> VisionTransformer:
    torch.manual_seed(1)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**size, **options)


def classify(network: nn.Module, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return network(torch.randn(2, 3, 16, 16, generator=generator).to(dtype))


@pytest.mark.parametrize("switch", SWITCHES)
def test_training(switch: Any) -> None:
    check(model(qk_norm=True), classify, switch, layers=2)


def test_training_with_dropout_of_attention() -> None:
    """torch itself computes such a call by its formula."""
    network = model(attn_drop_rate=0.2)
    with as_sdpa():
        assert ran.ours(lambda: classify(network, torch.float32).sum().backward()) == (2, 2)


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 2 --batch 4 --size 16 --dim 16 --depth 1 --heads 2 --compare"
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *words.split()])
    assert ran.ours(lambda: runpy.run_path(str(EXAMPLE), run_name="__main__")) == (3, 2)
    printed = capsys.readouterr().out
    assert "attention by selfattn_ext" in printed
    first, second = re.findall(r"step    2   loss (\d\.\d+)", printed)
    assert float(first) == pytest.approx(float(second), abs=2e-3)
