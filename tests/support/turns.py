"""Turns of tests that repeat much of what other tests show.

.ci/run sets SELFATTN_TEST_TURN to a number that it derives from the commit, and then only one test of each
group runs; without it, all run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

VARIABLE = "SELFATTN_TEST_TURN"

Choice = TypeVar("Choice")


def _number() -> int | None:
    text = os.environ.get(VARIABLE)
    return int(text) if text else None


def chosen(group: Sequence[Choice]) -> list[Choice]:
    """Returns the one of the group whose turn it is, or all of them."""
    number = _number()
    return list(group) if number is None else [group[number % len(group)]]


def only_in(turn: int, turns: int) -> pytest.MarkDecorator:
    """Marks a test that runs only in one of ``turns`` turns."""
    other = turn not in chosen(range(turns))
    return pytest.mark.skipif(other, reason=f"{VARIABLE}: runs in turn {turn} of {turns}")
