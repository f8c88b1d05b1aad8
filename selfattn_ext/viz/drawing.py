"""Helpers of all pictures: the drawing libraries, the labels of tokens, writing files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MARGIN", "labels_of", "require", "save"]

# Inches around a whole figure.
MARGIN = 0.1
_CONTROL_CHARACTERS = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})


def save(drawing: Axes | Figure, path: str | os.PathLike[str], *, dpi: int = 200, close: bool = True) -> Path:
    """Writes a picture to a file, in the format that the file's suffix names (png, svg, pdf).

    If something sticks out of the figure, such as a label that was changed after drawing, the picture in the
    file is larger than the figure.

    Args:
        drawing: the axes or the figure that one of the plot functions returned.
        path: the file; missing parent folders are made.
        dpi: pixels per inch.
        close: whether to close the figure, so that a loop over many pictures does not keep all in memory.

    Returns:
        The absolute path of the file.

    Raises:
        ImportError: matplotlib or seaborn is missing.
        ValueError: the suffix names no format that matplotlib can write.
        OSError: the file cannot be written.

    Example:
        >>> import torch
        >>> from selfattn_ext import viz
        >>> viz.save(viz.plot_attention(torch.rand(4, 4)), "attention.png").name
        'attention.png'
    """
    pyplot, _ = require()
    from matplotlib.transforms import Bbox

    figure: Any = getattr(drawing, "figure", drawing)
    target = Path(path).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    page, drawn = figure.bbox_inches, figure.get_tightbbox()
    sticks_out = (drawn.min < page.min - 0.01).any() or (drawn.max > page.max + 0.01).any()
    # None leaves the picture as large as the figure, to the pixel.
    outline = Bbox.union([page, drawn.padded(MARGIN)]) if sticks_out else None
    figure.savefig(target, dpi=dpi, bbox_inches=outline)
    if close:
        pyplot.close(figure)
    return target


def require() -> tuple[Any, Any]:
    """Imports matplotlib.pyplot and seaborn; a program calls it before the work whose result it draws.

    Returns:
        The two modules.

    Raises:
        ImportError: one of them, or what they need, is missing; the message says how to install it.

    Example:
        >>> from selfattn_ext import viz
        >>> pyplot, seaborn = viz.require()
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
    """Returns the labels of queries and of keys as they are drawn, None for labels that are not given."""
    if key_tokens is None and tokens is not None and rows == columns:
        key_tokens = tokens
    return _check_tokens(tokens, rows, "tokens"), _check_tokens(key_tokens, columns, "key_tokens")


def _check_tokens(tokens: Sequence[str] | None, count: int, name: str) -> list[str] | None:
    if tokens is None:
        return None
    for index, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(
                f"{name} must be strings, but {name}[{index}] is {type(token).__name__} {token!r:.60}"
            )
    if len(tokens) != count:
        raise ValueError(f"{name} must have one label for each of {count} positions, got {len(tokens)}")
    return [
        "␣" * len(token) if token and not token.strip(" ") else token.translate(_CONTROL_CHARACTERS)
        for token in tokens
    ]
