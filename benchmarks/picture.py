"""A picture of ratios over the sequence length, with a panel per arithmetic and head dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from selfattn_ext import info
from selfattn_ext.bench.measure import Row
from selfattn_ext.terminal import CommandError

try:
    from matplotlib import pyplot
    from matplotlib.axes import Axes
except ImportError as error:
    raise CommandError(
        f"drawing needs matplotlib ({error}): pip install 'selfattn_ext[viz]'", exit_code=1
    ) from error

COLUMNS = 4


def draw(rows: Sequence[Row], peer: str, path: Path) -> Path:
    """Draws the time of ``peer`` over ours for plain and causal rows; returns the picture's absolute path."""
    plain = [row for row in rows if _is_plain(row) and row.ratio(peer) is not None]
    if not plain:
        raise CommandError(f"nothing to draw: no plain or causal row has a ratio to {peer}", exit_code=1)
    panels: dict[str, list[Row]] = {}
    for row in plain:
        panels.setdefault(_panel_name(row), []).append(row)
    # A single length makes no curve, so it is shown only if there is nothing else.
    curved = {name: found for name, found in panels.items() if len({row.case.length for row in found}) > 1}
    panels = curved or panels
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.9 * lines), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (name, found) in zip(axes.flat, panels.items(), strict=False):
        _panel(ax, found, peer)
        ax.set_title(name, fontsize="medium")
        ax.legend(fontsize="x-small")
    for ax in axes[:, 0]:
        ax.set_ylabel(f"time of {peer} / time of selfattn_ext")
    figure.suptitle(f"{info.cpu_name()}: above 1 selfattn_ext is faster", fontsize="medium")
    target = path.expanduser().absolute()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def _is_plain(row: Row) -> bool:
    return replace(row.case, causal=False, precision="highest", isa="").options() == ""


def _panel_name(row: Row) -> str:
    kind = [row.case.dtype_name]
    if row.case.precision != "highest":
        kind.append(f'"{row.case.precision}"')
    if row.case.isa:
        kind.append(row.case.isa)
    return f"{' '.join(kind)}, head dimension {row.case.head_dim}"


def _panel(ax: Axes, rows: Sequence[Row], peer: str) -> None:
    ax.axhline(1.0, color="grey", linewidth=1)
    curves: dict[str, list[Row]] = {}
    for row in rows:
        rule = ", causal" if row.case.causal else ""
        curves.setdefault(f"{row.case.direction}{rule}, threads: {row.threads}", []).append(row)
    for label, points in curves.items():
        # The largest of several batches of one length counts, as two points would make the curve jump.
        points = sorted(points, key=lambda row: row.case.batch * row.case.heads)
        by_length = {row.case.length: row.ratio(peer) for row in points}
        found = [(length, ratio) for length, ratio in sorted(by_length.items()) if ratio is not None]
        ax.plot(
            [length for length, _ in found], [ratio.median for _, ratio in found], marker="o", label=label
        )
    lengths = sorted({row.case.length for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel("sequence length")
    ax.grid(alpha=0.3)
