"""Pictures of masks: cells and borders for every kind of mask, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from selfattn_ext import masks, scaled_dot_product_attention, viz
from selfattn_ext.viz import mask_picture

#: The four kinds of cells.
IN_HIDDEN_BLOCK, UNSEEN, SEEN, IN_FULL_BLOCK = range(4)


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def drawn(ax: Any) -> np.ndarray:
    """Returns the cells in the picture."""
    return np.asarray(ax.images[0].get_array())


def seen(ax: Any) -> list[list[bool]]:
    """Returns which pairs a picture without blocks shows as seen."""
    cells = drawn(ax)
    assert set(np.unique(cells)) <= {UNSEEN, SEEN}
    return (cells == SEEN).tolist()


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def borders(ax: Any) -> list[tuple[list[float], list[float]]]:
    """Returns the places of lines, from thin to thick, as (across, down)."""
    lines = []
    for across, down in zip(ax.collections[::2], ax.collections[1::2], strict=True):
        places = [float(segment[0][1]) for segment in across.get_segments()]
        lines.append((places, [float(segment[0][0]) for segment in down.get_segments()]))
    return lines


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def documents() -> BlockMask:
    """Returns the mask of documents of 5, 9 and 4 tokens, in blocks of 4 queries and 6 keys."""
    document = torch.tensor([0] * 5 + [1] * 9 + [2] * 4)

    def same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return document[q] == document[kv]

    return create_block_mask(same, None, None, 18, 18, device=str(document.device), BLOCK_SIZE=(4, 6))


def test_a_mask_function_shows_queries_down_and_keys_across() -> None:
    ax = viz.plot_mask(causal, (3, 5), title="causal")
    assert seen(ax) == [[key <= query for key in range(5)] for query in range(3)]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("causal", "key", "query")
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 5), (3, 0))  # query 0 is the upper row
    assert labels(ax.xaxis) == list("01234")
    assert list(ax.get_yticks()) == [0.5, 1.5, 2.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["hidden", "seen"]


def test_a_mask_function_is_told_the_batch_and_the_head() -> None:
    prefix = torch.tensor([[0, 1], [2, 3]])

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < prefix[b, h]

    ax = viz.plot_mask(mask_mod, (1, 4), batch=1, head=0)
    assert seen(ax) == [[True, True, False, False]]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window_size": (2, 0)},
        {"window_size": (1, -1), "query_offset": 2},
        {"is_causal": True, "window_size": (3, 1), "query_offset": 1},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_options_show_what_attention_does_with_them(options: dict[str, Any], has_mask: bool) -> None:
    mask = torch.rand(5, 7) < 0.6 if has_mask else None
    query, key = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8)
    _, weights = scaled_dot_product_attention(query, key, key, mask, return_weights=True, **options)
    assert seen(viz.plot_mask(mask, None if has_mask else (5, 7), **options)) == (weights[0, 0] > 0).tolist()


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 3, 4, 6), (2, 1, 1, 6), (1, 3, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    visible = torch.rand(shape) < 0.5
    mask = (
        visible if dtype == torch.bool else torch.randn(shape, dtype=dtype).masked_fill(~visible, -torch.inf)
    )
    expected = visible.expand(2, 3, 4, 6)[1, 2]
    assert seen(viz.plot_mask(mask, (4, 6), batch=1, head=2)) == expected.tolist()


@pytest.mark.parametrize("rule", [masks.Causal(2), masks.Window(1, 2)], ids=str)
def test_rules_of_the_package(rule: Any) -> None:
    assert seen(viz.plot_mask(rule, (4, 6))) == rule.visible(4, 6).tolist()


def test_a_block_mask_shows_its_blocks() -> None:
    mask = documents()
    ax = viz.plot_mask(mask)
    cells = drawn(ax)
    counted = [[set(np.unique(cells[y : y + 4, x : x + 6])) for x in (0, 6, 12)] for y in (0, 4, 8, 12, 16)]
    hidden, partial, full = {IN_HIDDEN_BLOCK}, {UNSEEN, SEEN}, {IN_FULL_BLOCK}
    assert counted == [
        [partial, hidden, hidden],
        [partial, partial, partial],
        [partial, full, partial],
        [partial, partial, partial],
        [hidden, hidden, partial],
    ]
    document = np.repeat([0, 1, 2], [5, 9, 4])
    np.testing.assert_array_equal(cells >= SEEN, document[:, None] == document)
    cell_borders, block_borders = borders(ax)
    assert cell_borders == ([*range(19)], [*range(19)])
    assert block_borders == ([0, 4, 8, 12, 16, 18], [0, 6, 12, 18])
    # Numbers stand at the first cell of each block.
    assert (labels(ax.xaxis), labels(ax.yaxis)) == (["0", "6", "12"], ["0", "4", "8", "12", "16"])
    assert len(ax.get_legend().get_texts()) == 4


def test_a_full_block_does_not_ask_the_mask_function() -> None:
    counts, indices = torch.tensor([[[0, 0]]]), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    full, listed = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(
        counts.int(), indices, full.int(), listed.int(), BLOCK_SIZE=2, mask_mod=lambda b, h, q, kv: q < 0
    )
    cells = drawn(viz.plot_mask(mask))
    assert (cells[:2, :2] == IN_FULL_BLOCK).all()
    assert (cells[:2, 2:] == IN_HIDDEN_BLOCK).all()
    assert (cells[2:] == IN_FULL_BLOCK).all()


def test_a_block_mask_and_options() -> None:
    """Pairs that the options hide are hidden; blocks that are not computed stay marked so."""
    alone, both = (drawn(viz.plot_mask(documents(), **options)) for options in ({}, {"is_causal": True}))
    query, key = np.indices((18, 18))
    np.testing.assert_array_equal(both, np.where(key <= query, alone, np.minimum(alone, UNSEEN)))


def test_a_block_mask_of_several_heads() -> None:
    device = str(torch.get_default_device())
    mask = create_block_mask(
        lambda b, h, q, kv: (q - kv).abs() <= h, None, 3, 4, 4, device=device, BLOCK_SIZE=2
    )
    for head in range(3):
        cells = drawn(viz.plot_mask(mask, head=head, batch=5))
        distance = np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
        np.testing.assert_array_equal(cells >= SEEN, distance <= head)


def test_tokens_and_axes() -> None:
    figure, ax = plt.subplots()
    returned = viz.plot_mask(None, (2, 3), tokens=["a", "$b$"], key_tokens=list("xyz"), ax=ax, legend=False)
    assert returned is ax
    assert figure.axes == [ax]
    assert (labels(ax.yaxis), labels(ax.xaxis)) == (["a", "$b$"], ["x", "y", "z"])
    assert ax.get_legend() is None
    assert labels(viz.plot_mask(causal, (2, 2), tokens=["a", "b"]).xaxis) == ["a", "b"]


def test_many_cells_have_no_borders_and_few_numbers() -> None:
    ax = viz.plot_mask(causal, (100, 33))
    assert borders(ax) == []
    assert labels(ax.yaxis) == [str(index) for index in range(0, 100, 16)]
    assert [float(label) for label in labels(ax.yaxis)] == [place - 0.5 for place in ax.get_yticks()]


def test_colours_differ_for_eyes_that_see_none() -> None:
    """Colours are compared by contrast, from the relative luminance of sRGB, both as in WCAG 2.2."""

    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    levels = [luminance(colour) + 0.05 for colour in mask_picture._COLOURS]
    ratios = [lighter / darker for lighter, darker in pairwise(levels)]
    assert min(ratios) > 1.3
    assert min(ratios[1:]) > 1.8  # the ratios of hidden to seen, and of the kinds of blocks


def test_saved(tmp_path: Any) -> None:
    path = viz.save(viz.plot_mask(documents()), tmp_path / "mask.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert not plt.get_fignums()


@pytest.mark.parametrize("missing", ["seaborn", "matplotlib.pyplot"])
def test_missing_extra_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'selfattn_ext\[viz\]'"):
        viz.plot_mask(causal, (2, 2))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, r"sizes must be given as \(L, S\)", lambda: viz.plot_mask(causal)),
        (ValueError, r"sizes must be given", lambda: viz.plot_mask(is_causal=True)),
        (TypeError, r"sizes\[0\] must be an int, got float 3.0", lambda: viz.plot_mask(causal, (3.0, 3))),
        (ValueError, r"sizes must be a pair \(L, S\), got \(3,\)", lambda: viz.plot_mask(causal, (3,))),
        (ValueError, r"at least \(1, 1\), got \(0, 2\)", lambda: viz.plot_mask(causal, (0, 2))),
        (
            ValueError,
            r"those of the mask, \(18, 18\), got \(1, 18\)",
            lambda: viz.plot_mask(documents(), (1, 18)),
        ),
        (ValueError, r"those of the mask, \(2, 3\)", lambda: viz.plot_mask(torch.ones(2, 3), (2, 4))),
        (ValueError, "two to four dimensions", lambda: viz.plot_mask(torch.ones(3), (3, 3))),
        (
            ValueError,
            r"batch must lie in 0\.\.1, got 2",
            lambda: viz.plot_mask(torch.ones(2, 1, 3, 3), batch=2),
        ),
        (ValueError, r"head must lie in 0\.\.1, got -1", lambda: viz.plot_mask(torch.ones(2, 3, 3), head=-1)),
        (TypeError, "or None, got str", lambda: viz.plot_mask("causal", (2, 2))),
        (ValueError, "tokens must have one label for", lambda: viz.plot_mask(causal, (2, 2), tokens=["a"])),
    ],
)
def test_errors(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()
