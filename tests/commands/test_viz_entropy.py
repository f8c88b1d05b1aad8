"""Pictures of entropy: means over rows, layers with different numbers of heads, and refusals."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from selfattn_ext import (
    AuxOutput,
    AuxRequest,
    MultiHeadSelfAttention,
    SelfAttention,
    collect_statistics,
    viz,
)


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def drawn(ax: Any) -> Any:
    """Returns the matrix in the picture, with a mask where cells are blank."""
    mesh = ax.collections[0]
    return mesh.get_array().reshape(mesh.get_coordinates().shape[0] - 1, -1)


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def layer(*shape: int, **options: Any) -> AuxOutput:
    return AuxOutput(entropy=torch.rand(shape, **options))


def test_a_model_shows_the_means_of_its_heads() -> None:
    """The means are over the rows of all calls, each of which counts alike, by the formula of entropy."""
    model = torch.nn.Sequential(MultiHeadSelfAttention(32, 4), MultiHeadSelfAttention(32, 4))
    long, short = torch.randn(2, 6, 32), torch.randn(1, 3, 32)
    with collect_statistics(model, AuxRequest(entropy=True)) as statistics:
        model(long)
        model(short)
    ax = viz.plot_entropy(statistics, title="two layers")
    rows: list[list[torch.Tensor]] = [[], []]
    for x in (long, short):
        for one, found in zip(model, rows, strict=True):
            x, weights = one(x, return_weights=True)
            found.append(-(weights * weights.log()).sum(-1).transpose(0, 1).flatten(1))
    expected = torch.stack([torch.cat(found, 1).mean(1) for found in rows])
    np.testing.assert_allclose(drawn(ax).data, expected.detach().cpu().numpy(), rtol=1e-5)
    assert (labels(ax.yaxis), labels(ax.xaxis)) == (["0", "1"], list("0123"))
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("two layers", "head", "layer")
    assert ax.get_ylim() == (2, 0)  # the first layer is the upper row
    assert ax.figure.axes[1].get_ylabel() == "entropy (nats)"


def test_means_are_of_float64() -> None:
    """In float32 the sum of these rows would lose the small ones."""
    entropy = torch.tensor([2.0**25, *[1.0] * 7]).reshape(1, 1, 8)
    ax = viz.plot_entropy({"only": [AuxOutput(entropy=entropy)]})
    assert drawn(ax).tolist() == [[2.0**22 + 7 / 8]]


def test_rows_without_keys_count_and_rows_that_are_not_finite_do_not() -> None:
    entropy = torch.tensor([[[1.0, 0.0, 2.0, math.nan], [math.inf, math.nan, -math.inf, math.nan]]])
    shown = drawn(viz.plot_entropy({"only": [AuxOutput(entropy=entropy)]}))
    assert shown.tolist() == [[1.0, None]]


@pytest.mark.filterwarnings("error")
def test_heads_that_a_layer_does_not_have_stay_blank() -> None:
    statistics = {"a.$x$": [layer(2, 3, 5)], "b": layer(2, 1, 5), "c": [layer(1, 2, 4, dtype=torch.float64)]}
    ax = viz.plot_entropy(statistics)
    shown = drawn(ax)
    assert shown.mask.tolist() == [[False] * 3, [False, True, True], [False, False, True]]
    assert shown[1, 0] == pytest.approx(statistics["b"].entropy.mean().item())
    assert labels(ax.yaxis) == ["a.$x$", "b", "c"]
    assert len(ax.texts) == 6  # a number in each cell that is not blank
    ax.figure.canvas.draw()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    entropy = torch.rand(14, 3, dtype=dtype, requires_grad=True)
    ax = viz.plot_entropy(entropy)
    np.testing.assert_array_equal(drawn(ax), entropy.detach().double().cpu().numpy())
    assert labels(ax.yaxis) == [str(number) for number in range(0, 14, 2)]
    assert not ax.texts
    assert (ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) == (0, entropy.max().item())


def test_options() -> None:
    figure, ax = plt.subplots()
    entropy = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    options = {"cmap": "magma", "vmin": None, "vmax": 4, "colorbar": False, "annotate": False}
    assert viz.plot_entropy(entropy, ax=ax, **options) is ax
    assert figure.axes == [ax]
    mesh = ax.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax, mesh.cmap.name) == (1, 4, "magma")
    assert drawn(ax).mask.tolist() == [[False, False], [False, True]]
    assert not ax.texts


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, 0.5, math.nan])
def test_equal_entropies(value: float) -> None:
    ax = viz.plot_entropy(torch.full((2, 3), value), vmin=None)
    ax.figure.canvas.draw()
    lowest = 0.0 if math.isnan(value) else value
    assert (ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) == (lowest, lowest + 1)


@pytest.mark.parametrize(("layers", "aspect"), [(4, 1.0), (1, "auto")])
def test_cells_are_squares_unless_a_row_would_be_too_thin(layers: int, aspect: Any) -> None:
    assert viz.plot_entropy(torch.rand(layers, 40)).get_aspect() == aspect


def test_nothing_is_cut_off() -> None:
    names = [f"model.layers.{number}.self_attn" for number in range(3)]
    ax = viz.plot_entropy({name: [layer(1, 2, 3)] for name in names}, title="many words " * 9)
    figure = ax.figure
    figure.canvas.draw()
    assert "\n" in ax.get_title()
    page, inside = figure.bbox_inches, figure.get_tightbbox()
    assert (page.min <= inside.min).all()
    assert (inside.max <= page.max).all()


@pytest.mark.parametrize("missing", ["seaborn", "matplotlib.pyplot"])
def test_missing_extra_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'selfattn_ext\[viz\]'"):
        viz.plot_entropy(torch.rand(2, 2))


def test_statistics_without_entropy_are_refused() -> None:
    model = MultiHeadSelfAttention(32, 4)
    with collect_statistics(model, AuxRequest(lse=True)) as statistics:
        model(torch.randn(2, 6, 32))
    with pytest.raises(ValueError, match=r"layer '' have no entropy; .*AuxRequest\(entropy=True\)"):
        viz.plot_entropy(statistics)


def test_a_layer_without_heads_is_refused() -> None:
    """Its entropy (B, L) would look like that of B heads."""
    model = SelfAttention(32)
    with collect_statistics(model) as statistics:
        model(torch.randn(2, 6, 32))
    with pytest.raises(ValueError, match=r"layer '' must be \(B, H, L\).*got \[\(2, 6\)\]"):
        viz.plot_entropy(statistics)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "at least one layer, got none", lambda: viz.plot_entropy({})),
        (ValueError, "layer 'a' have no entropy", lambda: viz.plot_entropy({"a": []})),
        (
            ValueError,
            "layer 'a' have no entropy",
            lambda: viz.plot_entropy({"a": [layer(1, 2, 3), AuxOutput(lse=torch.rand(1, 2, 3))]}),
        ),
        (
            ValueError,
            r"the same H in all calls, got \[\(1, 2, 3\), \(1, 4, 3\)\]",
            lambda: viz.plot_entropy({"a": [layer(1, 4, 3), layer(1, 2, 3)]}),
        ),
        (ValueError, r"\(layers, heads\), .*got \(2, 3, 4\)", lambda: viz.plot_entropy(torch.rand(2, 3, 4))),
        (ValueError, r"neither of them 0, got \(3, 0\)", lambda: viz.plot_entropy(torch.rand(3, 0))),
        (
            TypeError,
            r"floating-point tensor.*torch\.int64",
            lambda: viz.plot_entropy(torch.zeros(2, 3).long()),
        ),
        (TypeError, r"torch\.complex64", lambda: viz.plot_entropy(torch.zeros(2, 3, dtype=torch.complex64))),
        (TypeError, "torch.from_numpy makes", lambda: viz.plot_entropy(np.zeros((2, 3)))),
        (TypeError, "what collect_statistics yields.*got list", lambda: viz.plot_entropy([[1.0, 2.0]])),
    ],
)
def test_errors(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()
