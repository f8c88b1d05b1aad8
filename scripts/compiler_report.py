"""Parsers of what ptxas and nvdisasm print about compiled CUDA kernels."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# Remarks of ptxas about slow code: barriers that it inserts, and matrix instructions that it serialises.
_REMARK = re.compile(r"^.*\(C75\d\d\).*$", re.M)

_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
# An instruction with its predicate: /*0050*/ @!P0 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel, as ptxas reports them."""

    registers: int
    stack_bytes: int
    spill_bytes: int  # stores and loads
    static_shared_bytes: int


def usage_of_kernels(report: str) -> dict[str, Usage]:
    """Returns kernels' usage by mangled name, from the output of ``-Xptxas -v``; skips other functions."""
    found: dict[str, Usage] = {}
    entries: set[str] = set()
    function, stack, spill = "", 0, 0
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entries.add(match[1])
        elif match := _PROPERTIES.search(line):
            function, stack, spill = match[1], 0, 0
        elif match := _STACK.search(line):
            stack, spill = int(match[1]), int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and function in entries:
            shared = _SHARED.search(line)
            found[function] = Usage(int(match[1]), stack, spill, int(shared[1]) if shared else 0)
    return found


def remarks(report: str) -> list[str]:
    """Returns the lines of ptxas's report that are only remarks to it, but errors here."""
    return [match[0].strip() for match in _REMARK.finditer(report)]


def errors(report: str) -> list[str]:
    """Returns the lines that say what stopped nvcc, or the last ones if there are none."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return [line for line in lines if re.search(r"\berror\b", line)][:20] or lines[-20:]


def instructions(sass: str) -> dict[str, Counter[str]]:
    """Counts each opcode, without modifiers, in each function of nvdisasm's text.

    Accesses of 16 bytes are counted a second time, as "STG.128".
    """
    found: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in sass.splitlines():
        if match := _FUNCTION.match(line):
            current = found.setdefault(match[1], Counter())
        elif match := _INSTRUCTION.match(line):
            current[match[1]] += 1
            if ".128" in match[2]:
                current[f"{match[1]}.128"] += 1
    return found


def function_names(mangled: Iterable[str]) -> dict[str, str]:
    """Returns each function's name without namespaces, template arguments and parameters, by binutils."""
    names = list(mangled)
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return {name: _bare(line) for name, line in zip(names, run.stdout.splitlines(), strict=True)}


def _bare(declaration: str) -> str:
    qualified = re.split(r"[<(]", declaration.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return re.split(r"::|\s", qualified.strip())[-1]
