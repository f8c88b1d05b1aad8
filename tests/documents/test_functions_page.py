"""The picture of docs/functions.md is the one that its example draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from pages import ROOT, blocks

from selfattn_ext.viz import mask_picture

PICTURE = ROOT / "docs" / "pictures" / "masks.png"


def kinds(path: Path) -> np.ndarray:
    """Returns the index of the colour of every fourth pixel among the colours of cells, or -1."""
    colours = np.array([to_rgb(colour) for colour in mask_picture._COLOURS])
    distance = np.abs(imread(path)[::2, ::2, None, :3] - colours).max(-1)
    return np.where(distance.min(-1) < 0.02, distance.argmin(-1), -1)


def test_the_committed_picture_is_what_the_example_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters and lines are left out, because they differ between versions of matplotlib."""
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("docs/functions.md") if '"masks.png"' in block.code]
    block.run()
    drawn, committed = kinds(tmp_path / "masks.png"), kinds(PICTURE)
    assert {*np.unique(drawn)} == {-1, 0, 1, 2, 3}
    assert drawn.shape == committed.shape
    assert ((drawn != committed) & (drawn >= 0) & (committed >= 0)).mean() < 0.004
