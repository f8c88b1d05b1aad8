"""A model of the inner loops of products for NEON: floating-point operations per cycle, by llvm-mca.

    python scripts/arm64/model.py

llvm-mca plays the machine code of a loop on its model of a processor. The code is what the cross compilers
make of csrc/cpu/isa/kernels_neon.cpp: g++ of Debian and clang of the package ziglang. The model knows no
caches and no memory. Nothing here is a measurement.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import userland
from userland import FOLDER, ROOT, SITE

#: The floating-point operations of float32 that a processor can do in a cycle: four lanes of its pipes.
PEAKS = {"neoverse-n1": 16, "neoverse-v1": 32, "neoverse-v2": 32}
COMPILERS = {
    "g++": [userland.COMPILER],
    "clang": [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"],
}
LOOPS = {
    "K times queries, float": ("multiply_tile<float, 6, 3, false, false>", 8),
    "V times weights, float": ("multiply_tile<float, 6, 3, false, true>", 8),
    "K times queries, double": ("multiply_tile<double, 6, 3, false, false>", 4),
    "V times weights, double": ("multiply_tile<double, 6, 3, false, true>", 4),
}
_MCA = "llvm-mca-19"
_ITERATIONS = 1000


class Loop(NamedTuple):
    """The innermost loop of a function, and what is said about it."""

    instructions: list[str]

    @property
    def products(self) -> int:
        return sum(line.startswith("fmla") for line in self.instructions)

    @property
    def spills(self) -> int:
        """Loads and stores of the stack, where a loop keeps what has no register."""
        return sum("[sp" in line for line in self.instructions)


def compiled(name: str, command: list[str]) -> Path:
    flags = runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py"))["compile_flags"]()
    made = FOLDER / f"kernels_neon.{name}.o"
    source = ROOT / "csrc" / "cpu" / "isa" / "kernels_neon.cpp"
    subprocess.run(
        [*command, *flags, "-fPIC", f"-I{SITE / 'torch' / 'include'}", "-c", source, "-o", made], check=True
    )
    return made


def functions(path: Path) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The name of each function of an object file, with its instructions and their addresses."""
    command = ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for block in text.split("\n\n"):
        named = re.search(r"^[0-9a-f]+ <(.*)>:$", block, re.M)
        if named is not None:
            lines = re.findall(r"^ *([0-9a-f]+):\t(.*)$", block, re.M)
            yield named[1], [(int(address, 16), line.replace("\t", " ")) for address, line in lines]


def innermost(instructions: list[tuple[int, str]]) -> Loop:
    """The loop with the most multiply-adds among those that hold no other loop."""
    found = []
    for place, (address, line) in enumerate(instructions):
        jump = re.match(r"(?:b\.\w+|cbn?z \w+,|tbn?z \w+, #\d+,) ?([0-9a-f]+) <", line)
        if jump is not None and (target := int(jump[1], 16)) < address:
            body = [each for at, each in instructions[:place] if at >= target]
            if not any(re.match(r"b\.|cb|tb|ret|bl ", each) for each in body):
                found.append(Loop([*body, re.sub(r"[0-9a-f]+ <.*", "loop", line)]))
    return max(found, key=lambda loop: loop.products)


def cycles(loop: Loop, processor: str) -> float:
    """The cycles of an iteration."""
    # Comments of the disassembler are no assembly.
    text = "loop:\n" + "\n".join(line.partition("//")[0] for line in loop.instructions)
    command = [_MCA, "-march=aarch64", f"-mcpu={processor}", f"-iterations={_ITERATIONS}"]
    report = subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
    total = re.search(r"Total Cycles:\s+(\d+)", report)
    assert total is not None, report
    return int(total[1]) / _ITERATIONS


def main() -> None:
    userland.make()
    heads = [f"{processor} of {peak}" for processor, peak in PEAKS.items()]
    print("| loop | compiler | spills |", " | ".join(heads), "|")
    print("|---" * (3 + len(heads)) + "|")
    for compiler, command in COMPILERS.items():
        code = dict(functions(compiled(compiler, command)))
        for title, (function, operations) in LOOPS.items():
            (loop,) = (innermost(its) for name, its in code.items() if f"neon::{function}" in name)
            cells = []
            for processor, peak in PEAKS.items():
                speed = loop.products * operations / cycles(loop, processor)
                cells.append(f"{speed:.1f}, {speed / (peak * operations / 8):.0%}")
            print(f"| {title} | {compiler} | {loop.spills} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
