"""Every value of every option together with every value of every other one, on every kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cases import Case, check
from option_pairs import CASES, OPTIONS, covering


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pair_of_options(case: Case, device: str) -> None:
    check(replace(case, device=device))


def test_every_pair_occurs() -> None:
    rows = covering(OPTIONS)
    for first, second in itertools.combinations(OPTIONS, 2):
        met = {(str(row[first]), str(row[second])) for row in rows}
        assert len(met) == len(OPTIONS[first]) * len(OPTIONS[second])
