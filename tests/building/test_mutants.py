"""scripts/mutants.py changes what computes and nothing else, always chooses alike, and counts what dies."""

from __future__ import annotations

import json
from pathlib import Path

import mutants
import pytest
from mutation import choice, copy_of_checkout, sites

CPP = """#include <vector>  // a < b
#if defined(__aarch64__)
int lines(int a) { return a + 1; }
#else
template <class T, int kWidth>
T larger(const T* at, T b) {
  static_assert(kWidth > 1, "1 + 1");
  T sum = b;
  if (b < at[0]) sum = std::max(b, *at);
  store<T>(sum);
  for (T n{}; n != b; ++n) parallel([&](T i) { sum += i; });
  return sum;
}
#endif
"""

PYTHON = '''"""1 + 1."""
import os
def larger(a: Literal[1], b: int = 2) -> bool:
    """A < b."""
    sizes = {"1 < 2": f"{a + 1}"}
    os.sync()
    return a is None or -b < a  # 1 + 1
'''


def places(name: str, source: str) -> list[tuple[str, str, str]]:
    """The kind of each place, its text and what replaces it."""
    return [(site.kind, source[site.start : site.end], site.new) for site in choice.sites(name, source)]


def test_places_in_cpp() -> None:
    assert places("larger.h", CPP) == [
        ("condition", "b < at[0]", "!(b < at[0])"),
        ("relation", "<", "<="),
        ("constant", "0", "1"),
        ("statement", "sum = std::max(b, *at)", ""),
        ("extreme", "max", "min"),
        ("statement", "store<T>(sum)", ""),
        ("relation", "!=", "=="),
        ("statement", "parallel([&](T i) { sum += i; })", ""),
        ("statement", "sum += i", ""),
        ("return", "return sum", "return {}"),
    ]


def test_places_in_python() -> None:
    assert places("larger.py", PYTHON) == [
        ("constant", "2", "3"),
        ("statement", 'sizes = {"1 < 2": f"{a + 1}"}', "pass"),
        ("statement", "os.sync()", "pass"),
        ("return", "return a is None or -b < a", "return None"),
        ("relation", "is", "is not"),
        ("and or", "or", "and"),
        ("relation", "<", "<="),
    ]


@pytest.mark.parametrize(
    ("number", "larger"),
    [("0", "1"), ("16u", "17u"), ("0x1f", "0x20"), ("0.5f", "1.5f"), ("1e3", None), ("1'000", None)],
)
def test_one_more(number: str, larger: str | None) -> None:
    assert sites.one_more(number) == larger


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in (("csrc/cpu/larger.h", CPP), ("selfattn_ext/larger.py", PYTHON)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_list_names_a_mutant_by_its_text(checkout: Path) -> None:
    chosen = choice.choose(checkout, seed=5, count=100)
    # Each line with a place gives one mutant.
    assert len(chosen) == 8
    assert chosen != choice.choose(checkout, seed=6, count=100)
    for mutant in chosen:
        path = checkout / mutant["file"]
        source = path.read_text()
        changed = choice.applied(source, mutant)
        assert changed is not None
        assert changed.replace(mutant["after"], mutant["before"]) == source
        assert choice.applied(f"\n\n{source}", mutant) == f"\n\n{changed}"
        assert choice.applied(source.replace(mutant["before"], ""), mutant) is None
    # More lines above and a new file leave the order of the others as it was.
    (checkout / "csrc/cpu/larger.h").write_text(f"\n\n{CPP}")
    (checkout / "csrc/cpu/other.h").write_text("int one() { return 1; }\n")
    again = [one for one in choice.choose(checkout, seed=5, count=100) if "other" not in one["file"]]
    assert [one["after"] for one in again] == [one["after"] for one in chosen]


def test_lines_that_have_moved_are_found(checkout: Path) -> None:
    mutant = next(one for one in choice.choose(checkout, 5, 100) if one["file"].endswith(".h"))
    own, other = checkout / "csrc/cpu/larger.h", checkout / "csrc/core/other.h"
    assert choice.place_of(checkout, mutant) == own
    other.parent.mkdir()
    own.rename(other)
    assert choice.place_of(checkout, mutant) == other
    other.unlink()
    assert choice.place_of(checkout, mutant) is None


def test_equal_lines_are_counted(checkout: Path) -> None:
    (checkout / "selfattn_ext/larger.py").write_text("a = 1\na = 1\n")
    chosen = [one for one in choice.choose(checkout, 1, 100) if one["file"].endswith(".py")]
    found = {choice.applied("a = 1\na = 1\n", mutant) for mutant in chosen}
    assert found == {"a = 2\na = 1\n", "a = 1\na = 2\n"}


PASSED = "tests/a/test_a.py::test_one[x y] PASSED [ 1%]\n"


@pytest.mark.parametrize(
    ("printed", "failed"),
    [
        (f"{PASSED}tests/a/test_a.py::test_two[1 2] FAILED [ 2%]\n", "tests/a/test_a.py::test_two[1 2]"),
        (f"{PASSED}tests/a/test_a.py::test_two ", "tests/a/test_a.py::test_two (exit -11)"),
        ("ERROR collecting tests/a/test_a.py\n", "tests/a/test_a.py"),
        ("ImportError while loading conftest\n", "import (exit -11)"),
    ],
)
def test_the_first_failure_is_named(printed: str, failed: str) -> None:
    assert copy_of_checkout.failure(printed, "exit -11") == failed


def test_table(tmp_path: Path) -> None:
    def results(name: str, *states: tuple[str, str]) -> Path:
        listed = [
            {"number": n, "file": "csrc/cpu/a.h", "line": n, "kind": "return", "before": "x", "after": "y"}
            for n in range(1, 5)
        ]
        found = [{"number": n, "state": state, "by": by} for n, (state, by) in enumerate(states, 1)]
        path = tmp_path / name
        path.write_text(json.dumps({"count": 3, "mutants": listed, "results": found}))
        return path

    dead, unfit = ("killed", "tests/a/test_a.py::test_one"), ("does not compile", "")
    before = results("before.json", dead, unfit, ("survived", ""), dead)
    after = results("after.json", dead, unfit, ("survived", ""), ("survived", ""))
    lines = mutants.table([before, after]).splitlines()
    # The fourth takes the place of the one that does not compile.
    assert "| csrc/cpu | 3 | 2 | 1 |" in lines
    assert "1 of the 2 mutants that were killed before are still killed." in lines
    assert "| tests/a/test_a.py | 2 | 1 |" in lines
    assert [line for line in lines if line.startswith("- survived")] == [
        "- survived: `3 csrc/cpu/a.h:3 return: x  ->  y`",
        "- survived: `3 csrc/cpu/a.h:3 return: x  ->  y`",
        "- survived: `4 csrc/cpu/a.h:4 return: x  ->  y`",
    ]
