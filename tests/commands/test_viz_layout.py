"""Layout of pictures: nothing is cut off or covered, and no room is left empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from matplotlib.text import Text

from selfattn_ext import viz

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
LONG = ["internationalization", "is", "characteristically", "uncharacteristic", "of", "straightforwardness"]
CHARACTERS = list("The  quick\n  brown fox\tjumps over a lazy dog MWMW")[:40]


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def weights(*shape: int, causal: bool = True) -> torch.Tensor:
    scores = torch.randn(shape)
    if causal:
        scores = scores.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1)


def shown(figure: Any) -> list[Text]:
    """Returns all texts in a picture."""
    found = [] if figure._suptitle is None else [figure._suptitle]
    for ax in figure.axes:
        found += [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            found += [label for place, label in ticks if low <= place <= high]
        found += [] if ax.get_legend() is None else ax.get_legend().get_texts()
    return [text for text in found if text.get_text().strip()]


def colliding(texts: list[Text]) -> list[tuple[str, str]]:
    """Returns pairs of upright or sideways texts that overlap."""
    texts = [text for text in texts if text.get_rotation() % 90 == 0]
    low, high = (
        np.array([getattr(text.get_window_extent(), end) for text in texts]) for end in ("min", "max")
    )
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    pairs = np.argwhere(np.triu(common.min(-1) > 0.5, 1))
    return [(texts[one].get_text(), texts[other].get_text()) for one, other in pairs]


def pictures(figure: Any) -> list[Any]:
    """Returns the axes with weights, without the colour bar."""
    return [ax for ax in figure.axes if ax.collections and ax.get_ylabel() != "weight"]


DRAWN: dict[str, Callable[[], Any]] = {
    **{f"{n} heads": lambda n=n: viz.plot_heads(weights(n, 9, 9), WORDS) for n in (1, 4, 12)},
    "heads with a long title": lambda: viz.plot_heads(weights(1, 5, 5), title="many words in a title " * 5),
    "heads of sixty": lambda: viz.plot_heads(weights(4, 60, 60), [f"word{i}" for i in range(60)]),
    "heads with long words": lambda: viz.plot_heads(weights(5, 6, 6, causal=False), LONG),
    "heads without words": lambda: viz.plot_heads(weights(4, 300, 300)),
    "heads that cross": lambda: viz.plot_heads(weights(3, 4, 15, causal=False), WORDS[:4]),
    "characters": lambda: viz.plot_layers(weights(2, 2, 40, 40), CHARACTERS, title="the demo"),
    "layers": lambda: viz.plot_layers(weights(2, 4, 12, 12), [f"token{i}" for i in range(12)]),
    "layers of one head": lambda: viz.plot_layers(weights(6, 1, 12, 12)),
    "layers of several numbers of heads": lambda: viz.plot_layers(
        [weights(1, 9, 9), weights(3, 9, 9)], WORDS
    ),
    "one with long words": lambda: viz.plot_attention(weights(6, 6), LONG, title="a title of some words"),
    "one with a long title": lambda: viz.plot_attention(weights(3, 3), title="many words in a title " * 4),
    "one of sixty": lambda: viz.plot_attention(weights(60, 60), [f"word{i}" for i in range(60)]),
    "one row": lambda: viz.plot_attention(weights(1, 60, causal=False), ["the"]),
    "one column": lambda: viz.plot_attention(weights(30, 1, causal=False)),
    "a mask": lambda: viz.plot_mask(is_causal=True, sizes=(9, 9), tokens=WORDS, title="causal"),
    "a mask with long words": lambda: viz.plot_mask(is_causal=True, sizes=(6, 6), tokens=LONG),
    "a large mask": lambda: viz.plot_mask(is_causal=True, sizes=(300, 200)),
    "a row of a mask": lambda: viz.plot_mask(window_size=(40, 0), sizes=(1, 60), query_offset=59),
}


#: Pictures of many cells or pictures, where others of their kind have fewer.
LARGE = ("12 heads", "heads of sixty", "heads without words", "characters", "one of sixty", "a large mask")


@pytest.mark.parametrize(
    "name",
    [name for name in DRAWN if name not in LARGE]
    + [pytest.param(name, marks=pytest.mark.thorough) for name in LARGE],
)
def test_all_texts_are_inside_the_picture_and_apart(name: str) -> None:
    drawing = DRAWN[name]()
    figure = getattr(drawing, "figure", drawing)
    figure.canvas.draw()
    texts = shown(figure)
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text
    assert colliding(texts) == []
    for ax in figure.axes:  # slanted labels run side by side
        slanted = [label for label in ax.get_xticklabels() if label.get_rotation() == 45]
        places = sorted(ax.transData.transform((label.get_position()[0], 0))[0] for label in slanted)
        if len(places) > 1:
            assert np.diff(places).min() * np.sin(np.pi / 4) >= slanted[0].get_fontsize() * figure.dpi / 72
    # No border is wider than a line of text.
    inside = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert max(inside.x0, inside.y0, width - inside.x1, height - inside.y1) < 0.2


@pytest.mark.parametrize(("heads", "empty"), [(5, 1), (8, 0), (10, 2)])
def test_grids_are_close_and_have_few_empty_places(heads: int, empty: int) -> None:
    figure = viz.plot_heads(weights(heads, 9, 9), WORDS)
    boxes = [ax.get_window_extent() for ax in pictures(figure)]
    assert len(boxes) == heads
    places = [sorted({round(box.p0[side]) for box in boxes}) for side in (0, 1)]
    assert len(places[0]) * len(places[1]) == heads + empty
    for starts, size in zip(places, (boxes[0].width, boxes[0].height), strict=True):
        assert max(np.diff(starts)) - size < 0.5 * figure.dpi


def test_the_axes_of_a_grid_are_named_at_its_edges() -> None:
    figure = viz.plot_heads(weights(5, 4, 4), WORDS[:4])
    names = [(ax.get_ylabel(), ax.get_xlabel()) for ax in pictures(figure)]
    assert names == [("query", ""), ("", ""), ("", "key"), ("query", "key"), ("", "key")]


def test_hidden_cells_are_blank_and_explained() -> None:
    given = weights(4, 4)
    given[3, 0] = 1e-4  # seen, and little
    ax = viz.plot_attention(given)
    assert [text.get_text() for text in ax.texts] == [f"{weight:.2f}" for weight in given[given > 0].tolist()]
    np.testing.assert_array_equal(
        ax.collections[0].get_array().mask.reshape(4, 4), (given == 0).cpu().numpy()
    )
    bar = ax.figure.axes[1]
    assert [text.get_text() for text in bar.get_legend().get_texts()] == ["no weight"]
    assert viz.plot_attention(weights(4, 4, causal=False)).figure.axes[1].get_legend() is None


def test_zeros_among_negative_numbers_are_numbers() -> None:
    """Such matrices are learned biases, or differences of two heads."""
    ax = viz.plot_attention([[0.0, -1.0], [1.0, 0.0]], vmin=None)
    assert len(ax.texts) == 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("vmin", [0.0, None])
def test_numbers_that_are_none_are_written_into_their_cells(vmin: float | None) -> None:
    given = torch.tensor([[1.0, 0.0], [torch.nan, torch.inf]])
    for ax in (viz.plot_attention(given, vmin=vmin), pictures(viz.plot_heads(given[None], vmin=vmin))[0]):
        ax.figure.canvas.draw()
        assert (ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) == (0, 1)
        (nan,) = [text for text in ax.texts if text.get_text() == "NaN"]
        assert nan.get_position() == (0.5, 1.5)
    assert viz.plot_attention([[1.0, torch.nan]]).figure.axes[1].get_legend() is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, 0.5, torch.nan])
def test_equal_weights(value: float) -> None:
    figure = viz.plot_heads(torch.full((2, 3, 3), value), vmin=None)
    figure.canvas.draw()
    assert all(ax.collections[0].norm.vmin < ax.collections[0].norm.vmax for ax in pictures(figure))


def test_without_tokens_cells_are_numbered() -> None:
    single, grid = viz.plot_attention(weights(20, 20)), pictures(viz.plot_heads(weights(4, 20, 20)))
    numbers = [str(number) for number in range(0, 20, 4)]
    for ax, queries, keys in ((single, True, True), (grid[1], False, False), (grid[2], True, True)):
        assert [label.get_text() for label in ax.get_yticklabels()] == (numbers if queries else [])
        assert [label.get_text() for label in ax.get_xticklabels()] == (numbers if keys else [])
    assert list(single.get_yticks()) == [number + 0.5 for number in range(0, 20, 4)]


def test_what_sticks_out_of_a_figure_is_saved_too(tmp_path: Path) -> None:
    ax = viz.plot_attention(weights(3, 3))
    as_drawn = imread(viz.save(ax, tmp_path / "as_drawn.png", dpi=100, close=False))
    assert as_drawn.shape[1::-1] == tuple(ax.figure.bbox.size.astype(int))
    ax.set_xlabel("a name that was given after drawing, " * 3)
    changed = imread(viz.save(ax, tmp_path / "changed.png", dpi=100))
    assert changed.shape[0] == as_drawn.shape[0]
    assert changed.shape[1] >= ax.xaxis.label.get_window_extent().width
    assert (changed[:, [0, -1], :3] == 1).all()  # a border without ink


def test_a_mask_has_handles_for_a_legend_of_several() -> None:
    ax = viz.plot_mask(is_causal=True, sizes=(3, 3), legend=False)
    handles, names = ax.get_legend_handles_labels()
    assert names == ["hidden", "seen"]
    assert len({handle.get_facecolor() for handle in handles}) == 2
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 3), (3, 0))
