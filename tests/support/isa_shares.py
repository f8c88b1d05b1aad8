"""Which cases of a test every instruction set computes, and which only the best one and one of the others.

Kernels of all instruction sets are made of the same templates. So a fault in those shows on the best one, and
a fault in what an instruction set adds shows in many cases, of which its share has some. A case outside the
share of an instruction set gets the mark `thorough`, and runs in one of TURNS turns of .ci/run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
import turns

#: The fixtures of conftest.py whose values end with an instruction set.
FIXTURES = ("kernel", "tangent_kernel", "isa", "device")
#: A test whose only other parameter numbers its cases is shared if it has at least so many.
NUMBERED = 20
TURNS = 4


class _Test:
    """The cases of one test function on all instruction sets but the best."""

    def __init__(self, isas: Sequence[str]) -> None:
        self.isas = isas
        self.share: list[pytest.Function] = []
        self.others: list[tuple[int, pytest.Function]] = []
        #: For each parameter, the place of each of its values; pytest has one object for all its uses.
        self.places: dict[str, dict[int, int]] = defaultdict(dict)
        #: On which instruction sets the share has each value of each parameter.
        self.met: dict[tuple[str, int], set[str]] = defaultdict(set)

    def add(self, case: pytest.Function, isa: str, values: dict[str, object]) -> None:
        places = {
            name: self.places[name].setdefault(id(value), len(self.places[name]))
            for name, value in values.items()
        }
        number = sum(places.values())
        if self.isas[number % len(self.isas)] == isa:
            self.share.append(case)
            for place in places.items():
                self.met[place].add(isa)
        else:
            self.others.append((number // len(self.isas) % TURNS, case))

    def is_shared(self) -> bool:
        """Tells whether the share has each value of each parameter on each instruction set, or each value
        is a case of its own and there are many.
        """
        sizes = [len(places) for places in self.places.values()]
        if len(sizes) == 1:
            return sizes[0] >= NUMBERED
        return len(self.met) == sum(sizes) and all(len(met) == len(self.isas) for met in self.met.values())


def mark(items: Iterable[pytest.Item], isas: Sequence[str]) -> None:
    """Marks the cases on these instruction sets, all of the machine but the best, outside their shares."""
    tests: dict[tuple[object, ...], _Test] = defaultdict(lambda: _Test(isas))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            values = dict(item.callspec.params)
            isa = next((values.pop(name) for name in FIXTURES if name in values), "").rpartition("-")[2]
            if isa in isas:
                tests[item.path, item.cls, item.originalname].add(item, isa, values)
    for test in tests.values():
        if test.is_shared():
            for turn, case in test.others:
                case.add_marker(pytest.mark.thorough)
                case.add_marker(turns.only_in(turn, TURNS))
