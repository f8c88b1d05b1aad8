"""The picture at the top of the README shows ratios of docs/performance.md."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pages import ROOT, text_of

PICTURES = ROOT / "docs" / "pictures"
DATA = json.loads((PICTURES / "ratios.json").read_text(encoding="utf-8"))
MEASURED = [(row, measured) for row in DATA["rows"] for measured in row["measured"]]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Returns a folder with the pictures, newly drawn."""
    shutil.copy(PICTURES / "ratios.json", tmp_path)
    runpy.run_path(str(ROOT / "benchmarks" / "ratio_picture.py"))["main"]([str(tmp_path / "ratios.json")])
    return tmp_path


@pytest.mark.parametrize("name", ["ratios-light.svg", "ratios-dark.svg"])
def test_the_committed_picture_is_what_the_command_draws(name: str, drawn: Path) -> None:
    assert (PICTURES / name).read_bytes() == (drawn / name).read_bytes()
    assert f"docs/pictures/{name}" in text_of("README.md")


@pytest.mark.parametrize("name", ["ratios-light.svg", "ratios-dark.svg"])
def test_every_row_and_ratio_is_shown_inside_the_picture(name: str) -> None:
    root = ElementTree.parse(PICTURES / name).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for row, measured in MEASURED:
        assert row["label"] in texts
        assert any(text in texts for text in (str(measured["ratio"]), f"{measured['ratio']:.1f}"))
    for element in root.iter():
        if "x" in element.attrib:
            assert 0 <= float(element.attrib["x"]) < width
            assert 0 <= float(element.attrib["y"]) < height


def test_the_window_says_why_its_ratio_is_large() -> None:
    (shape,) = (row["shape"] for row in DATA["rows"] if "window" in row["label"])
    assert "torch computes all 8192 keys" in shape


@pytest.mark.parametrize("ratios", [(0.8, 0.51), (0.5, 2.0), (0.25, 51.6), (1.0, 1.0), (0.03, 0.9)], ids=str)
def test_ratios_under_one_are_drawn_to_the_left(ratios: tuple[float, float], tmp_path: Path) -> None:
    """Their bars end at the line of 1; their numbers are left of the bars and right of the labels."""
    measured = [
        {"machine": machine, "ratio": ratio} for machine, ratio in zip(DATA["machines"], ratios, strict=True)
    ]
    rows = [{"label": "some work", "shape": "(1, 2)", "measured": measured}]
    (tmp_path / "ratios.json").write_text(json.dumps({**DATA, "rows": rows}), encoding="utf-8")
    draw = runpy.run_path(str(ROOT / "benchmarks" / "ratio_picture.py"))
    draw["main"]([str(tmp_path / "ratios.json")])
    root = ElementTree.parse(tmp_path / "ratios-light.svg").getroot()
    texts = {element.text: element.attrib for element in root.iter(f"{SVG}text")}
    one = float(texts["1"]["x"])
    bars = [element.attrib for element in root.iter(f"{SVG}rect")][-2:]
    for ratio, bar in zip(ratios, bars, strict=True):
        left = float(bar["x"])
        right = left + float(bar["width"])
        number = texts[str(ratio) if ratio < 10 else f"{ratio:.1f}"]
        if ratio < 1:
            assert right == pytest.approx(one, abs=0.2)
            assert number["text-anchor"] == "end"
            assert draw["LEFT"] + 30 <= float(number["x"]) < left
        else:
            assert left == pytest.approx(one, abs=0.2)
            assert "text-anchor" not in number
            assert right < float(number["x"]) <= draw["WIDTH"] - 40
    assert ("torch is faster" in texts) == (min(ratios) < 1)
    assert "selfattn_ext is faster" in texts


@pytest.mark.parametrize(
    ("row", "measured"), MEASURED, ids=[f"{row['label']}-{m['machine']}" for row, m in MEASURED]
)
def test_every_ratio_stands_in_a_table_of_the_page(row: dict[str, Any], measured: dict[str, Any]) -> None:
    section = text_of(DATA["source"]).partition(f"\n### {measured['section']}\n")[2].split("\n### ")[0]
    tables = [[cell.strip() for cell in line.split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    assert [cells for cells in tables if all(cell in cells for cell in measured["cells"])], measured
    assert any(
        measured["ratio"] == float(cell) for cell in measured["cells"] if re.fullmatch(r"\d+\.\d+", cell)
    )
    assert {"machine", "threads", "date"} <= measured.keys()
    assert measured["machine"] in DATA["machines"]


def test_the_figures_of_the_readme_stand_in_a_table_of_the_page() -> None:
    rows = [line.split(" | ") for line in text_of(DATA["source"]).splitlines() if line.startswith("|")]
    figures = re.findall(r"([\d.]+) / ([\d.]+) \| ([\d.]+) \|", text_of("README.md"))
    assert len(figures) == 11  # six rows on two machines, and one of these twelve has a ratio alone
    for torch_ms, our_ms, ratio in figures:
        assert any({torch_ms, our_ms, ratio} <= {*row} for row in rows), (torch_ms, our_ms, ratio)
    alone = re.findall(r"\[ratios only\]\(docs/performance\.md#[\w-]+\) \| ([\d.]+) \|", text_of("README.md"))
    assert len(alone) == 1
    assert any(alone[0] in row for row in rows)
