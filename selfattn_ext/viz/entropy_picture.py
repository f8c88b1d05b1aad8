"""Pictures of the entropy of attention by layer and head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..arguments import checks
from .drawing import require
from .layout import BAR, arrange, is_square, label_axes, panel_size, placed, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_entropy"]

# Numbers written into cells are legible up to this many layers or heads.
_MAX_ANNOTATED = 12


def plot_entropy(
    entropy: Mapping[str, Any] | Tensor,
    *,
    title: str | None = None,
    ax: Axes | None = None,
    cmap: str = "viridis",
    vmin: float | None = 0.0,
    vmax: float | None = None,
    colorbar: bool = True,
    annotate: bool | None = None,
) -> Axes:
    """Draws how widely each head of a model spreads its attention: layers down, heads across.

    Entropy is 0 where each query attends to a single key, and log(n) where it attends to n keys alike.

    Args:
        entropy: what :func:`selfattn_ext.collect_statistics` yields, a dictionary from the name of a layer to
            a list of :class:`selfattn_ext.AuxOutput`, or to a single one, with entropy (B, H, L); or a tensor
            (layers, heads) of any float dtype, in nats.
        title: written above the picture.
        ax: the axes to draw into; a new figure when not given.
        cmap: a matplotlib colour map.
        vmin, vmax: the entropies at the ends of the colour map; None takes them from the data.
        colorbar: whether to draw the scale beside the picture.
        annotate: whether to write the numbers into the cells; by default with at most 12 layers and heads.

    Returns:
        The axes; ``.figure`` is the figure, :func:`save` writes either of them.

    Statistics are averaged in float64 over all queries of all sequences and calls. A query that sees no key
    counts with its entropy of 0, and what is not finite is left out. Cells without a number stay blank: those
    of heads that a layer does not have, and NaN in a tensor.

    Raises:
        ImportError: matplotlib or seaborn is missing.
        TypeError: entropy is neither of these.
        ValueError: there are no layers, or a layer's statistics lack entropy, or a shape is another.

    Example:
        >>> import torch
        >>> from selfattn_ext import AuxRequest, MultiHeadSelfAttention, collect_statistics, viz
        >>> model = torch.nn.Sequential(MultiHeadSelfAttention(32, 4), MultiHeadSelfAttention(32, 4))
        >>> with collect_statistics(model, AuxRequest(entropy=True)) as statistics:
        ...     out = model(torch.randn(2, 6, 32))
        >>> axes = viz.plot_entropy(statistics, title="two layers of four heads")
        >>> [label.get_text() for label in axes.get_yticklabels()]
        ['0', '1']
    """
    pyplot, seaborn = require()
    means, names = _means_and_names(entropy)
    rows, columns = means.shape
    annotate = max(rows, columns) <= _MAX_ANNOTATED if annotate is None else annotate
    finite = means[means.isfinite()].tolist()
    lowest = min(finite, default=0.0) if vmin is None else vmin
    highest = max(finite, default=0.0) if vmax is None else vmax
    size = bar = None
    if ax is None:
        figure = pyplot.figure()
        size = panel_size(rows, columns, 0.42 if annotate else 0.2, 2.0, 10.0)
        ax = placed(figure, size)
        bar = placed(figure, BAR) if colorbar else None
    seaborn.heatmap(
        means.numpy(),
        ax=ax,
        mask=means.isnan().numpy(),
        cmap=cmap,
        vmin=lowest,
        # A scale needs two ends that differ, even if all entropies are the same.
        vmax=highest if highest != lowest else lowest + 1.0,
        cbar=False,
        square=size is None or is_square(size, (rows, columns)),
        annot=annotate,
        fmt=".2f",
        annot_kws={"fontsize": "small"},
        xticklabels=False,
        yticklabels=False,
    )
    if colorbar:
        whole: Any = ax.get_figure()
        drawn = whole.colorbar(ax.collections[0], cax=bar, ax=ax if bar is None else None)
        drawn.set_label("entropy (nats)", fontsize="small")
        drawn.outline.set_visible(False)
        drawn.ax.tick_params(labelsize="small", length=2, pad=2)
    label_axes(ax, (names, None), (rows, columns), names=("layer", "head"))
    if title is not None:
        ax.set_title(title, fontsize="large")
    if size is not None:
        wrap(ax.title, size[0] + 1.0)
        arrange([[ax]], size, bar=bar)
    return ax


def _means_and_names(entropy: Any) -> tuple[Tensor, list[str] | None]:
    """Returns (layers, heads) in float64 on the CPU, and the names of the layers, None for a tensor."""
    if isinstance(entropy, Mapping):
        if not entropy:
            raise ValueError("entropy must have the statistics of at least one layer, got none")
        heads = [_means_of_heads(name, calls) for name, calls in entropy.items()]
        return pad_sequence(heads, batch_first=True, padding_value=math.nan), [str(name) for name in entropy]
    if not isinstance(entropy, Tensor) or not entropy.is_floating_point():
        raise TypeError(
            "entropy must be what collect_statistics yields or a floating-point tensor (layers, heads), got "
            f"{checks.described(entropy)}"
        )
    if entropy.dim() != 2 or 0 in entropy.shape:
        raise ValueError(f"entropy must be (layers, heads), neither of them 0, got {tuple(entropy.shape)}")
    return entropy.detach().cpu().double(), None


def _means_of_heads(name: str, calls: Any) -> Tensor:
    """Returns the mean entropy (H,) of each head over all rows of a layer's calls."""
    parts = [getattr(call, "entropy", None) for call in (calls if isinstance(calls, list) else [calls])]
    found = [part.detach().cpu().double() for part in parts if isinstance(part, Tensor)]
    if not found or len(found) < len(parts):
        hint = "collect_statistics(model, AuxRequest(entropy=True)) asks for it"
        raise ValueError(f"the statistics of layer {name!r} have no entropy; {hint}")
    # (B, L) of a layer without heads could not be told from (H, L) of a single sequence.
    if any(part.dim() < 3 for part in found) or len({part.size(-2) for part in found}) > 1:
        shapes = sorted({tuple(part.shape) for part in found})
        raise ValueError(
            f"entropy of layer {name!r} must be (B, H, L) with the same H in all calls, got {shapes}"
        )
    rows = torch.cat([part.movedim(-2, 0).flatten(1) for part in found], 1)
    return rows.where(rows.isfinite(), math.nan).nanmean(1)
