"""Heatmaps of attention weights: one head, a grid of heads, a grid of layers and heads.

Weights may be a torch tensor (any float dtype and device, with or without a graph), a NumPy array or nested
lists. Rows are queries, columns are keys, as in softmax(Q Kᵀ / √d_k) (Vaswani et al. 2017, "Attention Is All
You Need", https://arxiv.org/abs/1706.03762).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..arguments import checks
from .drawing import labels_of, require
from .layout import BAR, add_legend, arrange, is_square, label_axes, panel_size, placed, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attention", "plot_heads", "plot_layers"]

# A tensor, a NumPy array or nested sequences: anything that torch.as_tensor accepts.
Weights: TypeAlias = Any

# Numbers written into cells are legible up to this many keys.
_MAX_ANNOTATED = 12
# The side of a cell in inches, with a number in it and without one.
_WIDE_CELL, _CELL = 0.42, 0.2
# The longest sides in inches of a single picture, of a picture in a grid, and of a row of pictures.
_LARGEST, _LARGEST_IN_GRID, _WIDEST = 10.0, 5.0, 18.0
# The colour of cells without any weight, which differs from that of every weight on light and dark pages.
_HIDDEN = "#e4e4e7"


def plot_attention(
    weights: Weights,
    tokens: Sequence[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
    cmap: str = "viridis",
    vmin: float | None = 0.0,
    vmax: float | None = None,
    colorbar: bool = True,
    annotate: bool | None = None,
) -> Axes:
    """Draws the attention weights of one head.

    Args:
        weights: (L, S); any number of leading dimensions of size 1 is dropped.
        tokens: L labels of the queries, also those of the keys when L == S and key_tokens is not given.
        key_tokens: S labels of the keys.
        title: written above the picture.
        ax: the axes to draw into; a new figure when not given.
        cmap: a matplotlib colour map.
        vmin, vmax: the weights at the ends of the colour map; None takes them from the data.
        colorbar: whether to draw the scale beside the picture.
        annotate: whether to write the numbers into the cells; by default with at most 12 keys.

    Returns:
        The axes; ``.figure`` is the figure, :func:`save` writes either of them.

    Raises:
        ImportError: matplotlib or seaborn is missing.
        TypeError: the weights are not numbers, or the tokens are not strings.
        ValueError: the weights are not one (L, S) matrix, or the number of labels differs from its size.

    Example:
        >>> import torch
        >>> from selfattn_ext import attention_weights, viz
        >>> tokens = "the cat sat on the mat".split()
        >>> query, key = torch.randn(6, 16), torch.randn(6, 16)
        >>> axes = viz.plot_attention(attention_weights(query, key), tokens, title="one head")
        >>> axes.get_title()
        'one head'
    """
    pyplot, _ = require()
    matrix = _as_array(weights, 2, "weights", "plot_heads draws several heads")
    rows, columns = matrix.shape
    labels = labels_of(tokens, key_tokens, rows, columns)
    if annotate is None:
        annotate = max(rows, columns) <= _MAX_ANNOTATED
    limits = _limits([matrix], vmin, vmax)
    cell = _WIDE_CELL if annotate else _CELL
    size = bar = None
    if ax is None:
        figure = pyplot.figure()
        size = panel_size(rows, columns, cell, 2.0, _LARGEST)
        ax = placed(figure, size)
        bar = placed(figure, BAR) if colorbar else None
    square = size is None or is_square(size, (rows, columns))
    _draw(ax, matrix, cmap, limits, square, annotate)
    if colorbar:
        _explain([ax], bar, "small")
    label_axes(ax, labels, (rows, columns))
    if title is not None:
        ax.set_title(title, fontsize="large")
    if size is not None:
        wrap(ax.title, size[0] + 1.0)
        arrange([[ax]], size, bar=bar)
    return ax


def plot_heads(
    weights: Weights,
    tokens: Sequence[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    columns: int | None = None,
    title: str | None = None,
    cmap: str = "viridis",
    vmin: float | None = 0.0,
    vmax: float | None = None,
) -> Figure:
    """Draws a grid with one picture for each head, all of them in one colour scale.

    Args:
        weights: (H, L, S); any number of leading dimensions of size 1 is dropped.
        tokens, key_tokens, title, cmap, vmin, vmax: as in :func:`plot_attention`.
        heads: which heads to draw, in this order; all of them by default.
        columns: pictures in a row; by default at most 4, chosen so that few places of the last row are empty.

    Returns:
        The figure.

    Raises:
        ImportError, TypeError, ValueError: as for :func:`plot_attention`; ValueError also for a head that
            does not exist and for columns < 1.

    Example:
        >>> import torch
        >>> from selfattn_ext import attention_weights, viz
        >>> query, key = torch.randn(4, 6, 16), torch.randn(4, 6, 16)
        >>> figure = viz.plot_heads(attention_weights(query, key), heads=[0, 3])
    """
    require()
    stack = _as_array(weights, 3, "weights", "plot_attention draws one head, plot_layers several layers")
    chosen = _choose(heads, stack.shape[0], "heads")
    if columns is None:
        columns = _columns(len(chosen))
    elif columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    columns = min(columns, len(chosen))
    cells = [(stack[head], f"head {head}") for head in chosen]
    grid = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    return _draw_grid(grid, tokens, key_tokens, title, cmap, vmin, vmax)


def plot_layers(
    weights: Weights | Sequence[Weights],
    tokens: Sequence[str] | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
    cmap: str = "viridis",
    vmin: float | None = 0.0,
    vmax: float | None = None,
) -> Figure:
    """Draws a grid whose rows are layers and whose columns are heads, all in one colour scale.

    Args:
        weights: (N, H, L, S), or a sequence of N tensors (H, L, S) as a model returns them layer by layer;
            leading dimensions of size 1 are dropped. All layers have the same L and S; their numbers of heads
            may differ.
        tokens, key_tokens, title, cmap, vmin, vmax: as in :func:`plot_attention`.
        layers, heads: which layers and heads to draw, in this order; all by default.

    Returns:
        The figure.

    Raises:
        ImportError, TypeError, ValueError: as for :func:`plot_attention`; ValueError also for layers of
            different L or S and for a layer or head that does not exist.

    Example:
        >>> import torch
        >>> from selfattn_ext import viz
        >>> layers = [torch.rand(4, 6, 6).softmax(-1) for _ in range(2)]  # (heads, L, S) for each layer
        >>> figure = viz.plot_layers(layers)
    """
    require()
    hint = "give (N, H, L, S) or a list of (H, L, S)"
    if isinstance(weights, (list, tuple)) and weights and isinstance(weights[0], torch.Tensor):
        stacks = [_as_array(layer, 3, f"weights[{i}]", hint) for i, layer in enumerate(weights)]
    else:
        stacks = list(_as_array(weights, 4, "weights", hint))
    sizes = {stack.shape[1:] for stack in stacks}
    if len(sizes) > 1:
        raise ValueError(f"weights must have the same (L, S) in all layers, got {sorted(sizes)}")
    grid = [
        [
            (stacks[layer][head], f"layer {layer} head {head}")
            for head in _choose(heads, len(stacks[layer]), "heads")
        ]
        for layer in _choose(layers, len(stacks), "layers")
    ]
    return _draw_grid(grid, tokens, key_tokens, title, cmap, vmin, vmax)


def _as_array(weights: Weights, dims: int, name: str, hint: str) -> Any:
    """Returns the weights as a float32 NumPy array of `dims` dimensions."""
    try:
        tensor = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor, an array or nested lists of numbers: {error}") from error
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    extra = len(shape) - dims
    if extra < 0 or any(size != 1 for size in shape[: max(extra, 0)]) or 0 in shape:
        wanted = "(" + ", ".join("NHLS"[4 - dims :]) + ")"
        raise ValueError(f"{name} must be {wanted} with no empty dimension, got {shape}; {hint}")
    return tensor.detach().reshape(shape[extra:]).to("cpu", torch.float32).numpy()


def _choose(wanted: Sequence[int] | None, count: int, name: str) -> list[int]:
    if wanted is None:
        return list(range(count))
    chosen = checks.integers(name, wanted)
    for place, index in enumerate(chosen):
        if not 0 <= index < count:
            raise ValueError(f"{name}[{place}] must lie in 0..{count - 1}, got {index}")
    if not chosen:
        raise ValueError(f"{name} must name at least one of 0..{count - 1}, got none")
    return chosen


def _columns(pictures: int) -> int:
    """Returns a number of columns that makes the grid square or somewhat wider, with few empty places."""
    if pictures <= 3:
        return pictures
    wide = range(math.ceil(math.sqrt(pictures)), 5)
    return min(wide, key=lambda columns: -pictures % columns, default=4)


def _limits(matrices: Sequence[Any], vmin: float | None, vmax: float | None) -> tuple[float, float]:
    """Returns the weights at the ends of the colour map, which differ even if all weights are the same."""
    finite = [matrix[abs(matrix) < math.inf] for matrix in matrices]
    lowest = (
        float(min((found.min() for found in finite if found.size), default=0.0)) if vmin is None else vmin
    )
    highest = (
        float(max((found.max() for found in finite if found.size), default=0.0)) if vmax is None else vmax
    )
    return lowest, highest if highest != lowest else lowest + 1.0


def _draw(
    ax: Axes,
    matrix: Any,
    cmap: str,
    limits: tuple[float, float],
    square: bool,
    annotate: bool = False,
) -> None:
    """Colours the cells of one head's weights."""
    _, seaborn = require()
    seaborn.heatmap(
        matrix,
        ax=ax,
        # Only hidden keys get a weight of exactly 0.
        mask=(matrix == 0) & ~(matrix < 0).any(),
        cmap=cmap,
        vmin=limits[0],
        vmax=limits[1],
        cbar=False,
        square=square,
        annot=annotate,
        fmt=".2f",
        annot_kws={"fontsize": "small"},
        xticklabels=False,
        yticklabels=False,
    )
    ax.set_facecolor(_HIDDEN)
    for row, column in zip(*(matrix != matrix).nonzero(), strict=True):
        ax.text(column + 0.5, row + 0.5, "NaN", ha="center", va="center", fontsize="x-small")


def _explain(panels: Sequence[Axes], bar: Axes | None, fontsize: str) -> None:
    """Draws the colour bar into its axes, or beside the only picture, and a note about hidden cells."""
    from matplotlib.patches import Rectangle

    figure: Any = panels[0].get_figure()
    meshes: list[Any] = [ax.collections[0] for ax in panels]
    drawn = figure.colorbar(meshes[0], cax=bar, ax=panels[0] if bar is None else None)
    drawn.set_label("weight", fontsize=fontsize)
    drawn.outline.set_visible(False)
    drawn.ax.tick_params(labelsize=fontsize, length=2, pad=2)
    if any((mesh.get_array().data[mesh.get_array().mask] == 0).any() for mesh in meshes):
        drawn.ax.add_patch(Rectangle((0, 0), 0, 0, fc=_HIDDEN, label="no weight"))
        add_legend(drawn.ax, (0, 0), (0, -0.08), fontsize)


def _draw_grid(
    grid: list[list[tuple[Any, str]]],
    tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
    title: str | None,
    cmap: str,
    vmin: float | None,
    vmax: float | None,
) -> Figure:
    """Draws a picture for each (matrix, name) of the grid, labels at its left and lower edge, colour bar."""
    pyplot, _ = require()
    matrices = [matrix for line in grid for matrix, _ in line]
    rows, columns = matrices[0].shape
    labels = labels_of(tokens, key_tokens, rows, columns)
    limits = _limits(matrices, vmin, vmax)
    largest = min(_LARGEST_IN_GRID, _WIDEST / max(map(len, grid)))
    size = panel_size(rows, columns, _CELL, 1.6, largest)
    square = is_square(size, (rows, columns))
    figure = pyplot.figure()

    def drawn(matrix: Any) -> Axes:
        ax = placed(figure, size)
        _draw(ax, matrix, cmap, limits, square)
        ax.set_visible(False)  # until all pictures are drawn, as seaborn draws the whole figure for each
        return ax

    panels = [[drawn(matrix) for matrix, _ in line] for line in grid]
    for y, line in enumerate(grid):
        for x, (_, name) in enumerate(line):
            ax = panels[y][x]
            ax.set_visible(True)
            is_lowest = y + 1 == len(grid) or x >= len(grid[y + 1])
            label_axes(ax, labels, (rows, columns), fontsize="x-small", outer=(x == 0, is_lowest))
            ax.set_title(name, fontsize="small", pad=3)
    bar = placed(figure, BAR)
    _explain([ax for line in panels for ax in line], bar, "x-small")
    arrange(panels, size, bar=bar, title=title)
    return figure
