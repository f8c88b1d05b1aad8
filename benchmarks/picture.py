"""Ratios over the sequence length as a picture: one panel for each dtype and head dimension."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selfattn_ext import info
from selfattn_ext.bench.measure import Row
from selfattn_ext.terminal import CommandError

try:
    from matplotlib import pyplot
    from matplotlib.axes import Axes
except ImportError as error:
    raise CommandError(
        f"drawing needs matplotlib ({error}): pip install selfattn_ext[viz]", exit_code=1
    ) from error


def draw(rows: Sequence[Row], peer: str, path: Path) -> Path:
    """Time of ``peer`` over ours for the plain and causal rows; returns the absolute path of the picture."""
    plain = [row for row in rows if row.case.options() in ("", "causal") and row.ratio(peer) is not None]
    panels = list(dict.fromkeys((row.case.dtype_name, row.case.head_dim) for row in plain))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, (dtype, head_dim) in zip(axes[0], panels, strict=True):
        _panel(
            ax, [row for row in plain if (row.case.dtype_name, row.case.head_dim) == (dtype, head_dim)], peer
        )
        ax.set_title(f"{dtype}, head dimension {head_dim}")
    axes[0][0].set_ylabel(f"time of {peer} / time of selfattn_ext")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(f"{info.cpu_name()}: above 1 selfattn_ext is faster", fontsize="medium")
    target = path.expanduser().absolute()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def _panel(ax: Axes, rows: Sequence[Row], peer: str) -> None:
    ax.axhline(1.0, color="grey", linewidth=1)
    curves: dict[str, list[Row]] = {}
    for row in rows:
        rule = ", causal" if row.case.causal else ""
        curves.setdefault(f"{row.case.direction}{rule}, threads: {row.threads}", []).append(row)
    for label, points in curves.items():
        # Two batch sizes of one length would make the curve jump: the lengths table has one row for each
        # length.
        by_length = {row.case.length: row.ratio(peer) for row in points}
        found = [(length, ratio) for length, ratio in sorted(by_length.items()) if ratio is not None]
        ax.plot(
            [length for length, _ in found], [ratio.median for _, ratio in found], marker="o", label=label
        )
    lengths = sorted({row.case.length for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.set_xlabel("sequence length")
    ax.grid(alpha=0.3)
