"""Layout of a figure: sizes of pictures, labels beside their cells, legends, colour bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .drawing import MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BAR", "add_legend", "arrange", "is_square", "label_axes", "panel_size", "placed", "wrap"]

# The largest number of numbers beside an axis without tokens.
_MAX_NUMBERS = 8
# Inches between pictures, and the smallest side of a picture in inches.
_GAP, _THINNEST = 0.18, 0.4
# Width and greatest length of the colour bar in inches; it is as long as the pictures are high, if it can.
BAR = (0.14, 3.6)


def panel_size(rows: int, columns: int, cell: float, smallest: float, largest: float) -> tuple[float, float]:
    """Returns the inches (width, height) of a picture of ``rows`` times ``columns`` cells.

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
    names: tuple[str, str] = ("query", "key"),
    steps: tuple[int, int] = (1, 1),
    fontsize: str = "small",
    outer: tuple[bool, bool] = (True, True),
) -> None:
    """Names the axes, and writes labels beside the cells, which are 1 wide and high.

    Cells without labels are numbered, at multiples of ``steps``. As many labels are written as fit without
    touching each other; labels of keys are turned if they are wider than their cells.

    Args:
        ax: axes that have their final size.
        labels: of the L queries and of the S keys, or None.
        shape: (L, S).
        names: of the axes, where rows are no queries and columns no keys.
        steps: the smallest number of cells between two numbers, for queries and for keys.
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
        (ax.yaxis, names[0], row_cell, labels[0], shape[0], steps[0], outer[0]),
        (ax.xaxis, names[1], column_cell, labels[1], shape[1], steps[1], outer[1]),
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
    """Turns the labels of keys as little as lets each fit into ``room`` pixels."""
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
    """Adds a legend of all that has a name in the axes, some inches away from one of their corners."""
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

    matplotlib's own layouts divide a figure of a given size: pictures of square cells do not fill their part,
    and labels that need more room are cut off. Here the pictures have a given size, the labels and legends
    around them are measured, and the figure becomes as large as all of them together.

    Args:
        grid: rows of pictures, which may differ in length.
        size: inches (width, height) of each picture; `placed` has given them this size.
        bar: the axes of the colour bar, right of the pictures.
        title: written above all pictures, on as many lines as it needs.
    """
    figure: Any = grid[0][0].get_figure()
    columns = max(map(len, grid))
    lefts, rights = [0.0] * columns, [0.0] * columns
    tops, bottoms = [0.0] * len(grid), [0.0] * len(grid)
    for y, line in enumerate(grid):
        for x, ax in enumerate(line):
            left, right, above, below = _around(ax)
            lefts[x], rights[x] = max(lefts[x], left), max(rights[x], right)
            tops[y] = max(tops[y], above)
            # Labels above an empty place of the next row hang into it and need no room of their own.
            if y + 1 == len(grid) or x < len(grid[y + 1]) or below > size[1]:
                bottoms[y] = max(bottoms[y], below)
    width = MARGIN + sum(lefts) + sum(rights) + size[0] * columns + _GAP * (columns - 1)
    high = size[1] * len(grid) + sum(tops[1:]) + sum(bottoms[:-1]) + _GAP * (len(grid) - 1)
    if bar is not None:
        bar_left, bar_size = width + _GAP, (BAR[0], min(high, BAR[1]))
        _resize(bar, bar_size)  # before it is measured, as its numbers depend on its length
        _, right, above, below = _around(bar)
        room = (high - bar_size[1]) / 2
        width = bar_left + bar_size[0] + right
        tops[0], bottoms[-1] = max(tops[0], above - room), max(bottoms[-1], below - room)
    height = tops[0] + high + bottoms[-1]
    width += MARGIN
    above = 0.0
    if title is not None:
        text = figure.suptitle(title, fontsize="large", va="top")
        wrap(text, width - 2 * MARGIN)
        extent = text.get_window_extent()
        width = max(width, extent.width / figure.dpi + 2 * MARGIN)
        above = extent.height / figure.dpi + _GAP
    total = height + above + 2 * MARGIN
    figure.set_size_inches(width, total)
    if title is not None:
        text.set_position((0.5, 1 - MARGIN / total))

    def put(ax: Axes, left: float, down: float, size: tuple[float, float]) -> None:
        ax.set_position((left / width, 1 - (down + size[1]) / total, size[0] / width, size[1] / total))

    first = down = MARGIN + above + tops[0]
    for y, line in enumerate(grid):
        left = MARGIN
        for x, ax in enumerate(line):
            left += lefts[x]
            put(ax, left, down, size)
            left += size[0] + rights[x] + _GAP
        down += size[1] + bottoms[y] + _GAP + (tops[y + 1] if y + 1 < len(grid) else 0.0)
    if bar is not None:
        put(bar, bar_left, first + (high - bar_size[1]) / 2, bar_size)


def _around(ax: Any) -> tuple[float, float, float, float]:
    """Returns the inches that labels need left of, right of, above and below axes."""
    inner, outer, dpi = ax.get_window_extent(), ax.get_tightbbox(), ax.get_figure().dpi
    left, below = (inner.min - outer.min) / dpi
    right, above = (outer.max - inner.max) / dpi
    return left, right, above, below


def placed(figure: Any, size: tuple[float, float]) -> Axes:
    """Adds axes of a size in inches somewhere in the figure; `arrange` puts them in their place."""
    ax: Axes = figure.add_axes((0, 0, 1, 1), label=str(len(figure.axes)))
    _resize(ax, size)
    return ax


def _resize(ax: Axes, size: tuple[float, float]) -> None:
    figure: Any = ax.get_figure()
    width, height = figure.get_size_inches()
    ax.set_position((0, 0, size[0] / width, size[1] / height))


def is_square(size: tuple[float, float], shape: tuple[int, int]) -> bool:
    """Tells whether the cells of a picture are squares; very few rows or columns of cells are stretched."""
    return math.isclose(size[0] / shape[1], size[1] / shape[0])


def wrap(text: Any, width: float) -> None:
    """Breaks a text between words into lines of at most ``width`` inches."""
    given = text.get_text()
    needed = text.get_window_extent().width / text.get_figure().dpi
    if needed > width:
        longest = max(map(len, given.splitlines()))
        room = max(1, int(longest * width / needed))
        lines = [textwrap.fill(line, room, break_long_words=False) for line in given.splitlines()]
        text.set_text("\n".join(lines))
