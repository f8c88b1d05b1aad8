"""The picture at the top of the README: measured ratios as bars, on light and dark ground.

    python benchmarks/ratio_picture.py

It reads docs/pictures/ratios.json and writes ratios-light.svg and ratios-dark.svg beside it. Each ratio in
that file names the table row of docs/performance.md that it was taken from. This measures nothing and uses no
drawing library, so the same file always gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RATIOS = Path(__file__).parents[1] / "docs" / "pictures" / "ratios.json"


@dataclass(frozen=True)
class Colours:
    """The colours of one of the two pictures."""

    text: str
    faint: str
    line: str
    bars: tuple[str, ...]  # one for each machine


COLOURS = {
    "light": Colours("#1f2328", "#59636e", "#d1d9e0", ("#0969da", "#bc4c00")),
    "dark": Colours("#f0f6fc", "#9198a1", "#3d444d", ("#4493f8", "#f0883e")),
}

WIDTH = 880
MARGIN = 4
LEFT, RIGHT = 310, WIDTH - 60  # the ends of the bars' area; labels stand left of it
NUMBER = 40  # the width of a ratio's number beside its bar
LEGEND = 56
TOP = 140  # the place of the first row
BAR, GAP, SPACE = 13, 2, 12  # height of a bar, between the bars of a row, between rows
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ratios", type=Path, nargs="?", default=RATIOS, help="the measured ratios, as JSON")
    file = parser.parse_args(arguments).ratios
    data = json.loads(file.read_text(encoding="utf-8"))
    for name in COLOURS:
        picture = file.with_name(f"{file.stem}-{name}.svg")
        picture.write_text(drawn(data, COLOURS[name]), encoding="utf-8")
        print(picture)
    return 0


def drawn(data: dict[str, Any], colours: Colours) -> str:
    """Returns the picture as the text of an SVG file."""
    row_height = len(data["machines"]) * (BAR + GAP) - GAP + SPACE
    height = TOP + len(data["rows"]) * row_height + 10
    font = f'font-family="{FONT}" fill="{colours.text}" font-size="14"'
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" {font}>',
        f"<title>{escape(data['title'])}</title>",
        _text(MARGIN, 20, data["title"], 'font-size="18" font-weight="600"'),
        _text(MARGIN, 42, data["subtitle"], f'fill="{colours.faint}" font-size="13"'),
        *_legend(data["machines"], colours),
        *_grid(data, height - 10, colours),
    ]
    for index, row in enumerate(data["rows"]):
        elements += _row(row, TOP + index * row_height, list(data["machines"]), data, colours)
    return "\n".join([*elements, "</svg>", ""])


def _ratios(data: dict[str, Any]) -> list[float]:
    return [measured["ratio"] for row in data["rows"] for measured in row["measured"]]


def _powers(data: dict[str, Any]) -> range:
    """Returns the powers of two that the picture shows: 1 and at least one more.

    Numbers of ratios below 1 stand left of their bars, and labels left of these; both get room.
    """
    smallest, largest = (math.log2(choose(_ratios(data))) for choose in (min, max))
    low, high = min(0, math.floor(smallest)), max(1, math.ceil(largest))
    while smallest < 0 and _place(2.0**smallest, range(low, high + 1)) < LEFT + NUMBER:
        low -= 1
    return range(low, high + 1)


def _place(ratio: float, powers: range) -> float:
    return LEFT + (RIGHT - LEFT) * (math.log2(ratio) - powers[0]) / (powers[-1] - powers[0])


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _legend(machines: dict[str, Any], colours: Colours) -> Iterator[str]:
    for index, (machine, colour) in enumerate(zip(machines.values(), colours.bars, strict=True)):
        y = LEGEND + index * 20
        yield f'<rect x="{MARGIN}" y="{y}" width="12" height="12" rx="2" fill="{colour}"/>'
        label = f"{machine['name']}; {machine['date']}; torch {machine['torch']}"
        yield _text(MARGIN + 18, y + 11, label, 'font-size="13"')


def _grid(data: dict[str, Any], bottom: float, colours: Colours) -> Iterator[str]:
    powers = _powers(data)
    one = _place(1.0, powers)
    style = f'fill="{colours.faint}" font-size="12"'
    if min(_ratios(data)) < 1:
        yield _text(one - 9, TOP - 32, "torch is faster", f'text-anchor="end" {style}')
    yield _text(one + 9, TOP - 32, "selfattn_ext is faster", style)
    for power in powers:
        x = _place(2.0**power, powers)
        width = 2 if power == 0 else 1
        colour = colours.faint if power == 0 else colours.line
        yield f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="{colour}" stroke-width="{width}"/>'
        yield _text(x, TOP - 14, f"{2.0**power:g}", f'text-anchor="middle" {style}')


def _row(
    row: dict[str, Any], top: float, machines: list[str], data: dict[str, Any], colours: Colours
) -> Iterator[str]:
    powers = _powers(data)
    middle = top + (len(machines) * (BAR + GAP) - GAP) / 2
    yield _text(MARGIN, middle - 1, row["label"])
    yield _text(MARGIN, middle + 13, row["shape"], f'fill="{colours.faint}" font-size="11"')
    for measured in row["measured"]:
        index = machines.index(measured["machine"])
        y = top + index * (BAR + GAP)
        ratio = measured["ratio"]
        ends = sorted((_place(1.0, powers), _place(ratio, powers)))
        yield (
            f'<rect x="{ends[0]:.1f}" y="{y}" width="{max(ends[1] - ends[0], 2):.1f}" height="{BAR}" rx="2" '
            f'fill="{colours.bars[index]}"/>'
        )
        number, base = f"{ratio:.1f}" if ratio >= 10 else str(ratio), y + BAR - 2
        if ratio < 1:
            yield _text(ends[0] - 6, base, number, 'text-anchor="end" font-size="12"')
        else:
            yield _text(ends[1] + 6, base, number, 'font-size="12"')


if __name__ == "__main__":
    raise SystemExit(main())
