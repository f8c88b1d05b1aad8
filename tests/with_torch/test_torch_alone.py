"""The command line with torch as the only package: it works, or says what to install.

README's section Install leaves a user with these packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_commands_work_or_say_what_to_install(tmp_path: Path) -> None:
    torch.save(torch.rand(2, 2, 3, 3), tmp_path / "weights.pt")
    (tmp_path / "weights.npy").write_bytes(b"whatever it holds")
    # The process imports the same package as this test.
    environment = os.environ | {"PYTHONPATH": str(Path(selfattn_ext.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, *COMMANDS, *DRAWING]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert not list(tmp_path.glob("*.png"))
    results = json.loads(finished.stdout.splitlines()[-1])
    for command in COMMANDS:
        code, out, err = results[command]
        assert code == 0, (command, code, err)
        assert out, command
    for command in DRAWING:
        says = f"python -m selfattn_ext heatmap: error: {INSTALL}\n"
        assert results[command] == [1, "", says], command
