"""Chooses mutants of csrc and selfattn_ext by a seed, and shows which tests notice them.

    scripts/mutants.py list --seed 39 --count 100 --to LIST.json
    scripts/mutants.py run LIST.json --in FOLDER --results R.json [--only 3,7,selfattn_ext] [--phases 2]
    scripts/mutants.py run LIST.json --in FOLDER --results R.json --together [--tests tests/flex]
    scripts/mutants.py run LIST.json --in FOLDER --results AFTER.json --before BEFORE.json
    scripts/mutants.py table BEFORE.json [AFTER.json]

A mutant differs from the sources in one operator, constant, condition, statement or result. Each line of code
is as likely as any other. A list names a mutant by its text, so it outlives changes elsewhere, and has spares
for mutants that do not compile. `run` tests each mutant with the tests of `make test`, in FOLDER, a copy of
the last commit that it makes: first the modules most likely to notice, then other quick ones, then the rest,
until a test fails. It goes on where it stopped. `--phases 1` or `2` leaves the later ones to another run.
`--together` applies all mutants that have survived so far at once, runs what they have not been asked, and
halves them where a test fails. `--times`, a file that pytest --junitxml wrote, tells which modules are quick.
FOLDER may be a git worktree of another commit, such as the one before tests were changed. `--before` takes
the results of an earlier run, and asks first what killed a mutant then.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutation.choice import PARTS, Mutant, choose, counted, described, part_of
from mutation.copy_of_checkout import Copy
from mutation.runner import Runner

ROOT = Path(__file__).resolve().parents[1]


def wanted(mutant: Mutant, only: Sequence[str]) -> bool:
    """Whether a mutant has one of the given numbers, or its file begins with one of the given paths."""
    return not only or any(
        str(mutant["number"]) == name or mutant["file"].startswith(f"{name}/") for name in only
    )


def run(arguments: argparse.Namespace) -> None:
    content = json.loads(arguments.list.read_text(encoding="utf-8"))
    copy = Copy(ROOT, arguments.folder, arguments.times)
    runner = Runner(content, copy, arguments.results, arguments.before)
    only = [name for name in arguments.only.split(",") if name]
    asked: set[int] = set()

    def of_state(*states: str) -> list[Mutant]:
        chosen = counted(content, runner.results)
        return [each for each in chosen if wanted(each, only) and runner.state(each) in states]

    tests = shlex.split(arguments.tests)
    if not tests and (arguments.together or arguments.phases > 1):
        copy.warm()
    if arguments.together:
        runner.ask_together(of_state("open", *(["survived"] if tests else [])), tests)
    else:
        while remaining := [each for each in of_state("", "open") if each["number"] not in asked]:
            asked.add(remaining[0]["number"])
            runner.ask(remaining[0], arguments.phases)
    runner.check()


def table(paths: Sequence[Path]) -> str:
    """How many mutants each list of results kills, by part and by test module, and which survive."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    results = [{each["number"]: each for each in content["results"]} for content in contents]
    names = ("killed before", "killed after") if len(paths) > 1 else ("killed",)
    asked = [
        each for each in counted(contents[0], results[0]) if all(each["number"] in one for one in results)
    ]

    def killed(mutants: Sequence[Mutant], by: str = "") -> str:
        found = [
            sum(
                one[mutant["number"]]["state"] == "killed" and one[mutant["number"]]["by"].startswith(by)
                for mutant in mutants
            )
            for one in results
        ]
        return " | ".join(map(str, found))

    lines = [f"| part | mutants | {' | '.join(names)} |", "|---" * (2 + len(paths)) + "|"]
    for part in PARTS:
        inside = [each for each in asked if part_of(each["file"]) == part]
        if inside:
            lines.append(f"| {part} | {len(inside)} | {killed(inside)} |")
    lines += [f"| all | {len(asked)} | {killed(asked)} |", ""]
    if len(results) > 1:
        dead = [each for each in asked if results[0][each["number"]]["state"] == "killed"]
        still = sum(results[1][each["number"]]["state"] == "killed" for each in dead)
        lines += [f"{still} of the {len(dead)} mutants that were killed before are still killed.", ""]
    lines += [f"| test module | {' | '.join(names)} |", "|---" * (1 + len(paths)) + "|"]
    by = Counter(
        one[n]["by"].partition("::")[0] for one in results for n in one if one[n]["state"] == "killed"
    )
    lines += [f"| {module} | {killed(asked, module)} |" for module, _ in by.most_common()]
    for path, one in zip(paths, results, strict=True):
        lines += ["", f"Not killed in {path.name}:", ""]
        lines += [
            f"- {one[each['number']]['state']}: `{described(each).strip()}`"
            for each in asked
            if one[each["number"]]["state"] != "killed"
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("list", help="choose mutants")
    choosing.add_argument("--seed", type=int, default=0)
    choosing.add_argument("--count", type=int, default=100)
    choosing.add_argument("--to", type=Path, help="write them to this file")
    running = commands.add_parser("run", help="ask the tests about mutants")
    running.add_argument("list", type=Path)
    running.add_argument("--in", dest="folder", type=Path, required=True, help="the copy of the checkout")
    running.add_argument("--results", type=Path, required=True)
    running.add_argument("--only", default="", help="numbers of mutants, and folders of their files")
    running.add_argument("--phases", type=int, choices=(1, 2, 3), default=3)
    running.add_argument("--together", action="store_true", help="all survivors at once")
    running.add_argument("--tests", default="", help="what --together runs, instead of all that is left")
    running.add_argument("--before", type=Path, help="results of an earlier run; its killers come first")
    running.add_argument("--times", type=Path, help="a file that pytest --junitxml wrote")
    showing = commands.add_parser("table", help="a table of results")
    showing.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    # A mutant is undone also if somebody stops this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if arguments.command == "table":
        print(table(arguments.results))
    elif arguments.command == "run":
        run(arguments)
    else:
        # Half as many are spares.
        mutants = choose(ROOT, arguments.seed, arguments.count + arguments.count // 2)
        print("\n".join(map(described, mutants)))
        if arguments.to is not None:
            content = {"seed": arguments.seed, "count": arguments.count, "mutants": mutants}
            arguments.to.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
