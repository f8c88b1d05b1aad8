"""benchmarks/split_cost.py at a small size."""

from __future__ import annotations

import re

import pytest
import split_cost
import turns

from selfattn_ext.bench import memory


@pytest.mark.thorough
@pytest.mark.skipif(not memory.available(), reason="this system does not tell a peak that can be reset")
@pytest.mark.parametrize("method", turns.chosen(["ring", "ulysses"]))
def test_the_cost_of_a_split(method: str, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    small = ["--length", "256", "--rounds", "1", "--memory-at", "2", "--dtypes", "bfloat16"]
    assert split_cost.main([*small, "--methods", method]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(rf"^{method} +bfloat16 +[\d. %-]+$", printed, re.M)) == 2
