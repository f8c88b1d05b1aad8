"""Which cases of a test every kernel computes, and which only the best one and one of the others.

Kernels of all instruction sets are made of the same templates. So a fault in those shows on the best one, and
a fault in what an instruction set adds shows in many cases, of which its share has some. The loops have no
tiles, so sizes and places matter little to them. A case outside of a kernel's share gets the mark `thorough`,
and runs in one of TURNS turns of .ci/run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest
import turns

#: The fixtures of conftest.py whose values are kernels or instruction sets.
FIXTURES = ("kernel", "tangent_kernel", "isa", "device")
#: Tests with at least so many cases for a kernel are shared.
MANY = 12
TURNS = 4


class Case(NamedTuple):
    item: pytest.Function
    isa: str
    #: The values of the other parameters, by name; pytest has one object for all uses of a value.
    values: dict[str, int]


def case_of(item: pytest.Item) -> Case | None:
    """Returns the case, or None of a test without kernels. The loops count as an instruction set."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    isa = next((params.pop(name) for name in FIXTURES if name in params), None)
    if isa is None or not isinstance(item, pytest.Function):
        return None
    return Case(item, isa.rpartition("-")[2], {name: id(value) for name, value in params.items()})


def outside(cases: Sequence[Case], isas: Sequence[str]) -> list[tuple[int, Case]]:
    """Returns a test's cases outside the shares of these instruction sets, each with its turn.

    Each value of each parameter keeps every instruction set, or as many as it has cases. If that cannot be,
    no case is outside.
    """
    isas = [isa for isa in isas if any(case.isa == isa for case in cases)]
    cases = [case for case in cases if case.isa in isas]
    if len(cases) < MANY * len(isas):
        return []
    places: dict[str, dict[int, int]] = defaultdict(dict)
    placed = [
        {name: places[name].setdefault(value, len(places[name])) for name, value in case.values.items()}
        for case in cases
    ]
    times = Counter(place for at in placed for place in at.items())
    # The sum of the places, some of them doubled, chooses the instruction set.
    for factors in itertools.product((1, 2), repeat=len(places)):
        chosen = [
            isas[sum(factor * at[name] for factor, name in zip(factors, places, strict=True)) % len(isas)]
            for at in placed
        ]
        kept = {
            (place, isa)
            for case, at, isa in zip(cases, placed, chosen, strict=True)
            if case.isa == isa
            for place in at.items()
        }
        met = Counter(place for place, _ in kept)
        if all(met[place] == min(count // len(isas), len(isas)) for place, count in times.items()):
            others = [case for case, isa in zip(cases, chosen, strict=True) if case.isa != isa]
            return [(number % TURNS, case) for number, case in enumerate(others)]
    return []


def mark(items: Iterable[pytest.Item], isas: Sequence[str]) -> None:
    """Marks the cases outside the shares of these instruction sets, all of the machine but the best."""
    tests: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for item in items:
        case = case_of(item)
        if case is not None:
            tests[item.path, case.item.cls, case.item.originalname].append(case)
    for cases in tests.values():
        for turn, case in outside(cases, isas):
            case.item.add_marker(pytest.mark.thorough)
            case.item.add_marker(turns.only_in(turn, TURNS))
