"""The command line with torch as the only package: it works, or says what to install.

README's section Install leaves a user with these packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import selfattn_ext

#: This script runs commands in a process without these packages, and prints their exit codes and texts.
SCRIPT = """
import contextlib, gc, io, json, sys, traceback

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        missing = name.partition(".")[0] in ("numpy", "matplotlib", "seaborn", "pandas", "transformers")
        return None if missing else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
import selfattn_ext
from selfattn_ext import bench, demo  # test_demo.py has a demo without matplotlib
from selfattn_ext.bench import cases, timer
from selfattn_ext.commands import check
from selfattn_ext.commands.cli import main

cases.QUICK_SHAPES = ((1, 2, 16, 8),)
timer.QUICK = timer.Effort(seconds=0.0, min_rounds=1, max_rounds=1)
first = check.cases(0)[:1]
gc.collect = lambda: 0  # takes longer than what is timed
check.cases = lambda seed: first

results = {}
for command in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command.split())
        except Exception:
            code = traceback.format_exc()
    results[command] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""

INSTALL = (
    "drawing needs matplotlib and seaborn (No module named 'matplotlib'): pip install 'selfattn_ext[viz]'"
)
COMMANDS = ("info", "check", "bench --quick --threads 1")
DRAWING = ("heatmap", "heatmap weights.pt", "heatmap weights.npy")
Results = dict[str, tuple[object, str, str]]


pytestmark = pytest.mark.xdist_group("torch_alone")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("torch_alone")
    torch.save(torch.rand(2, 2, 3, 3), folder / "weights.pt")
    (folder / "weights.npy").write_bytes(b"whatever it holds")
    # The process imports the same package as this test.
    environment = os.environ | {"PYTHONPATH": str(Path(selfattn_ext.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, *COMMANDS, *DRAWING]
    finished = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert not list(folder.glob("*.png"))
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_what_draws_nothing_works(command: str, results: Results) -> None:
    code, out, err = results[command]
    assert code == 0, (code, err)
    assert out


@pytest.mark.parametrize("command", DRAWING)
def test_what_draws_says_what_to_install(command: str, results: Results) -> None:
    assert results[command] == [1, "", f"python -m selfattn_ext heatmap: error: {INSTALL}\n"]
