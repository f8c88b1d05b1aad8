"""Machine code as nvdisasm prints it: instructions with their control bits, and main loops.

ptxas schedules when compiling: the control bits of every instruction say for how many cycles its warp stops
after it, which of six scoreboards it sets until its results are ready (or its operands read), and which
scoreboards it waits for.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SCOREBOARDS = 6
PRODUCTS = ("HMMA", "HGMMA")  # of a warp, of a warpgroup

# The unit that executes an opcode. The ALU executes all others: integer arithmetic, compares, selections.
_UNITS = {
    "HMMA": "tensor",
    "FFMA": "FMA", "FMUL": "FMA", "FADD": "FMA", "HFMA2": "FMA", "IMAD": "FMA",
    "MUFU": "MUFU",
    "LDSM": "LDSM", "LDS": "LDS", "STS": "STS", "SHFL": "SHFL", "LDGSTS": "LDGSTS",
    "LDG": "global", "STG": "global", "RED": "global", "ATOM": "global", "ATOMG": "global",
    "LDL": "local", "STL": "local",
    "BAR": "barrier", "DEPBAR": "wait", "LDGDEPBAR": "wait",
    "S2R": "special", "NOP": "none",
    "BRA": "control", "BSSY": "control", "BSYNC": "control", "CALL": "control", "RET": "control",
    "EXIT": "control", "BREAK": "control", "WARPSYNC": "control",
}  # fmt: skip

_SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"(\.L_[\w.$]+|\$[\w$]+):")
_LOW_WORD = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*\}?\s*/\* 0x\w+ \*/"
)
_HIGH_WORD = re.compile(r"\s*/\* (0x\w+) \*/")


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``name`` is its opcode with modifiers, ``control`` the 21 control bits."""

    predicate: str
    name: str
    operands: str
    control: int = 0

    @cached_property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def unit(self) -> str:
        """The unit that executes it."""
        if self.opcode.startswith("U"):
            return "uniform"
        return _UNITS.get(self.opcode, "ALU")

    @property
    def stall(self) -> int:
        """The cycles until the warp's next instruction."""
        return max(1, self.control & 15)

    @property
    def sets(self) -> int | None:
        """The scoreboard that is set until its result is ready."""
        return _scoreboard(self.control >> 5)

    @property
    def holds(self) -> int | None:
        """The scoreboard that is set until its operands have been read."""
        return _scoreboard(self.control >> 8)

    @cached_property
    def waits(self) -> tuple[int, ...]:
        """The scoreboards that must be free before it issues."""
        return tuple(n for n in range(SCOREBOARDS) if self.control >> 11 + n & 1)

    @property
    def jumps(self) -> bool:
        """Whether it jumps within the function. ptxas jumps by CALL, too; BRA.DIV is for diverged warps."""
        return (self.opcode == "BRA" and ".DIV" not in self.name) or (
            self.opcode == "CALL" and "`(.L_" in self.operands
        )

    @property
    def ends_block(self) -> bool:
        return self.jumps or self.opcode in ("BRA", "EXIT", "RET", "BRX")

    @property
    def leaves(self) -> bool:
        """Whether it never goes on to the next instruction."""
        return self.opcode in ("EXIT", "RET", "BRX") and not self.predicate

    @property
    def may_fall_through(self) -> bool:
        return bool(self.predicate) or "P" in self.operands.split("`")[0]


def _scoreboard(bits: int) -> int | None:
    return None if bits & 7 >= SCOREBOARDS else bits & 7


@dataclass
class Function:
    """A function of a cubin."""

    name: str  # mangled
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # of instructions

    def count(self, *opcodes: str) -> int:
        return sum(instruction.opcode in opcodes for instruction in self.code)

    def target(self, instruction: Instruction) -> int | None:
        """Returns the index of the instruction that a jump leads to."""
        found = re.search(r"`\(([^)]+)\)", instruction.operands)
        return self.labels.get(found[1]) if found else None


def read(nvdisasm: str, cubin: Path) -> list[Function]:
    """Returns the functions of a cubin that contain code."""
    command = [nvdisasm, "-c", "-hex", str(cubin)]
    return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> list[Function]:
    """Parses what ``nvdisasm -c -hex`` prints: 128 bits per instruction, in two lines."""
    functions: list[Function] = []
    waiting: list[str] = []  # labels of the next instruction
    for line in text.splitlines():
        if match := _SECTION.match(line):
            functions.append(Function(match[1]))
            waiting.clear()
        elif not functions:
            continue
        elif match := _LABEL.match(line):
            waiting.append(match[1])
        elif match := _LOW_WORD.match(line):
            function = functions[-1]
            function.labels.update(dict.fromkeys(waiting, len(function.code)))
            waiting.clear()
            function.code.append(Instruction((match[1] or "").strip(), match[2], match[3]))
        elif (match := _HIGH_WORD.match(line)) and functions[-1].code:
            last = functions[-1].code[-1]
            control = int(match[1], 16) >> 41
            functions[-1].code[-1] = Instruction(last.predicate, last.name, last.operands, control)
    return [function for function in functions if function.code]


class _Flow:
    """The basic blocks of a function: ranges of instructions, and the successors of each."""

    def __init__(self, function: Function) -> None:
        self._function = function
        code = function.code
        cuts = {0, *function.labels.values()}
        cuts |= {index + 1 for index, instruction in enumerate(code) if instruction.ends_block}
        begins = sorted(cut for cut in cuts if cut < len(code))
        self.blocks = list(zip(begins, [*begins[1:], len(code)], strict=True))
        self._block_at = {begin: number for number, begin in enumerate(begins)}
        self.successors = [self._successors_of(number) for number in range(len(self.blocks))]
        self.back, self.order = self._walk()

    def code_of(self, block: int) -> list[Instruction]:
        return self._function.code[slice(*self.blocks[block])]

    def _successors_of(self, block: int) -> list[int]:
        last = self._function.code[self.blocks[block][1] - 1]
        following = [] if last.leaves or block + 1 >= len(self.blocks) else [block + 1]
        if not last.jumps:
            return following
        target = self._function.target(last)
        jump = [] if target is None else [self._block_at[target]]
        return list(dict.fromkeys(jump + (following if last.may_fall_through else [])))

    def _walk(self) -> tuple[set[tuple[int, int]], list[int]]:
        """Returns the back edges, and the blocks in an order in which all other edges lead forward."""
        back: set[tuple[int, int]] = set()
        done: list[int] = []
        open_, seen = {0}, {0}
        stack: list[tuple[int, Iterator[int]]] = [(0, iter(self.successors[0]))]
        while stack:
            block, following = stack[-1]
            for successor in following:
                if successor in open_:
                    back.add((block, successor))
                elif successor not in seen:
                    seen.add(successor)
                    open_.add(successor)
                    stack.append((successor, iter(self.successors[successor])))
                    break
            else:
                open_.discard(block)
                done.append(block)
                stack.pop()
        return back, done[::-1]

    def loops(self) -> dict[int, set[int]]:
        """Returns the natural loops by their first block."""
        predecessors = defaultdict(list)
        for block in self.order:
            for successor in self.successors[block]:
                predecessors[successor].append(block)
        found: dict[int, set[int]] = defaultdict(set)
        for tail, header in self.back:
            body, work = {header}, [tail]
            while work:
                block = work.pop()
                if block not in body:
                    body.add(block)
                    work += predecessors[block]
            found[header] |= body
        return found


def main_loop(function: Function) -> list[Instruction]:
    """Returns one iteration of the loop with most products, HMMA or HGMMA, without those of loops within it.

    If several loops have as many, the one with the shortest path counts. Among the paths through the loop it
    is the one with most products, then with most asynchronous copies, so that neither products nor loads are
    skipped, then with fewest instructions, so that rare code is left out.
    """
    flow = _Flow(function)
    loops = flow.loops()
    own: Counter[int] = Counter()
    for block in flow.order:
        around = [header for header, body in loops.items() if block in body]
        if around:
            own[min(around, key=lambda header: len(loops[header]))] += _count(flow.code_of(block), *PRODUCTS)
    most = [header for header in own if own[header] == max(own.values())]
    paths = [_best_path(flow, header, loops[header]) for header in most]
    found = [[instruction for block in path for instruction in flow.code_of(block)] for path in paths]
    return min(found, key=len)


def _best_path(flow: _Flow, header: int, body: set[int]) -> list[int]:
    best = {header: (_worth(flow.code_of(header)), [header])}
    for block in flow.order:
        if block not in body or block not in best:
            continue
        worth, path = best[block]
        for successor in flow.successors[block]:
            if successor not in body or successor == header or (block, successor) in flow.back:
                continue
            more = _worth(flow.code_of(successor))
            found = (worth[0] + more[0], worth[1] + more[1], worth[2] + more[2])
            if successor not in best or found > best[successor][0]:
                best[successor] = (found, [*path, successor])
    return max(best[block] for block in body if block in best and header in flow.successors[block])[1]


def _worth(code: list[Instruction]) -> tuple[int, int, int]:
    return _count(code, *PRODUCTS), _count(code, "LDGSTS"), -len(code)


def _count(code: Iterable[Instruction], *opcodes: str) -> int:
    return sum(instruction.opcode in opcodes for instruction in code)
