"""A place of a source that a mutant changes, and what replaces an operator or a number."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Every operator and what replaces it: a neighbour, which is harder to notice than a random one.
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*",
    "&&": "||", "||": "&&", "and": "or", "or": "and",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "fminf": "fmaxf", "fmaxf": "fminf"}


class Site(NamedTuple):
    """A part of a source's text and what replaces it."""

    start: int
    end: int
    new: str
    kind: str


def one_more(number: str) -> str | None:
    """The literal of a number that is larger by one, or None for what is no plain number."""
    found = re.fullmatch(r"(0x[\da-fA-F]+|\d+)([uUlL]*)|(\d+\.\d*(?:[eE][-+]?\d+)?)([fF]?)", number)
    if found is None:
        return None
    if found[1]:
        larger = int(found[1], 0) + 1
        return (hex(larger) if found[1].startswith("0x") else str(larger)) + found[2]
    return repr(float(found[3]) + 1) + found[4]
