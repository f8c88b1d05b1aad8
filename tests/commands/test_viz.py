"""Heatmaps: contents, labels and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from selfattn_ext import viz

TOKENS = ["the", "cat", "sat", "down"]


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def make_weights(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.softmax(torch.randn(shape), dim=-1)


def drawn(ax: Any) -> np.ndarray:
    """Returns the matrix in the picture."""
    mesh = ax.collections[0]
    return np.asarray(mesh.get_array()).reshape(mesh.get_coordinates().shape[0] - 1, -1)


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def test_one_head_shows_the_weights_and_the_tokens() -> None:
    weights = make_weights(4, 4)
    ax = viz.plot_attention(weights, TOKENS, title="head 3")
    np.testing.assert_array_equal(drawn(ax), weights.cpu().numpy())
    assert labels(ax.xaxis) == labels(ax.yaxis) == TOKENS
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("head 3", "key", "query")
    assert ax.get_ylim() == (4, 0)  # query 0 is the top row
    assert ax.collections[0].norm.vmin == 0
    assert len(ax.figure.axes) == 2  # the picture and its scale
    assert [text.get_text() for text in ax.texts] == [
        f"{weight:.2f}" for weight in weights.flatten().tolist()
    ]


def test_options_of_one_head() -> None:
    figure, ax = plt.subplots()
    weights = make_weights(2, 3)
    options = {"cmap": "magma", "vmin": None, "vmax": 1, "colorbar": False, "annotate": False}
    returned = viz.plot_attention(weights, ["a", "b"], key_tokens=list("xyz"), ax=ax, **options)
    assert returned is ax
    assert figure.axes == [ax]
    assert labels(ax.xaxis) == ["x", "y", "z"]
    mesh = ax.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (weights.min(), 1)
    assert mesh.cmap.name == "magma"
    assert not ax.texts


@pytest.mark.parametrize(
    "convert",
    [
        lambda w: w.double(),
        lambda w: w.bfloat16().requires_grad_(),
        lambda w: w[None, None],
        lambda w: w.cpu().numpy(),
        lambda w: w.tolist(),
        lambda w: w.T.contiguous().T,
    ],
    ids=["float64", "bfloat16 with a graph", "leading ones", "numpy", "lists", "strided"],
)
def test_forms_of_weights(convert: Callable[[torch.Tensor], Any]) -> None:
    given = convert(make_weights(3, 3))
    numbers = given.detach().double().cpu() if isinstance(given, torch.Tensor) else given
    np.testing.assert_array_equal(drawn(viz.plot_attention(given)), np.squeeze(numbers))


def test_labels_are_text() -> None:
    ax = viz.plot_attention(make_weights(4, 4), ["$x$", "\n", "  ", "a\tb"])
    assert labels(ax.xaxis) == ["$x$", "↵", "␣␣", "a⇥b"]
    assert not any(tick.get_parse_math() for tick in ax.get_xticklabels())


def test_many_labels_are_thinned() -> None:
    ax = viz.plot_attention(make_weights(100, 100), [str(i) for i in range(100)])
    shown = labels(ax.xaxis)
    assert len(shown) <= 50
    assert [float(tick) for tick in shown] == [x - 0.5 for x in ax.get_xticks()]


def test_heads_share_one_scale() -> None:
    weights = make_weights(1, 5, 4, 4)
    figure = viz.plot_heads(weights, TOKENS, title="all heads")
    pictures = [ax for ax in figure.axes if ax.get_title().startswith("head")]
    assert [ax.get_title() for ax in pictures] == [f"head {h}" for h in range(5)]
    for h, ax in enumerate(pictures):
        np.testing.assert_array_equal(drawn(ax), weights[0, h].cpu().numpy())
        assert (ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) == (0, weights.max())
    # Labels stand at the left and lower edges; the last of 3 columns has no second row.
    assert [bool(labels(ax.yaxis)) for ax in pictures] == [True, False, False, True, False]
    assert [bool(labels(ax.xaxis)) for ax in pictures] == [False, False, True, True, True]
    assert figure.get_suptitle() == "all heads"


def test_chosen_heads_and_columns() -> None:
    weights = make_weights(5, 2, 2)
    figure = viz.plot_heads(weights, heads=[4, 1], columns=1)
    pictures = [ax for ax in figure.axes if ax.get_title().startswith("head")]
    assert [ax.get_title() for ax in pictures] == ["head 4", "head 1"]
    np.testing.assert_array_equal(drawn(pictures[0]), weights[4].cpu().numpy())
    assert pictures[0].get_position().y0 > pictures[1].get_position().y1


@pytest.mark.parametrize("as_list", [False, True])
def test_layers_are_rows(as_list: bool) -> None:
    weights = make_weights(2, 3, 4, 4)
    given = [layer.unsqueeze(0) for layer in weights] if as_list else weights
    figure = viz.plot_layers(given, TOKENS, layers=[1, 0], heads=[0, 2])
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert titles == ["layer 1 head 0", "layer 1 head 2", "layer 0 head 0", "layer 0 head 2"]
    np.testing.assert_array_equal(drawn(figure.axes[1]), weights[1, 2].cpu().numpy())


def test_layers_with_different_numbers_of_heads() -> None:
    figure = viz.plot_layers([make_weights(1, 2, 2), make_weights(3, 2, 2)])
    assert sum(bool(ax.get_title()) for ax in figure.axes) == 4


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_save(tmp_path: Path, suffix: str) -> None:
    path = viz.save(viz.plot_attention(make_weights(4, 4), TOKENS), tmp_path / "new" / f"picture.{suffix}")
    assert path == tmp_path / "new" / f"picture.{suffix}"
    assert path.read_bytes().lstrip()[:5] in (b"\x89PNG\r", b"<?xml")
    assert not plt.get_fignums()
    figure = viz.plot_heads(make_weights(2, 4, 4))
    viz.save(figure, str(path), close=False)
    assert plt.get_fignums() == [figure.number]


@pytest.mark.parametrize("missing", ["seaborn", "matplotlib.pyplot"])
@pytest.mark.parametrize("draw", [viz.plot_attention, viz.plot_heads, viz.plot_layers])
def test_missing_extra_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, missing: str, draw: Callable[[Any], Any]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    weights = make_weights(2, 2, 3, 3)
    if draw is not viz.plot_layers:
        weights = weights[0, 0] if draw is viz.plot_attention else weights[0]
    with pytest.raises(ImportError, match=r"pip install 'selfattn_ext\[viz\]'"):
        draw(weights)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            ValueError,
            r"weights must be \(L, S\).*got \(2, 3, 3\); plot_heads",
            lambda: viz.plot_attention(make_weights(2, 3, 3)),
        ),
        (ValueError, r"got \(3,\)", lambda: viz.plot_attention(make_weights(3))),
        (ValueError, "no empty dimension", lambda: viz.plot_attention(torch.zeros(3, 0))),
        (ValueError, r"weights must be \(H, L, S\)", lambda: viz.plot_heads(make_weights(2, 2, 3, 3))),
        (ValueError, r"weights must be \(N, H, L, S\)", lambda: viz.plot_layers(make_weights(2, 3, 3))),
        (
            ValueError,
            r"weights\[1\] must be \(H, L, S\)",
            lambda: viz.plot_layers([make_weights(1, 2, 2), make_weights(2, 2)]),
        ),
        (
            ValueError,
            r"same \(L, S\)",
            lambda: viz.plot_layers([make_weights(1, 2, 2), make_weights(1, 3, 3)]),
        ),
        (TypeError, "an array or nested lists of numbers", lambda: viz.plot_attention("weights")),
        (TypeError, "real", lambda: viz.plot_attention(torch.zeros(2, 2, dtype=torch.complex64))),
        (
            ValueError,
            "tokens must have one label for",
            lambda: viz.plot_attention(make_weights(3, 3), TOKENS),
        ),
        (ValueError, "key_tokens must", lambda: viz.plot_heads(make_weights(1, 2, 3), key_tokens=TOKENS)),
        (
            TypeError,
            r"tokens must be strings, but tokens\[1\] is int 2",
            lambda: viz.plot_attention(make_weights(2, 2), ["1", 2]),
        ),
        (
            ValueError,
            r"heads\[1\] must lie in 0\.\.1, got 2",
            lambda: viz.plot_heads(make_weights(2, 3, 3), heads=[0, 2]),
        ),
        (
            TypeError,
            r"heads\[0\] must be an int, got float 1.0",
            lambda: viz.plot_heads(make_weights(2, 3, 3), heads=[1.0]),
        ),
        (ValueError, "layers must name", lambda: viz.plot_layers(make_weights(2, 1, 3, 3), layers=[])),
        (ValueError, "columns must be at least", lambda: viz.plot_heads(make_weights(2, 3, 3), columns=0)),
    ],
)
def test_errors(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()
