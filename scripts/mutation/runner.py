"""Asks the tests about mutants, one at a time or several together, and writes down what they say."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .choice import Mutant, Result, applied, described, place_of
from .copy_of_checkout import Copy, processor_seconds, set_time


class Runner:
    """Asks tests about mutants, and writes down what they say."""

    def __init__(self, content: dict[str, Any], copy: Copy, path: Path, before: Path | None = None) -> None:
        self.content, self.copy, self.path = content, copy, path
        written = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
        self.results: dict[int, Result] = {result["number"]: result for result in written}
        earlier = json.loads(before.read_text(encoding="utf-8"))["results"] if before else []
        #: The test modules that killed the mutants in an earlier run.
        self.killers = {result["number"]: result["by"].partition("::")[0] for result in earlier}
        self.built = False

    def state(self, mutant: Mutant) -> str:
        """What is known of a mutant; "open" if it has passed some of the tests."""
        return self.results[mutant["number"]]["state"] if mutant["number"] in self.results else ""

    def write(self, result: Result) -> None:
        self.results[result["number"]] = result
        content = {**self.content, "results": [self.results[number] for number in sorted(self.results)]}
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def tell(self, result: Result) -> None:
        self.write(result)
        by = f" by {result['by']}" if result["by"] else ""
        print(f"     {result['state']}{by}, {result['seconds']} processor seconds", flush=True)

    def check(self) -> None:
        """Runs on the unchanged sources the tests that killed mutants; what fails there has killed none."""
        killed = [one for one in self.results.values() if one["state"] == "killed" and "checked" not in one]
        tests = {re.sub(r" \((?:hangs|exit -?\d+)\)$", "", one["by"]) for one in killed}
        failing = self.copy.failing(name for name in tests if "::" in name)
        for result in killed:
            if result["by"] in failing:
                print(f"{result['number']:4} is open: {result['by']} fails on the unchanged sources, too")
                self.write({**result, "state": "open", "by": ""})
            else:
                self.write({**result, "checked": True})

    def compiles(self, mutants: Sequence[Mutant]) -> bool:
        """Whether the library has to be compiled with these mutants; what all mutants share is made first."""
        files = [mutant["file"] for mutant in mutants]
        compiled = any(file.startswith("csrc/") and not self.copy.in_sources_alone(file) for file in files)
        if any(map(self.copy.in_sources_alone, files)):
            self.copy.warm()
        if not self.built and (compiled or not self.copy.has_library()):
            if not self.copy.build():
                sys.exit(f"the unchanged sources in {self.copy.folder} do not compile")
            self.copy.keep()
            self.built = True
        return compiled

    def with_mutants(
        self, mutants: Sequence[Mutant], compiled: bool, ask: Callable[[], tuple[str, str]]
    ) -> tuple[str, str]:
        """Applies mutants, compiles, asks, and undoes everything; returns a state and a test."""
        kept: dict[Path, tuple[str, int]] = {}
        try:
            for mutant in mutants:
                path = place_of(self.copy.folder, mutant)
                if path is None:
                    return "gone", ""
                text = path.read_text(encoding="utf-8")
                kept.setdefault(path, (text, path.stat().st_mtime_ns))
                path.write_text(applied(text, mutant) or text, encoding="utf-8")
            begin = processor_seconds()
            if compiled and not self.copy.build():
                return "does not compile", ""
            if compiled:
                print(f"     compiled in {processor_seconds() - begin:.0f} processor seconds", flush=True)
            return ask()
        finally:
            for path, (text, nanoseconds) in kept.items():
                path.write_text(text, encoding="utf-8")
                set_time(path, nanoseconds)
            self.copy.restore()

    def ask(self, mutant: Mutant, last_phase: int) -> None:
        """Runs the phases of tests that a mutant has not passed, until one fails."""
        before = self.results.get(mutant["number"], {"passed": [], "seconds": 0})
        passed = list(before["passed"])
        surroundings = mutant["before"] + self._names_around(mutant)
        killers = [
            result["by"].partition("::")[0]
            for other in self.content["mutants"]
            if Path(other["file"]).parent == Path(mutant["file"]).parent
            and (result := self.results.get(other["number"])) is not None
        ]
        phases = self.copy.phases(mutant["file"], surroundings, killers)
        known = self.killers.get(mutant["number"], "")
        # The module that killed it before is asked alone, before the first phase.
        phases[0:1] = [[known], phases[0]] if known in self.copy.texts else [[], phases[0]]

        def ask() -> tuple[str, str]:
            for phase in phases[: last_phase + 1]:
                modules = [name for name in phase if name not in passed]
                outcome = self.copy.test(modules) if modules else None
                if outcome is not None and outcome.failed:
                    if mutant["file"].startswith("csrc/") and "ninja: build stopped" in outcome.printed:
                        return "does not compile", ""
                    return "killed", outcome.failed
                passed.extend(modules)
            return "survived" if last_phase + 1 >= len(phases) else "open", ""

        print(described(mutant), flush=True)
        compiled = self.compiles([mutant])
        begin, wall = processor_seconds(), time.monotonic()
        state, by = self.with_mutants([mutant], compiled, ask)
        result = {"number": mutant["number"], "state": state, "by": by}
        result["seconds"] = round(before["seconds"] + processor_seconds() - begin, 1)
        self.tell({**result, "wall": round(time.monotonic() - wall), "passed": passed})

    def _names_around(self, mutant: Mutant) -> str:
        """The names of the functions and classes that a mutant may be in: those that begin above it."""
        path = self.copy.folder / mutant["file"]
        above = path.read_text(encoding="utf-8").splitlines()[: mutant["line"]] if path.exists() else []
        heads = [
            line
            for line in above
            if re.match(r"\s*(?:def|class|async def) |\w.*\($|\w.*\) (?:const )?\{$", line)
        ]
        return " ".join(re.sub(r"\(.*", "", line) for line in heads[-2:])

    def ask_together(self, mutants: Sequence[Mutant], tests: Sequence[str]) -> None:
        """Asks about several mutants at once, and halves them where a test fails."""
        if not mutants:
            return
        names = [str(mutant["number"]) for mutant in mutants]
        asked = list(tests)
        if not asked:
            passed = [set(self.results[mutant["number"]]["passed"]) for mutant in mutants]
            asked = [name for name in self.copy.texts if any(name not in of_one for of_one in passed)]
            asked.sort(key=self.copy.cost)
        print(f"together: {', '.join(names)}", flush=True)
        compiled = self.compiles(mutants)
        begin = processor_seconds()

        def ask() -> tuple[str, str]:
            outcome = self.copy.test(asked)
            return ("killed", outcome.failed) if outcome.failed else ("survived", "")

        state, by = self.with_mutants(mutants, compiled, ask)
        share = (processor_seconds() - begin) / len(mutants)
        if state != "survived" and len(mutants) > 1:
            print(f"     {state} {by}", flush=True)
            half = len(mutants) // 2
            self.ask_together(mutants[:half], tests)
            self.ask_together(mutants[half:], tests)
            return
        for mutant in mutants:
            earlier = self.results[mutant["number"]]
            # Chosen tests say nothing of the others.
            still = earlier["state"] if tests and state == "survived" else state
            result = {**earlier, "state": still, "by": by}
            result["seconds"] = round(result["seconds"] + share, 1)
            if not tests:
                result["passed"] = list(self.copy.texts)
            self.tell(result)
