"""The notebook of examples/ runs from top to bottom, and stores its own results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gpu
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
import turns
from nbclient import NotebookClient

import selfattn_ext

NOTEBOOK = Path(__file__).parents[2] / "examples" / "self_attention_from_scratch.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Returns the kinds of output of each code cell, except for stderr."""
    return [
        [
            "picture" if "image/png" in output.get("data", {}) else output.output_type
            for output in cell.outputs
            if output.get("name") != "stderr"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a kernel of this interpreter that imports this package, whatever kernels the user has."""
    name = "selfattn-ext-tests"
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
    }
    folder = tmp_path / "share" / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(Path(selfattn_ext.__file__).parents[1]), prepend=os.pathsep)
    return name


def test_cells_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    """In this process, where a picture is a figure that a cell leaves open, with fewer steps of training."""
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert any("range(151)" in source for source in cells)
    names: dict[str, Any] = {"__name__": "__main__"}
    plt.close("all")
    for source, stored in zip(cells, outputs(notebook), strict=True):
        before = len(plt.get_fignums())
        exec(source.removeprefix("%matplotlib inline\n").replace("range(151)", "range(51)"), names)
        printed = ["stream"] * bool(capsys.readouterr().out)
        pictures = ["picture"] * (len(plt.get_fignums()) - before)
        assert printed + pictures == list(dict.fromkeys(stored)), source
    assert len(plt.get_fignums()) == 3
    plt.close("all")
    torch.set_printoptions(profile="default")


@pytest.mark.thorough
@turns.only_in(0, 3)
def test_the_notebook_runs_in_jupyter(kernel: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = outputs(notebook)
    if gpu.DEVICE != "cpu":
        first = f"import torch\ntorch.set_default_device({gpu.DEVICE!r})"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
        stored.insert(0, [])
    client = NotebookClient(
        notebook,
        timeout=120 if gpu.DEVICE == "cpu" else 1800,
        kernel_name=kernel,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    executed = [list(dict.fromkeys(kinds)) for kinds in outputs(notebook)]
    assert executed == [list(dict.fromkeys(kinds)) for kinds in stored]
    assert sum(kinds.count("picture") for kinds in executed) == 3


def test_stored_notebook_is_complete_and_says_nothing_of_the_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any(kind == "error" for kinds in outputs(notebook) for kind in kinds)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
    texts = [
        text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for text in (output.get("text", ""), str(output.get("data", {}).get("text/plain", "")))
    ]
    assert not any(
        path in text for text in texts for path in ("/home", "/root", "/tmp", "/usr", "site-packages")
    )
    assert NOTEBOOK.stat().st_size < 400_000
