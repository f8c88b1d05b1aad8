"""The picture at the top of the README: drawn from ratios that stand in docs/performance.md."""

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
    """A folder with the pictures as they are drawn now."""
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


@pytest.mark.parametrize(
    ("row", "measured"), MEASURED, ids=[f"{row['label']}-{m['machine']}" for row, m in MEASURED]
)
def test_every_ratio_stands_in_a_table_of_the_page(row: dict[str, Any], measured: dict[str, Any]) -> None:
    section = text_of(DATA["source"]).partition(f"\n### {measured['section']}\n")[2].split("\n### ")[0]
    tables = [[cell.strip() for cell in line.split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    assert [cells for cells in tables if all(cell in cells for cell in measured["cells"])], measured
    assert any(measured["ratio"] == float(cell) for cell in measured["cells"] if _is_number(cell))
    assert {"machine", "threads", "date"} <= measured.keys()
    assert measured["machine"] in DATA["machines"]


def test_the_figures_of_the_readme_stand_in_a_table_of_the_page() -> None:
    rows = [line.split(" | ") for line in text_of(DATA["source"]).splitlines() if line.startswith("|")]
    figures = re.findall(r"([\d.]+) / ([\d.]+) \| ([\d.]+) \|", text_of("README.md"))
    assert len(figures) == 12  # six rows on two machines
    for torch_ms, our_ms, ratio in figures:
        assert any({torch_ms, our_ms, ratio} <= {*row} for row in rows), (torch_ms, our_ms, ratio)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\d+\.\d+", cell) is not None
