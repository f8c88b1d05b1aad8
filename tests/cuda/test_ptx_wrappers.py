"""The answers of every PTX wrapper of ptx_sm80.cuh on the PTX machine.

They are compared with models in numpy (simulators/ptx_machine/wrapper_models.py) and with recordings. So the
text, operand order and constraints of inline PTX are tested, and the machine's arithmetic. These tests need
nvcc.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from nvcc_marks import runs_programs
from ptx_machine import build, probe, wrapper_models

pytestmark = runs_programs

WRAPPERS = (*wrapper_models.MODELS, "multiply_bfloat16", "multiply_float16")
GENERATIONS = tuple(wrapper_models.PRODUCTS_OF_STEP)
RECORDINGS = sorted([*probe.GOLDEN.glob("*.npz"), *probe.ORACLE.glob("*.npz")])


@pytest.fixture(scope="module")
def program() -> Path:
    return build.build("probe")


def words_of(wrapper: str, count: int) -> dict[str, probe.Words]:
    """The operands that devices are asked with, words of random bits, and for mma ordinary numbers."""
    generator = np.random.default_rng(5)
    wild = generator.integers(0, 2**32, (100, probe.LANES, count), dtype=np.uint32)
    sets = {"chosen": probe.operands_of(wrapper, count), "wild": wild}
    if wrapper.startswith("multiply"):
        shape = (100, probe.LANES)
        numbers = generator.standard_normal((*shape, 12)).astype(np.float32)
        accumulators = generator.standard_normal((*shape, 4)).astype(np.float32)
        packed = probe.bits(numbers, wrapper.removeprefix("multiply_"))
        sets["ordinary"] = np.concatenate([packed, accumulators.view(np.uint32)], axis=2)
    return sets


@pytest.mark.parametrize("capability", GENERATIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_answer_as_the_models(wrapper: str, capability: int, program: Path) -> None:
    count, results = probe.wrappers(program)[wrapper]
    environment = build.environment(SELFATTN_PTX_CAPABILITY=str(capability))
    for name, operands in words_of(wrapper, count).items():
        answers = probe.answers(program, wrapper, operands, results, environment)
        assert wrapper_models.differences(wrapper, capability, operands, answers) == 0, name


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_wrappers_answer_as_recorded(path: Path, program: Path) -> None:
    """The machine gives the recorded answers of devices (golden) and of a model of tensor cores (oracle), to
    the bit.
    """
    recording = probe.load(path)
    environment = build.environment(SELFATTN_PTX_CAPABILITY=str(recording.capability))
    count = recording.results.shape[-1]
    results = probe.answers(program, recording.wrapper, recording.operands, count, environment)
    assert probe.differences(recording, results) == 0, recording.source


@pytest.mark.parametrize("path", sorted(probe.ORACLE.glob("*.npz")), ids=lambda path: path.stem)
def test_the_models_of_products_allow_what_is_recorded(path: Path) -> None:
    """They do not allow it if the accumulators are left out."""
    recording = probe.load(path)
    asked = (recording.wrapper, recording.capability)
    assert wrapper_models.product_differences(*asked, recording.operands, recording.results) == 0
    without = recording.operands.copy()
    without[:, :, 6:] = 0
    assert wrapper_models.product_differences(*asked, without, recording.results) > 1000


def test_recordings_are_not_trivial() -> None:
    """The two generations of the oracle differ, so truncation matters."""
    for wrapper in ("multiply_bfloat16", "multiply_float16"):
        old, new = (probe.load(probe.ORACLE / f"{wrapper}-{capability}.npz") for capability in GENERATIONS)
        assert (old.operands == new.operands).all()
        assert (old.results != new.results).sum() > 100


def test_every_wrapper_has_a_probe(program: Path) -> None:
    header = (build.CSRC / "cuda" / "common" / "ptx_sm80.cuh").read_text(encoding="utf-8")
    defined = set(re.findall(r"__device__ __forceinline__ \w+ (\w+)\(", header))
    # These have an effect only together with a copy, or return their argument.
    without = {"shared_address", "copy_async_commit", "copy_async_wait", "opaque"}
    assert defined - without == set(probe.wrappers(program)) == set(WRAPPERS)


@pytest.mark.parametrize("wrapper", probe.DROPPED_BITS)
def test_numbers_that_are_rounded_include_ties(wrapper: str) -> None:
    """Half of the numbers are even where they are cut, and half are odd: only such numbers tell rounding to
    even from rounding away from zero.
    """
    dropped = probe.DROPPED_BITS[wrapper]
    words = probe.operands_of(wrapper, 2)
    tie = words & ((1 << dropped) - 1) == 1 << (dropped - 1)
    last_bits = words[tie] >> dropped & 1
    assert min((last_bits == 0).sum(), (last_bits == 1).sum()) > 100


def test_golden_files_can_be_recorded(program: Path, tmp_path: Path) -> None:
    """The machine takes the place of a device: every wrapper answers, and answers the same again."""
    environment = build.environment()
    recorded = probe.record(program, tmp_path, environment)
    assert len(recorded) == len(WRAPPERS)
    for path in recorded:
        recording = probe.load(path)
        assert (recording.source, recording.capability) == ("PTX machine", 90)
        count = recording.results.shape[-1]
        again = probe.answers(program, recording.wrapper, recording.operands, count, environment)
        assert probe.differences(recording, again) == 0
        damaged = recording.results.copy()
        damaged[0, 0, 0] ^= 1 << 20
        assert probe.differences(recording, damaged) == 1
