"""Chooses mutants by a seed, and applies one to a source.

A mutant is a dictionary, as the list has it in JSON: its number, file, line, kind, the whole lines before and
after the change, and how many such lines come before them.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import cpp_sites, python_sites
from .sites import Site

SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py")
FOLDERS = ("csrc", "selfattn_ext")
PARTS = ("csrc/core", "csrc/cpu", "csrc/ops", "csrc/cuda", "csrc", "selfattn_ext")

#: A mutant, and what is known of it, as JSON has it.
Mutant = dict[str, Any]
Result = dict[str, Any]


def choose(root: Path, seed: int, count: int) -> list[Mutant]:
    """The first mutants of a seed's order, which depends on each line's text and file alone."""
    found: list[tuple[str, Mutant]] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                file = path.relative_to(root).as_posix()
                found += _mutants_of(file, path.read_text(encoding="utf-8"), seed)
    found.sort(key=lambda item: item[0])
    chosen = [mutant for _, mutant in found[:count]]
    return [{"number": number, **mutant} for number, mutant in enumerate(chosen, 1)]


def _mutants_of(file: str, source: str, seed: int) -> Iterable[tuple[str, Mutant]]:
    """A mutant of each line that has places for one, and its rank in the order of a seed."""
    seen: Counter[str] = Counter()
    for line, places in sorted(by_line(source, sites(file, source)).items()):
        text = source.splitlines()[line - 1]
        rank = hashlib.sha256(f"{seed} {file} {seen[text]} {text}".encode()).hexdigest()
        seen[text] += 1
        site = places[int(rank, 16) % len(places)]
        start = source.rfind("\n", 0, site.start) + 1
        end = (source + "\n").find("\n", site.end)
        before = source[start:end]
        after = source[start : site.start] + site.new + source[site.end : end]
        nth = len(_places(source[:start], before))
        yield (
            rank,
            {"file": file, "line": line, "kind": site.kind, "before": before, "after": after, "nth": nth},
        )


def _places(source: str, lines: str) -> list[int]:
    """Where whole lines occur in a text."""
    return [found.start() for found in re.finditer(rf"^(?={re.escape(lines)}$)", source, re.M)]


def applied(source: str, mutant: Mutant) -> str | None:
    """The text with the mutant's change, or None if it does not have the mutant's lines."""
    places = _places(source, mutant["before"])
    if len(places) <= mutant["nth"]:
        return None
    place = places[mutant["nth"]]
    return source[:place] + mutant["after"] + source[place + len(mutant["before"]) :]


def place_of(root: Path, mutant: Mutant) -> Path | None:
    """The file that has the mutant's lines: its own, or the only other one where they have moved."""
    own = root / mutant["file"]
    if own.exists() and applied(own.read_text(encoding="utf-8"), mutant) is not None:
        return own
    found = [
        path
        for folder in FOLDERS
        for path in (root / folder).rglob(f"*{own.suffix}")
        if len(_places(path.read_text(encoding="utf-8"), mutant["before"])) == 1
    ]
    return found[0] if len(found) == 1 and mutant["nth"] == 0 else None


def part_of(file: str) -> str:
    return next(part for part in PARTS if file.startswith(part + "/"))


def described(mutant: Mutant) -> str:
    """One line that says where a mutant is and what it changes."""
    old, new = (" ".join(mutant[name].split()) for name in ("before", "after"))
    return f"{mutant['number']:4} {mutant['file']}:{mutant['line']} {mutant['kind']}: {old}  ->  {new}"


def sites(name: str, source: str) -> list[Site]:
    """All places of a source, in the order of the text."""
    found = python_sites.python_sites(source) if name.endswith(".py") else cpp_sites.cpp_sites(source)
    return sorted(site for site in found if source[site.start : site.end] != site.new)


def by_line(source: str, found: list[Site]) -> dict[int, list[Site]]:
    """The places by the line on which they begin, from 1."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    lines: dict[int, list[Site]] = {}
    for site in found:
        lines.setdefault(bisect.bisect_right(starts, site.start), []).append(site)
    return lines


def counted(content: dict[str, Any], results: dict[int, Result]) -> list[Mutant]:
    """The first mutants of a list, as many as it counts, without those that do not compile."""
    unfit = [number for number, result in results.items() if result["state"] == "does not compile"]
    fit = [mutant for mutant in content["mutants"] if mutant["number"] not in unfit]
    return fit[: content["count"]]
