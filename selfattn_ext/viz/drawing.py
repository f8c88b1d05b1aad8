"""What all pictures have in common: the libraries that draw, labels, sizes and places, files."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BAR",
    "add_legend",
    "arrange",
    "is_square",
    "label_axes",
    "labels_of",
    "panel_size",
    "placed",
    "require",
    "save",
    "wrap",
]

# Numbers beside an axis without tokens, at most.
_MAX_NUMBERS = 8
_CONTROL_CHARACTERS = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})
# Inches: around the whole figure, between pictures, and of a picture's side at least.
_MARGIN, _GAP, _THINNEST = 0.1, 0.18, 0.4
# Inches of the colour bar, which becomes as long as the pictures are high but no longer than this.
BAR = (0.14, 3.6)


def save(drawing: Axes | Figure, path: str | os.PathLike[str], *, dpi: int = 200, close: bool = True) -> Path:
    """Writes a picture to a file, in the format that the file's suffix names (png, svg, pdf).

    If something sticks out of the figure, such as a label that was changed after drawing, the picture in the
    file is larger than the figure.

    Args:
        drawing: what one of the plot functions returned.
        path: the file; missing parent folders are made.
        dpi: pixels in an inch.
        close: whether to close the figure, so that a loop over many pictures does not keep all in memory.

    Returns:
        The absolute path of the file.
    """
    pyplot, _ = require()
    from matplotlib.transforms import Bbox

    figure: Any = getattr(drawing, "figure", drawing)
    target = Path(path).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox().padded(_MARGIN)
    figure.savefig(target, dpi=dpi, bbox_inches=Bbox.union([figure.bbox_inches, drawn]))
    if close:
        pyplot.close(figure)
    return target


def require() -> tuple[Any, Any]:
    """matplotlib.pyplot and seaborn. A program that draws when its work is done asks for them before it.

    Raises:
        ImportError: one of them, or what they need, is missing; the message says how to install it.
    """
    try:
        import matplotlib.pyplot as pyplot
        import seaborn
    except ImportError as error:
        raise ImportError(
            f"drawing needs matplotlib and seaborn ({error}): pip install 'selfattn_ext[viz]'"
        ) from error
    return pyplot, seaborn


def labels_of(
    tokens: Sequence[str] | None, key_tokens: Sequence[str] | None, rows: int, columns: int
) -> tuple[list[str] | None, list[str] | None]:
    """The labels of queries and of keys as they are written, or None where there are none."""
    if key_tokens is None and tokens is not None and rows == columns:
        key_tokens = tokens
    return _check_tokens(tokens, rows, "tokens"), _check_tokens(key_tokens, columns, "key_tokens")


def _check_tokens(tokens: Sequence[str] | None, count: int, name: str) -> list[str] | None:
    if tokens is None:
        return None
    for index, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"{name} must be strings, but {name}[{index}] is {type(token).__name__} {token!r:.60}")
    if len(tokens) != count:
        raise ValueError(f"{name} must have one label for each of {count} positions, got {len(tokens)}")
    return [
        "␣" * len(token) if token and not token.strip(" ") else token.translate(_CONTROL_CHARACTERS)
        for token in tokens
    ]


def panel_size(rows: int, columns: int, cell: float, smallest: float, largest: float) -> tuple[float, float]:
    """Inches (width, height) of a picture of so many cells.

    A cell is a square of ``cell`` inches, larger where the longer side would be below ``smallest``, and
    smaller where it would exceed ``largest``. A side of very few cells is stretched until it can be seen.
    """
    longer = max(rows, columns)
    cell = min(max(cell, smallest / longer), largest / longer)
    return max(cell * columns, _THINNEST), max(cell * rows, _THINNEST)


def label_axes(
    ax: Axes,
    labels: tuple[list[str] | None, list[str] | None],
    shape: tuple[int, int],
    *,
    steps: tuple[int, int] = (1, 1),
    fontsize: str = "small",
    outer: tuple[bool, bool] = (True, True),
) -> None:
    """Names the axes, and writes labels beside the cells, which are 1 wide and high.

    Cells without labels are numbered, at multiples of ``steps``. There are as many labels as fit without
    touching each other; labels of keys are turned where they are wider than their cells.

    Args:
        ax: of the size that it is going to have.
        labels: of the L queries and of the S keys, or None.
        shape: (L, S).
        steps: numbers of cells between two numbers, at least.
        fontsize: of the labels.
        outer: whether to label the queries and the keys at all; neighbours in a grid share theirs.
    """
    from matplotlib.font_manager import FontProperties

    figure: Any = ax.get_figure()
    box = ax.get_window_extent()
    line = 1.2 * FontProperties(size=fontsize).get_size_in_points() / 72 * figure.dpi
    row_cell, column_cell = box.height / shape[0], box.width / shape[1]
    if ax.get_aspect() != "auto":
        row_cell = column_cell = min(row_cell, column_cell)
    for axis, name, cell, texts, count, step, is_outer in (
        (ax.yaxis, "query", row_cell, labels[0], shape[0], steps[0], outer[0]),
        (ax.xaxis, "key", column_cell, labels[1], shape[1], steps[1], outer[1]),
    ):
        if not is_outer:
            axis.set_ticks([])
            continue
        if texts is None:
            while count > step * _MAX_NUMBERS or step * cell < line:
                step *= 2
        else:
            step = math.ceil(line / cell)
        shown = range(0, count, step)
        # parse_math=False: a token such as "$x$" is text, not a formula.
        axis.set_ticks(
            [index + 0.5 for index in shown],
            [str(index) if texts is None else texts[index] for index in shown],
            fontsize=fontsize,
            parse_math=False,
        )
        axis.set_tick_params(length=2, pad=2)
        axis.set_label_text(name, fontsize=fontsize)
        if axis is ax.xaxis:
            _turn(axis, cell * step, line)


def _turn(axis: Any, room: float, line: float) -> None:
    """Turns the labels of keys, each of which has so many pixels of room: as little as lets them fit."""
    texts = axis.get_ticklabels()
    if max(text.get_window_extent().width for text in texts) <= room - 0.15 * line:
        return
    slanted = room >= 1.5 * line
    for text in texts:
        if slanted:
            text.set(rotation=45, ha="right", va="top", rotation_mode="anchor")
        else:
            text.set(rotation=90)


def add_legend(ax: Axes, corner: tuple[float, float], away: tuple[float, float], fontsize: str) -> None:
    """A legend of what has a name in the axes, its upper left corner some inches away from a corner of them."""
    from matplotlib.transforms import ScaledTranslation

    figure: Any = ax.get_figure()
    ax.legend(
        loc="upper left",
        bbox_to_anchor=corner,
        bbox_transform=ax.transAxes + ScaledTranslation(*away, figure.dpi_scale_trans),
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        handleheight=1.2,
        handletextpad=0.5,
        frameon=False,
        fontsize=fontsize,
    )


def arrange(
    grid: Sequence[Sequence[Axes]],
    size: tuple[float, float],
    *,
    bar: Axes | None = None,
    title: str | None = None,
) -> None:
    """Gives everything in a figure its place, and the figure the size that this needs.

    matplotlib's own layouts divide a figure of a given size. Pictures of square cells do not fill what they
    get, and labels that need more are cut off. Here the pictures have a given size, what stands around them
    is measured, and the figure becomes as large as all of it together.

    Args:
        grid: lines of pictures, not all of which need to be as long as the others.
        size: inches (width, height) of each picture, which they have already: see `placed`.
        bar: the axes of the colour bar, right of the pictures.
        title: written above all pictures, on as many lines as it needs.
    """
    figure: Any = grid[0][0].get_figure()
    dpi = figure.dpi
    columns = max(map(len, grid))
    lefts, rights = [0.0] * columns, [0.0] * columns
    tops, bottoms = [0.0] * len(grid), [0.0] * len(grid)
    for y, line in enumerate(grid):
        for x, ax in enumerate(line):
            inner, outer = ax.get_window_extent(), ax.get_tightbbox()
            lefts[x] = max(lefts[x], (inner.x0 - outer.x0) / dpi)
            rights[x] = max(rights[x], (outer.x1 - inner.x1) / dpi)
            tops[y] = max(tops[y], (outer.y1 - inner.y1) / dpi)
            below = (inner.y0 - outer.y0) / dpi
            # Labels above an empty place hang into it.
            if y + 1 == len(grid) or x < len(grid[y + 1]) or below > size[1]:
                bottoms[y] = max(bottoms[y], below)
    width = _MARGIN + sum(lefts) + sum(rights) + size[0] * columns + _GAP * (columns - 1)
    height = sum(tops) + sum(bottoms) + size[1] * len(tops) + _GAP * (len(tops) - 1)
    if bar is not None:
        bar_left = width + _GAP
        outer = bar.get_tightbbox()
        width = bar_left + BAR[0] + (outer.x1 - bar.get_window_extent().x1) / dpi
    width += _MARGIN
    above = 0.0
    if title is not None:
        text = figure.suptitle(title, fontsize="large", va="top")
        wrap(text, width - 2 * _MARGIN)
        extent = text.get_window_extent()
        width = max(width, extent.width / dpi + 2 * _MARGIN)
        above = extent.height / dpi + _GAP
    total = height + above + 2 * _MARGIN
    figure.set_size_inches(width, total)
    if title is not None:
        text.set_position((0.5, 1 - _MARGIN / total))

    def put(ax: Axes, left: float, down: float, across: float, high: float) -> None:
        ax.set_position((left / width, 1 - (down + high) / total, across / width, high / total))

    first = down = _MARGIN + above + tops[0]
    for y, line in enumerate(grid):
        left = _MARGIN
        for x, ax in enumerate(line):
            left += lefts[x]
            put(ax, left, down, *size)
            left += size[0] + rights[x] + _GAP
        last = down + size[1]
        down = last + bottoms[y] + _GAP + (tops[y + 1] if y + 1 < len(grid) else 0.0)
    if bar is not None:
        long = min(last - first, BAR[1])
        put(bar, bar_left, (first + last - long) / 2, BAR[0], long)


def placed(figure: Any, size: tuple[float, float]) -> Axes:
    """New axes of a size in inches, somewhere in the figure, for `arrange` to put them in their place."""
    width, height = figure.get_size_inches()
    ax: Axes = figure.add_axes((0, 0, size[0] / width, size[1] / height), label=str(len(figure.axes)))
    return ax


def is_square(size: tuple[float, float], shape: tuple[int, int]) -> bool:
    """Whether the cells of a picture are squares: those of a few rows or columns are stretched."""
    return math.isclose(size[0] / shape[1], size[1] / shape[0])


def wrap(text: Any, width: float) -> None:
    """Breaks a text into lines of so many inches at most, between words."""
    given = text.get_text()
    needed = text.get_window_extent().width / text.get_figure().dpi
    if needed > width:
        longest = max(map(len, given.splitlines()))
        room = max(1, int(longest * width / needed))
        lines = [textwrap.fill(line, room, break_long_words=False) for line in given.splitlines()]
        text.set_text("\n".join(lines))
