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
from pathlib import Path

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
    "selected_cases": (4, 3),
    "tangent_cases": (10, 8),
    "hopper_cases": (8, 8),
    "hopper_backward_cases": (10, 10),
}
#: Modules whose cases only simt computes itself, and those that sm90 does.
OF_SIMT = ("selected_cases", "tangent_cases")
OF_SM90 = ("hopper_cases", "hopper_backward_cases", "sequence_cases")

#: An order that a device hardly ever has, with copies at the last moment. The other orders must not change a
#: bit.
MAIN = "5:late"
OTHERS = ["0:eager", "11:late", "0:late"]
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


def share_of(kernel: str, first: int) -> list[str]:
    """The cases of a kernel for few instances, as run_cases takes them."""
    return [f"{name}:{every}:{first}" for name, (every, _) in CASES.items() if judges(name, kernel)]


def turn_of(kernel: str) -> list[str]:
    """The cases of a kernel for all instances whose turn it is."""
    firsts = {name: turns.chosen(range(every)) for name, (_, every) in CASES.items() if judges(name, kernel)}
    return [f"{name}:{CASES[name][1]}:{it[0]}" if len(it) == 1 else name for name, it in firsts.items()]


def lines(kernel: str, environment: dict[str, str], *arguments: str) -> list[str]:
    """The output of a kernel's cases: a line for each, with the digest of its results at the end. One process
    runs them all, because its start takes as long as the cases of a module.
    """
    run = subprocess.run(
        [sys.executable, "-m", "ptx_machine.kernel_cases.run_cases", *arguments],
        env={**environment, "SELFATTN_PTX_PROFILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = "\n".join(line for line in run.stdout.splitlines() if "FAILED" in line)
    assert run.returncode == 0, failed + run.stderr
    # A kernel that never ran proves nothing: the machine lists the kernels that it has executed.
    assert re.search(rf"selfattn4cuda4{kernel}", run.stderr), run.stderr
    found = run.stdout.splitlines()
    begun = {word for line in found for word in line.split()[:2]}
    assert {name for name in CASES if judges(name, kernel)} <= begun
    return found


def judges(cases: str, kernel: str) -> bool:
    """Whether a kernel computes a module's cases."""
    if kernel == "sm90":
        return cases in OF_SM90
    return not cases.startswith("hopper") and (kernel == "simt" or cases not in OF_SIMT)


#: The instances that compile fast, and cases of at most 7 million products.
FEW = ("--few", "--most", "7")


@pytest.mark.parametrize("kernel", turns.chosen(list(KERNELS)))
def test_cases_are_accurate_and_have_no_races(kernel: str) -> None:
    """One kernel a turn: where turns are taken, the tests below look for races and errors of every kernel."""
    run = environment(kernel, few=True, PTX_RACES="1")
    assert len(lines(kernel, run, *share_of(kernel, 0), *FEW, "--schedules", MAIN)) > 25


@pytest.mark.ptx_machine
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instance_is_accurate(kernel: str) -> None:
    """All instances of the kernels; the shares of the cases take turns."""
    assert len(lines(kernel, environment(kernel, few=False), *turn_of(kernel))) > 25


@pytest.mark.ptx_machine
@pytest.mark.parametrize("kernel", KERNELS)
def test_orders_do_not_change_a_bit(kernel: str) -> None:
    """The bits are those of the main order, for which other tests say that the cases are accurate."""
    other = turns.chosen(OTHERS)[0]
    run = environment(kernel, few=True, PTX_RACES="1")
    found: dict[str, dict[str, str]] = {MAIN: {}, other: {}}
    for line in lines(kernel, run, *share_of(kernel, 1), *FEW, "--again", "--schedules", MAIN, other):
        order, case = line.split(" ", 1)
        case, digest = case.rsplit(" ", 1)
        found[order][case] = digest
    assert len(found[MAIN]) > 20
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
@pytest.mark.parametrize("kernel", KERNELS)
def test_sanitizers_find_nothing_in_the_plans(kernel: str) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer watch the host's sources, which plan launches."""
    options = host_build.sanitizers()
    if options is None:
        pytest.skip("the compiler has no libasan and libubsan to preload")
    run = environment(kernel, few=True, checked=True) | options
    assert len(lines(kernel, run, *share_of(kernel, 2), *FEW, "--again")) > 20


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
