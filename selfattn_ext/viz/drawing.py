"""What all pictures have in common: the libraries that draw, labels of queries and keys, files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["label_axes", "labels_of", "require", "save", "side"]

# Beyond this many labels on an axis they overlap, so that only every n-th is drawn.
_MAX_LABELS = 48
_CONTROL_CHARACTERS = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})


def save(drawing: Axes | Figure, path: str | os.PathLike[str], *, dpi: int = 120, close: bool = True) -> Path:
    """Writes a picture to a file, in the format that the file's suffix names (png, svg, pdf).

    Args:
        drawing: what one of the plot functions returned.
        path: the file; missing parent folders are made.
        dpi: pixels in an inch.
        close: whether to close the figure, so that a loop over many pictures does not keep all in memory.

    Returns:
        The absolute path of the file.
    """
    pyplot, _ = require()
    figure: Any = getattr(drawing, "figure", drawing)
    target = Path(path).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=dpi)
    if close:
        pyplot.close(figure)
    return target


def require() -> tuple[Any, Any]:
    """matplotlib.pyplot and seaborn.

    Raises:
        ImportError: one of them is missing; the message says how to install both.
    """
    try:
        import matplotlib.pyplot as pyplot
        import seaborn
    except ImportError as error:
        raise ImportError(
            f"drawing needs matplotlib and seaborn ({error}): pip install selfattn_ext[viz]"
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
    if not all(isinstance(token, str) for token in tokens):
        raise TypeError(f"{name} must be strings, got {[type(token).__name__ for token in tokens]}")
    if len(tokens) != count:
        raise ValueError(f"{name} must have one label for each of {count} positions, got {len(tokens)}")
    return [
        "␣" * len(token) if token and not token.strip(" ") else token.translate(_CONTROL_CHARACTERS)
        for token in tokens
    ]


def side(cells: int, per_cell: float, smallest: float, largest: float) -> float:
    """Inches for that many cells."""
    return min(largest, max(smallest, 1.0 + per_cell * cells))


def label_axes(ax: Axes, row_labels: list[str] | None, column_labels: list[str] | None) -> None:
    """Writes labels beside the cells, which are 1 wide and high; None leaves an axis as it is."""
    # parse_math=False: a token such as "$x$" is text, not a formula.
    for labels, set_ticks, rotation in ((column_labels, ax.set_xticks, 90), (row_labels, ax.set_yticks, 0)):
        if labels is not None:
            step = math.ceil(len(labels) / _MAX_LABELS)
            shown = range(0, len(labels), step)
            set_ticks(
                [i + 0.5 for i in shown],
                [labels[i] for i in shown],
                rotation=rotation,
                fontsize="small",
                parse_math=False,
            )
