"""The shares of instruction sets: every case and every value keeps its place in them."""

from __future__ import annotations

import itertools
from collections import Counter

from isa_shares import TURNS, Case, outside

ISAS = ("b", "c", "loops")


def cases(*sizes: int) -> list[Case]:
    """Returns a test whose parameters have so many values, on the best instruction set "a" and the others."""
    return [
        Case(None, isa, {str(name): value for name, value in enumerate(values)})  # type: ignore[arg-type]
        for isa in ("a", *ISAS)
        for values in itertools.product(*map(range, sizes))
    ]


def test_each_case_stays_on_the_best_and_on_one_other() -> None:
    for sizes in ((4, 5), (2, 3, 4), (3, 2, 2), (1, 12), (40,)):
        test = cases(*sizes)
        left_out = outside(test, ISAS)
        stay = [case for case in test if case not in [other for _, other in left_out]]
        times = Counter(tuple(case.values.items()) for case in stay)
        assert set(times.values()) == {2}
        assert Counter(case.isa for case in stay)["a"] == len(times)
        assert {turn for turn, _ in left_out} == set(range(TURNS))
        for place in {place for case in stay for place in case.values.items()}:
            met = {case.isa for case in stay if place in case.values.items()} - {"a"}
            assert len(met) == min(len(ISAS), sum(place in values for values in times))


def test_tests_that_have_no_shares() -> None:
    assert not outside(cases(11), ISAS)
    # All cases have the same value, which would keep one instruction set alone.
    assert not outside([case._replace(values={"one": 0}) for case in cases(12)], ISAS)
