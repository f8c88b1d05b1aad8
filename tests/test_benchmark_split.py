"""benchmarks/split_cost.py at a small size."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from selfattn_ext.bench import memory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.thorough
@pytest.mark.skipif(not memory.available(), reason="this system does not tell a peak that can be reset")
def test_the_cost_of_a_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import split_cost

    assert split_cost.main(["--length", "256", "--rounds", "1", "--memory-at", "1", "2"]) == 0
    printed = capsys.readouterr().out
    for method in ("ring", "ulysses"):
        for dtype in ("float32", "bfloat16"):
            assert len(re.findall(rf"^{method} +{dtype} +[\d. %-]+$", printed, re.M)) == 2
