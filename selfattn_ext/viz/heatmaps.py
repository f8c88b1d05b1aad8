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

from .drawing import label_axes, labels_of, require, side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attention", "plot_heads", "plot_layers"]

# A tensor, a NumPy array or nested sequences: whatever torch.as_tensor takes.
Weights: TypeAlias = Any

# Numbers written into cells are legible up to this many keys.
_MAX_ANNOTATED = 12


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
        weights: (L, S), any number of leading dimensions of size 1 is dropped.
        tokens: L labels of the queries, also those of the keys when L == S and key_tokens is not given.
        key_tokens: S labels of the keys.
        title: written above the picture.
        ax: the axes to draw into; a new figure when not given.
        cmap: a matplotlib colour map.
        vmin, vmax: the weights at the ends of the colour map; None takes them from the data.
        colorbar: whether to draw the scale beside the picture.
        annotate: whether to write the numbers into the cells; by default with at most 12 keys.

    Returns:
        The axes; `.figure` is the figure, `save` writes either of them.

    Raises:
        ImportError: matplotlib or seaborn is missing.
        TypeError: the weights are not numbers, or the tokens are not strings.
        ValueError: the weights are not one (L, S) matrix, or the number of labels differs from its size.
    """
    pyplot, _ = require()
    matrix = _as_array(weights, 2, "weights", "plot_heads draws several heads")
    rows, columns = matrix.shape
    row_labels, column_labels = labels_of(tokens, key_tokens, rows, columns)
    if ax is None:
        size = (side(columns, 0.42, 3.2, 14.0) + (1.1 if colorbar else 0.0), side(rows, 0.42, 2.6, 14.0))
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    if annotate is None:
        annotate = max(rows, columns) <= _MAX_ANNOTATED
    _draw(ax, matrix, cmap=cmap, vmin=vmin, vmax=vmax, colorbar=colorbar, annotate=annotate)
    label_axes(ax, row_labels, column_labels)
    ax.set(xlabel="key", ylabel="query")
    if title is not None:
        ax.set_title(title)
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
        weights: (H, L, S), any number of leading dimensions of size 1 is dropped.
        tokens, key_tokens, title, cmap, vmin, vmax: as in `plot_attention`.
        heads: which heads to draw, in this order; all of them by default.
        columns: pictures in a row; about the square root of their number by default, at most 4.

    Returns:
        The figure.

    Raises:
        ImportError, TypeError, ValueError: as `plot_attention`; ValueError also for a head that does not
            exist and for columns < 1.
    """
    stack = _as_array(weights, 3, "weights", "plot_attention draws one head, plot_layers several layers")
    chosen = _choose(heads, stack.shape[0], "heads")
    if columns is None:
        columns = min(4, math.ceil(math.sqrt(len(chosen))))
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
            leading dimensions of size 1 are dropped. All layers have the same L and S; the number of heads
            may differ.
        tokens, key_tokens, title, cmap, vmin, vmax: as in `plot_attention`.
        layers, heads: which of them to draw, in this order; all by default.

    Returns:
        The figure.

    Raises:
        ImportError, TypeError, ValueError: as `plot_attention`; ValueError also for layers of different L
            or S and for a layer or head that does not exist.
    """
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
    """The weights as a float32 NumPy array of `dims` dimensions."""
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
    for index in wanted:
        if not 0 <= index < count:
            raise ValueError(f"{name} must lie in 0..{count - 1}, got {index}")
    if not wanted:
        raise ValueError(f"{name} must name at least one of 0..{count - 1}, got none")
    return list(wanted)


def _draw(
    ax: Axes,
    matrix: Any,
    *,
    cmap: str,
    vmin: float | None,
    vmax: float | None,
    colorbar: bool,
    annotate: bool,
) -> None:
    _, seaborn = require()
    seaborn.heatmap(
        matrix,
        ax=ax,
        cmap=cmap,
        vmin=vmin,
        vmax=vmax,
        cbar=colorbar,
        square=True,
        annot=annotate,
        fmt=".2f",
        annot_kws={"fontsize": "small"},
        cbar_kws={"label": "weight"} if colorbar else None,
        xticklabels=False,
        yticklabels=False,
    )


def _draw_grid(
    grid: list[list[tuple[Any, str]]],
    tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
    title: str | None,
    cmap: str,
    vmin: float | None,
    vmax: float | None,
) -> Figure:
    """One picture for each (matrix, title) of the grid, labels at its left and lower edge, one colour bar."""
    pyplot, _ = require()
    matrices = [matrix for line in grid for matrix, _ in line]
    rows, columns = matrices[0].shape
    row_labels, column_labels = labels_of(tokens, key_tokens, rows, columns)
    vmin = float(min(matrix.min() for matrix in matrices)) if vmin is None else vmin
    vmax = float(max(matrix.max() for matrix in matrices)) if vmax is None else vmax
    height, width = len(grid), max(len(line) for line in grid)
    cell = (side(columns, 0.16, 1.6, 4.0), side(rows, 0.16, 1.6, 4.0))
    figure, axes = pyplot.subplots(
        height,
        width,
        squeeze=False,
        figsize=(min(40.0, width * cell[0] + 1.2), min(40.0, height * cell[1] + 0.6)),
        layout="constrained",
    )
    for y, line in enumerate(axes):
        for x, ax in enumerate(line):
            if x >= len(grid[y]):
                ax.set_axis_off()
                continue
            matrix, name = grid[y][x]
            _draw(ax, matrix, cmap=cmap, vmin=vmin, vmax=vmax, colorbar=False, annotate=False)
            is_lowest = y + 1 == height or x >= len(grid[y + 1])
            label_axes(ax, row_labels if x == 0 else None, column_labels if is_lowest else None)
            ax.set_title(name, fontsize="small")
    figure.colorbar(axes[0][0].collections[0], ax=axes, label="weight", shrink=0.8)
    if title is not None:
        figure.suptitle(title)
    return figure
