"""Counts of the CUDA kernels, made on the PTX machine with the calls of gpu_model_cases.py.

The counts of whole calls are derived from those of the smaller calls that the machine runs.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_model_cases import Run, Shape, shapes

from selfattn_ext.terminal import CommandError

ROOT = Path(__file__).resolve().parents[1]

#: Counts of a kernel in one run, by the names in the file joined by a dot: "load.sectors".
Counts = dict[str, float]

_SIDES = {
    "sm80": ("queries", "keys", "dK", "dV", "mask"),
    "simt": ("queries", "keys", "mask"),
}
_PATHS = ("bare", "options", "few queries")


@dataclass(frozen=True)
class Kernel:
    """The counts of all launches of one kernel in a call, and their deviation.

    The deviation is the largest relative difference between a count of the verifying runs and the count that
    is derived from the others.
    """

    name: str
    counts: Counts
    deviation: float


def short_name(signature: str) -> str:
    """Returns a short name such as "sm80 forward, bare" for the signature of a kernel."""
    found = re.search(r"selfattn::cuda::((?:\w+::)*)(?:\(anonymous namespace\)::)?(\w+)", signature)
    if found is None:
        return signature
    place = found[1].split("::")[0]
    name = found[2].removesuffix("_kernel").replace("_", " ")
    side = re.search(r"Side\)(\d)", signature)
    path = re.search(r"Path\)(\d)", signature)
    of_side = _SIDES[place][int(side[1])] if side and place in _SIDES else ""
    of_path = _PATHS[int(path[1])] if path else ""
    return ", ".join(filter(None, [f"{place} {name}".strip(), of_side, of_path]))


def flat(line: Mapping[str, Any]) -> Counts:
    counts = {"launches": 1.0, "blocks": float(line["grid"][0] * line["grid"][1] * line["grid"][2])}
    for group, values in line.items():
        if isinstance(values, dict):
            counts |= {f"{group}.{name}": float(value) for name, value in values.items()}
    return counts


def read(text: str) -> dict[tuple[int, str], dict[str, Counts]]:
    """Returns, by shape and run, the counts of each kernel; torch's own kernels are left out."""
    runs: dict[tuple[int, str], dict[str, Counts]] = {}
    kernels: dict[str, Counts] = {}
    for line in map(json.loads, text.splitlines()):
        if "run" in line:
            kernels = runs.setdefault((line["shape"], line["run"]), {})
        elif "selfattn" in line["kernel"]:
            of_launch = flat(line)
            before = kernels.setdefault(short_name(line["kernel"]), dict.fromkeys(of_launch, 0.0))
            for name, count in of_launch.items():
                before[name] += count
    return runs


def between(points: Mapping[int, Counts], at: int) -> Counts:
    """Evaluates the polynomial through the counts at these places at another place."""
    result = dict.fromkeys(next(iter(points.values())), 0.0)
    for here, counts in points.items():
        weight = math.prod((at - other) / (here - other) for other in points if other != here)
        for name in result:
            result[name] += weight * counts[name]
    return result


def predicted(shape: Shape, runs: Mapping[str, Counts], length: int, heads: int) -> Counts:
    """Returns the counts of a kernel in a run, derived from those that are counted."""
    by_heads = {}
    for few in shape.few_heads[:-1]:
        points = {of: runs[str(Run(of, few))] for of in shape.lengths}
        by_heads[few] = between(points, length)
    return between(by_heads, heads)


def deviation(expected: Counts, found: Counts) -> float:
    """Returns the largest relative difference.

    It is relative to at least 100, and to at least a thousandth of the instructions or of the sectors.
    """
    instructions = sum(value for name, value in found.items() if name.startswith("instructions."))
    sectors = sum(value for name, value in found.items() if name.endswith(".sectors"))
    worst = 0.0
    for name, value in found.items():
        floor = 1e-3 * (sectors if "sectors" in name else instructions)
        worst = max(worst, abs(expected[name] - value) / max(value, floor, 100.0))
    return worst


def whole_call(shape: Shape, runs: Mapping[str, Mapping[str, Counts]]) -> list[Kernel]:
    """Returns the kernels of a call, derived from those of its runs, by name.

    Raises:
        CommandError: the runs did not launch the same kernels.
    """
    names = list(next(iter(runs.values())))
    if any(set(kernels) != set(names) for kernels in runs.values()):
        raise CommandError(f"runs of {shape.case} launch different kernels: {runs.keys()}", exit_code=1)
    found = []
    for name in names:
        of_kernel = {run: kernels[name] for run, kernels in runs.items()}
        worst = max(
            deviation(predicted(shape, of_kernel, run.length, run.heads), of_kernel[str(run)])
            for run in shape.checked()
        )
        found.append(Kernel(name, predicted(shape, of_kernel, shape.case.length, shape.heads), worst))
    return found


def run(numbers: Sequence[int], file: Path) -> None:
    """Runs the shapes of these numbers on the machine, which writes its counts into the file.

    The machine and the library are built first if necessary.

    Raises:
        CommandError: there is no nvcc or no torch with CUDA, or a run failed.
    """
    sys.path[:0] = [str(ROOT / "simulators")]
    from ptx_machine import build  # imports the package

    try:
        library = Path(os.environ.get("SELFATTN_LIBRARY") or build.build_package())
        environment = build.environment_for_torch(library, SELFATTN_PTX_COUNTS=str(file))
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_model_cases.py"), *map(str, numbers)]
        subprocess.run(command, env=environment, check=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise CommandError(str(error), exit_code=1) from error


def count(numbers: Sequence[int], kept: Path | None = None) -> list[tuple[Shape, list[Kernel]]]:
    """Returns the kernels of the shapes of these numbers.

    Args:
        numbers: indices of shapes.
        kept: the file in which the machine's counts are kept. If it exists, its counts are used.

    Raises:
        CommandError: as run() does, or if the file lacks a shape.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = kept or Path(folder) / "counts.json"
        if not file.exists():
            run(numbers, file)
        runs = read(file.read_text(encoding="utf-8"))
    found = []
    for number in numbers:
        shape = shapes()[number]
        of_shape = {name: kernels for (of, name), kernels in runs.items() if of == number}
        if set(of_shape) != {str(run) for run in (*shape.counted(), *shape.checked())}:
            raise CommandError(f"{file} lacks runs of {shape.case}", exit_code=1)
        found.append((shape, whole_call(shape, of_shape)))
    return found
