"""Pictures of masks, mask functions, BlockMasks and the positional options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import checks
from ..flex.block_masks import block_map, visible_blocks
from ..masks import visible_pairs
from .drawing import labels_of, require
from .layout import add_legend, arrange, is_square, label_axes, panel_size, placed, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_mask"]

# The four kinds of cells. Each is darker than the one before it, so that the picture works without colours.
_IN_HIDDEN_BLOCK, _UNSEEN, _SEEN, _IN_FULL_BLOCK = range(4)
_COLOURS = ("#ffffff", "#d9d9d9", "#56a0d3", "#08306b")
_OF_BLOCKS = {
    _IN_HIDDEN_BLOCK: "hidden block: not computed",
    _UNSEEN: "hidden in a partial block",
    _SEEN: "seen in a partial block",
    _IN_FULL_BLOCK: "full block: all seen",
}
_OF_PAIRS = {_UNSEEN: "hidden", _SEEN: "seen"}
_CELL_BORDER, _BLOCK_BORDER = "#8c8c8c", "#3f3f46"
# Lines between cells are drawn for up to this many cells on a side.
_MAX_OUTLINED = 32


def plot_mask(
    mask: Any = None,
    sizes: tuple[int, int] | None = None,
    *,
    is_causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    query_offset: int = 0,
    batch: int = 0,
    head: int = 0,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
    legend: bool = True,
    device: torch.device | str | None = None,
) -> Axes:
    """Draws which query sees which key: queries down, keys across, a cell for each pair.

    For a BlockMask it also shows the borders of the blocks, and which blocks are hidden (their scores are not
    computed), partial (the mask function is called for each pair) and full (it is not called). All colours
    differ in lightness.

    Args:
        mask: a mask function ``mask_mod(batch, head, q_idx, kv_idx)``; a
            :class:`torch.nn.attention.flex_attention.BlockMask`; a tensor that broadcasts to (B, H, L, S),
            bool (True is seen) or float (-inf is hidden); a rule of :mod:`selfattn_ext.masks`; None hides
            nothing.
        sizes: (L, S), the numbers of queries and keys. By default they are those of the BlockMask or of the
            tensor; for other masks they must be given.
        is_causal, window_size, query_offset: as in :func:`selfattn_ext.scaled_dot_product_attention`. A pair
            is seen if these options and the mask allow it.
        batch, head: the batch element and the head to draw, if the mask differs between them.
        tokens: L labels of the queries, also those of the keys when L == S and key_tokens is not given.
        key_tokens: S labels of the keys.
        title: written above the picture.
        ax: the axes to draw into; a new figure when not given.
        legend: whether to say beside the picture what the colours mean. Without it, a legend for several
            pictures can be made of ``ax.get_legend_handles_labels()``.
        device: where a mask function is called; torch's default device when not given.

    Returns:
        The axes; ``.figure`` is the figure, :func:`save` writes either of them.

    The picture is made from a matrix (L, S): draw a mask for long sequences at a smaller size.

    Raises:
        ImportError: matplotlib or seaborn is missing.
        TypeError: the mask is none of these, or the tokens are not strings.
        ValueError: the sizes are missing or differ from those of the mask; the batch element or head does not
            exist; the number of labels differs from the size.

    Example:
        >>> from selfattn_ext import viz
        >>> axes = viz.plot_mask(sizes=(12, 12), is_causal=True, window_size=(3, 0), title="4 last keys")
        >>> axes.get_title()
        '4 last keys'
    """
    pyplot, _ = require()
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    length, keys = _sizes(mask, sizes)
    is_of_blocks = _is_block_mask(mask)
    cells, block_size = _cells(mask, length, keys, batch, head, device)
    rule = visible_pairs(
        length,
        keys,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        device=cells.device,
    )
    if rule is not None:
        cells = torch.where(rule, cells, cells.clamp(max=_UNSEEN))
    labels = labels_of(tokens, key_tokens, length, keys)
    size = None
    if ax is None:
        size = panel_size(length, keys, 0.2, 2.6, 7.0)
        ax = placed(pyplot.figure(), size)
    ax.imshow(
        cells.cpu().numpy(),
        cmap=ListedColormap(_COLOURS),
        vmin=-0.5,
        vmax=len(_COLOURS) - 0.5,
        extent=(0, keys, length, 0),
        aspect="equal" if size is None or is_square(size, (length, keys)) else "auto",
        # A pixel that covers many cells shows the mixture of their colours.
        interpolation_stage="rgba",
    )
    if max(length, keys) <= _MAX_OUTLINED:
        _draw_borders(ax, (length, keys), (1, 1), color=_CELL_BORDER, linewidth=0.3)
    if is_of_blocks:
        _draw_borders(ax, (length, keys), block_size, color=_BLOCK_BORDER, linewidth=0.6)
    ax.spines[:].set_color(_BLOCK_BORDER)
    ax.spines[:].set_linewidth(0.6)
    label_axes(ax, labels, (length, keys), steps=block_size)
    if title is not None:
        ax.set_title(title, fontsize="medium")
    for kind, name in (_OF_BLOCKS if is_of_blocks else _OF_PAIRS).items():
        # This patch is invisible; it only makes a line of the legend.
        ax.add_patch(Rectangle((0, 0), 0, 0, fc=_COLOURS[kind], ec=_CELL_BORDER, lw=0.5, label=name))
    if legend:
        add_legend(ax, (1, 1), (0.15, 0), "small")
    if size is not None:
        wrap(ax.title, size[0] + 1.0)
        arrange([[ax]], size)
    return ax


def _is_block_mask(mask: Any) -> bool:
    return hasattr(mask, "kv_num_blocks")


def _sizes(mask: Any, sizes: tuple[int, int] | None) -> tuple[int, int]:
    own = None
    if _is_block_mask(mask):
        own = tuple(mask.shape[-2:])
    elif isinstance(mask, Tensor):
        if mask.dim() < 2 or mask.dim() > 4:
            raise ValueError(f"mask must have two to four dimensions, (B, H, L, S), got {tuple(mask.shape)}")
        own = tuple(mask.shape[-2:])
    if sizes is None:
        if own is None:
            raise ValueError("sizes must be given as (L, S), as this kind of mask has no sizes")
        sizes = own
    if len(sizes) != 2:
        raise ValueError(f"sizes must be a pair (L, S), got {tuple(sizes)}")
    length, keys = checks.integers("sizes", sizes)
    if length < 1 or keys < 1:
        raise ValueError(f"sizes must be at least (1, 1), got {tuple(sizes)}")
    if own is not None:
        broadcasts = (1,) if isinstance(mask, Tensor) else ()
        if any(has not in (wanted, *broadcasts) for has, wanted in zip(own, sizes, strict=True)):
            raise ValueError(f"sizes must be those of the mask, {own}, got {tuple(sizes)}")
    return length, keys


def _cells(
    mask: Any, length: int, keys: int, batch: int, head: int, device: torch.device | str | None
) -> tuple[Tensor, tuple[int, int]]:
    """Returns the kind of each cell (L, S) as uint8, and the size of the blocks, (1, 1) without blocks."""
    if _is_block_mask(mask):
        blocks = _chosen(block_map(mask), batch, head)
        size: tuple[int, int] = tuple(mask.BLOCK_SIZE)
        places = (torch.arange(count, device=blocks.device) for count in (length, keys))
        in_blocks, full = visible_blocks(blocks, size, *places)
        seen = _asked(mask.mask_mod, length, keys, batch, head, blocks.device)
        inside = torch.where(full, _IN_FULL_BLOCK, torch.where(seen, _SEEN, _UNSEEN))
        return torch.where(in_blocks, inside, _IN_HIDDEN_BLOCK).to(torch.uint8), size
    if mask is None:
        seen = torch.ones(length, keys, dtype=torch.bool, device=device)
    elif isinstance(mask, Tensor):
        given = _chosen(mask.detach()[(None,) * (4 - mask.dim())], batch, head).expand(length, keys)
        seen = given if given.dtype == torch.bool else given != -torch.inf
    elif hasattr(mask, "visible"):
        seen = mask.visible(length, keys, device)
    elif callable(mask):
        seen = _asked(mask, length, keys, batch, head, device or torch.get_default_device())
    else:
        raise TypeError(
            "mask must be a mask function, a BlockMask, a tensor, a rule of selfattn_ext.masks or None, got "
            f"{type(mask).__name__}"
        )
    return torch.where(seen, _SEEN, _UNSEEN).to(torch.uint8), (1, 1)


def _chosen(of_all: Tensor, batch: int, head: int) -> Tensor:
    """Chooses (rows, columns) of one batch element and head from (B | 1, H | 1, rows, columns)."""
    for name, index, size in (("batch", batch, of_all.size(0)), ("head", head, of_all.size(1))):
        if size != 1 and not 0 <= index < size:
            raise ValueError(f"{name} must lie in 0..{size - 1}, got {index}")
    return of_all[batch if of_all.size(0) > 1 else 0, head if of_all.size(1) > 1 else 0]


def _asked(
    mask_mod: Callable[..., Any], length: int, keys: int, batch: int, head: int, device: torch.device | str
) -> Tensor:
    """Calls a mask function for each pair; returns its answers (L, S)."""
    from torch.nn.attention.flex_attention import create_mask

    def of_one(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return mask_mod(b + batch, h + head, q_idx, kv_idx)

    return create_mask(of_one, 1, 1, length, keys, device=device)[0, 0]


def _draw_borders(ax: Axes, sizes: tuple[int, int], steps: tuple[int, int], **style: Any) -> None:
    """Draws lines around groups of cells."""
    (length, keys), (rows, columns) = sizes, steps
    ax.hlines([*range(0, length, rows), length], 0, keys, **style)
    ax.vlines([*range(0, keys, columns), keys], 0, length, **style)
