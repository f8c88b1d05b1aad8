"""Inputs and outputs of the PTX wrappers by programs/probe.cu, on the PTX machine or on a GPU.

Recordings are numpy archives with, for each wrapper, the source of the answers, the compute capability, and
the words that went in and came out. golden/ holds those of devices, and oracle/ those of mmasim, a published
model of tensor cores; tests replay both on the machine.

    python simulators/ptx_machine/probe.py PROGRAM FOLDER    record a device: PROGRAM is a compiled probe.cu
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
ORACLE = Path(__file__).parent / "oracle"

LANES = 32
PROBLEMS = 24
#: Wrappers whose results a device approximates, with the allowed difference in units in the last place.
APPROXIMATE = {"exp2_approx": 2}
#: Wrappers that round float32, with the number of bits that they drop.
DROPPED_BITS = {"pack_bfloat16": 16, "pack_float16": 13}

Words = np.ndarray  # of uint32: (problem, lane, operand or result)


@dataclass(frozen=True)
class Recording:
    wrapper: str
    source: str
    capability: int
    operands: Words
    results: Words

    def save(self, folder: Path) -> Path:
        """Writes FOLDER/WRAPPER-CAPABILITY.npz."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.wrapper}-{self.capability}.npz"
        np.savez_compressed(
            path,
            wrapper=self.wrapper,
            source=self.source,
            capability=self.capability,
            operands=self.operands,
            results=self.results,
        )
        return path


def load(path: Path) -> Recording:
    with np.load(path) as file:
        return Recording(
            str(file["wrapper"]),
            str(file["source"]),
            int(file["capability"]),
            file["operands"],
            file["results"],
        )


def wrappers(program: Path) -> dict[str, tuple[int, int]]:
    """The wrappers that a probe knows, with the numbers of their operands and results."""
    lines = subprocess.run([program, "list"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (int(operands), int(results)) for name, operands, results in map(str.split, lines)}


def answers(
    program: Path, wrapper: str, operands: Words, results: int, environment: dict[str, str] | None = None
) -> Words:
    """What the wrapper returns for these operands, by the probe."""
    problems = len(operands)
    done = subprocess.run(
        [program, wrapper, str(problems)],
        input=np.ascontiguousarray(operands, dtype=np.uint32).tobytes(),
        capture_output=True,
        check=True,
        env=environment,
    )
    return np.frombuffer(done.stdout, dtype=np.uint32).reshape(problems, LANES, results)


def floats(generator: np.random.Generator, shape: tuple[int, ...], style: int) -> np.ndarray:
    """Numbers in float32: ordinary, of very different sizes, cancelling, tiny and zero, or special."""
    normal = generator.standard_normal(shape).astype(np.float32)
    if style == 0:
        return normal
    if style == 1:
        return (normal * np.exp2(generator.integers(-14, 14, shape))).astype(np.float32)
    if style == 2:
        return generator.choice(np.float32([1, -1, 1.0078125, -1.0078125, 4096, -4096, 0.0009765625]), shape)
    if style == 3:
        tiny = normal * np.exp2(generator.integers(-140, -10, shape).astype(np.float64))
        return np.where(generator.random(shape) < 0.2, 0, tiny).astype(np.float32)
    special = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 65504, 65520, 1e-40])
    return np.where(generator.random(shape) < 0.03, generator.choice(special, shape), normal)


def bits(values: np.ndarray, format: str) -> Words:
    """The numbers rounded to a format, as words: float32, or bfloat16 and float16 in pairs."""
    if format == "float32":
        return values.astype(np.float32).view(np.uint32)
    if format == "float16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16).view(np.uint16)
    else:
        # Values are truncated, because any bfloat16 will do.
        half = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        half = np.where(np.isnan(values), np.uint16(0x7FC0), half)
    return np.ascontiguousarray(half).view(np.uint32)


def ties(values: np.ndarray, dropped: int) -> np.ndarray:
    """Numbers in the middle between two neighbours of a format with so many fewer bits than float32."""
    words = np.ascontiguousarray(values).view(np.uint32) >> np.uint32(dropped) << np.uint32(dropped)
    return (words | np.uint32(1 << (dropped - 1))).view(np.float32)


def operands_of(wrapper: str, count: int) -> Words:
    """Operands for PROBLEMS problems of a wrapper, the same at every call."""
    generator = np.random.default_rng(sum(map(ord, wrapper)))
    problems = []
    for problem in range(PROBLEMS):
        style = problem % 5
        if wrapper.startswith("multiply"):
            format = wrapper.removeprefix("multiply_")
            parts = [
                bits(floats(generator, (LANES, 12), style), format),
                bits(floats(generator, (LANES, 4), style), "float32"),
            ]
            problems.append(np.concatenate(parts, axis=1))
        elif wrapper.startswith(("load_matrix", "copy_async")):
            words = generator.integers(0, 2**32, (LANES, count), dtype=np.uint32)
            # Rows are in order, permuted, or shared by several lanes.
            order = [np.arange(LANES), generator.permutation(LANES), generator.integers(0, LANES, LANES)]
            words[:, 0] = order[problem % 3]
            problems.append(words)
        else:
            values = floats(generator, (LANES, count), style)
            if wrapper in DROPPED_BITS and problem % 2 == 1:
                values = ties(values, DROPPED_BITS[wrapper])
            problems.append(bits(values * (30 if wrapper == "exp2_approx" else 1), "float32"))
    return np.stack(problems)


def differences(recording: Recording, results: Words) -> int:
    """How many results differ from the recorded ones, by more than APPROXIMATE allows where it allows a
    difference.
    """
    expected = recording.results
    allowed = APPROXIMATE.get(recording.wrapper, 0)
    # As integers, the bits of neighbouring numbers of the same sign differ by 1.
    apart = np.abs(expected.astype(np.int64) - results.astype(np.int64))
    both_nan = np.isnan(expected.view(np.float32)) & np.isnan(results.view(np.float32))
    return int(((apart > allowed) & ~(both_nan & (allowed > 0))).sum())


def record(program: Path, folder: Path, environment: dict[str, str] | None = None) -> list[Path]:
    """Asks a probe for the results of every wrapper, and writes a recording."""
    asked = [program, "device"]
    device = subprocess.run(asked, check=True, capture_output=True, text=True, env=environment).stdout
    capability, _, name = device.strip().partition(" ")
    paths = []
    for wrapper, (count, results) in wrappers(program).items():
        operands = operands_of(wrapper, count)
        answer = answers(program, wrapper, operands, results, environment)
        paths.append(Recording(wrapper, name, int(capability), operands, answer).save(folder))
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for path in record(Path(sys.argv[1]).resolve(), Path(sys.argv[2])):
        print(path)
