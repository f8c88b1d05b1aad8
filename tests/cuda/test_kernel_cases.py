"""The CUDA kernels on the PTX machine, with any torch.

The problems have every option at lengths and head dims around the edges of tiles, under different orders of
warps and times of copies, with the race detector. `make test` compiles few instances of the kernels and fits
the problems to them; .ci/run compiles them all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import modules
import pytest
import turns
from ptx_machine import host_build

from selfattn_ext.build import cuda_build

pytestmark = pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="no nvcc on this machine")

KERNELS = {"simt": 80, "sm80": 80, "sm90": 90}

#: The modules of ptx_machine.kernel_cases, with the share of their cases that runs with few instances (one of
#: so many), and the share that runs with all of them.
CASES = {
    "forward_cases": (6, 4),
    "backward_cases": (10, 8),
    "sequence_cases": (6, 4),
    "split_cases": (4, 3),
    "tangent_cases": (10, 8),
    "hopper_cases": (8, 8),
    "hopper_backward_cases": (10, 10),
}
#: Modules whose cases sm90 computes itself. (sm80 leaves tangents to simt.)
OF_SM90 = ("hopper_cases", "hopper_backward_cases", "sequence_cases")

#: An order that a device hardly ever has, with copies at the last moment. The other orders must not change a
#: bit.
MAIN = "5:late"
OTHERS = ["0:eager", "11:late", "0:late"]
#: Millions of products in the largest case of several orders.
MOST = 7

#: Existing tests that say something about a forced kernel, and pytest's expression that selects some of them;
#: the lists take turns.
CHOSEN: list[tuple[str, str]] = [
    ("test_batch_invariant.py", "together or another_way or caches or gradients_of or distances or behind"),
    # There is a number for each row, one for each column, or one for all.
    ("test_mask_sums.py", "float32 and (2x4x70x1- or 1x1x1x1030- or 1x1x1x1-)"),
    # Tests of threads are left out, because one thread executes the kernels.
    (
        "test_edge_cases.py test_determinism.py test_dropout.py test_batch_invariant.py",
        "not threads and not another_parallel_region and "
        "(not test_batch_invariant or every_kernel or packed_chunks)",
    ),
    ("test_declared_options.py test_masks.py test_gradients.py", "not never_expanded"),
]


def environment(kernel: str, few: bool, checked: bool = False, **variables: str) -> dict[str, str]:
    chosen = {"KERNEL": kernel, "PTX_CAPABILITY": str(KERNELS[kernel]), **variables}
    library = host_build.build(few=few, checked=checked)
    return host_build.environment(library, **{f"SELFATTN_{name}": value for name, value in chosen.items()})


def lines(cases: str, environment: dict[str, str], *choice: object) -> list[str]:
    """The output of a module of cases: a line for each case, with the digest of its results at the end."""
    run = subprocess.run(
        [sys.executable, "-m", f"ptx_machine.kernel_cases.{cases}", *map(str, choice)],
        env={**environment, "SELFATTN_PTX_PROFILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = "\n".join(line for line in run.stdout.splitlines() if "FAILED" in line)
    assert run.returncode == 0, failed + run.stderr
    # A kernel that never ran proves nothing: the machine lists the kernels that it has executed.
    kernel = environment["SELFATTN_KERNEL"]
    assert re.search(rf"selfattn4cuda4{kernel}", run.stderr), run.stderr
    return run.stdout.splitlines()


def of_each(cases: Iterable[str]) -> list[Any]:
    """(cases, kernel) as parameters; a process of pytest-xdist runs all tests of one of them."""
    return [
        pytest.param(it, kernel, id=f"{kernel}-{it}", marks=pytest.mark.xdist_group(f"{kernel} {it}"))
        for it in cases
        for kernel in KERNELS
        if (it in OF_SM90 if kernel == "sm90" else not it.startswith("hopper"))
        and (it, kernel) != ("tangent_cases", "sm80")
    ]


@pytest.mark.parametrize(("cases", "kernel"), of_each(CASES))
def test_cases_are_accurate_and_have_no_races(cases: str, kernel: str) -> None:
    every = CASES[cases][0]
    run = environment(kernel, few=True, PTX_RACES="1")
    assert len(lines(cases, run, every, 0, MOST, "--few", "--schedules", MAIN)) > 5


@pytest.mark.ptx_machine
@pytest.mark.parametrize(("cases", "kernel"), of_each(CASES))
def test_every_instance_is_accurate(cases: str, kernel: str) -> None:
    """All instances of the kernels; the shares of the cases take turns."""
    every = CASES[cases][1]
    for first in turns.chosen(range(every)):
        assert len(lines(cases, environment(kernel, few=False), every, first)) > 5


@pytest.mark.ptx_machine
@pytest.mark.parametrize(("cases", "kernel"), of_each(CASES))
def test_orders_do_not_change_a_bit(cases: str, kernel: str) -> None:
    """The bits are those of the main order, for which other tests say that the cases are accurate."""
    other = turns.chosen(OTHERS)[0]
    run = environment(kernel, few=True, PTX_RACES="1")
    found: dict[str, dict[str, str]] = {MAIN: {}, other: {}}
    every = CASES[cases][0]
    for line in lines(cases, run, every, 1, MOST, "--few", "--again", "--schedules", MAIN, other):
        order, case = line.split(" ", 1)
        case, digest = case.rsplit(" ", 1)
        found[order][case] = digest
    assert len(found[MAIN]) > 2
    assert found[other] == found[MAIN]


def test_heads_that_share_keys_are_folded(tmp_path: Path) -> None:
    """Four heads that share keys are folded into one item of work where that saves items, and each item has a
    block. Results do not show it.
    """
    program = """
import selfattn_ext, torch
for queries in (17, 100, 129):
    query = torch.zeros(1, 4, queries, 64, dtype=torch.bfloat16)
    selfattn_ext.scaled_dot_product_attention(query, query[:, :1], query[:, :1], enable_gqa=True)
"""
    counts = tmp_path / "counts"
    run = environment("sm90", few=True, PTX_COUNTS=str(counts))
    subprocess.run([sys.executable, "-c", program], env=run, check=True)
    launches = [json.loads(line) for line in counts.read_text(encoding="utf-8").splitlines()]
    assert [launch["grid"][0] for launch in launches] == [1, 4, 8]


@pytest.mark.sanitizers
@turns.only_in(1, 3)
@pytest.mark.parametrize(("cases", "kernel"), of_each(CASES))
def test_sanitizers_find_nothing_in_the_plans(cases: str, kernel: str) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer watch the host's sources, which plan launches."""
    options = host_build.sanitizers()
    if options is None:
        pytest.skip("the compiler has no libasan and libubsan to preload")
    run = environment(kernel, few=True, checked=True) | options
    assert len(lines(cases, run, CASES[cases][0], 2, MOST, "--few", "--again")) > 2


@pytest.mark.ptx_machine
@pytest.mark.parametrize(("names", "chosen"), [turns.chosen(CHOSEN)[0]])
@pytest.mark.parametrize("kernel", ["simt", "sm80"])
def test_existing_tests_pass(kernel: str, names: str, chosen: str) -> None:
    paths = [str(modules.paths()[name]) for name in names.split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", chosen],
        env=environment(kernel, few=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)
