"""A model of one multiprocessor that plays a loop as ptxas has scheduled it.

Four schedulers issue one instruction a cycle each, in order within a warp. Stall counts and scoreboards are
those of the machine code (sass.py). A unit of a scheduler is busy for the cycles of BUSY; requests to shared
memory wait in one queue for a unit that moves 128 bytes a cycle. Barriers and waits for asynchronous copies
hold warps up. The model ignores instruction fetch, banks of registers and of shared memory, the limits of L2
and DRAM, and the clock. So differences of a few points mean nothing, but rankings do.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import sass

SCHEDULERS = 4
#: Cycles for which a warp's instruction keeps a unit of its scheduler busy, by architecture: an HMMA of
#: 16 x 8 x 16 is 4,096 operations, of which an A100's multiprocessor does 2,048 a cycle and an H100's, by
#: mma.sync, about two thirds of its 4,096.
BUSY = {
    80: {"tensor": 8, "FMA": 2, "ALU": 2, "MUFU": 8},
    90: {"tensor": 6, "FMA": 1, "ALU": 2, "MUFU": 8},
}
#: Cycles from the last byte moved, or for MUFU from its end, to the result. Except by asynchronous copies,
#: loops load from global memory only what they have loaded before, so it is in the first-level cache.
LATENCY = {
    "LDSM": 25, "LDS": 22, "SHFL": 22, "MUFU": 18, "local": 40, "STS": 20, "global": 40, "special": 30,
}  # fmt: skip
#: Cycles from the first one of an LDSM to its result, with no other request before it.
LDSM_CYCLES = 29
_MEMORY = ("LDSM", "LDS", "STS", "SHFL", "LDGSTS", "global", "local")
_REQUESTS = 8  # requests to memory that a scheduler has under way before it stops
_COPY_CYCLES = 500  # the cycles of an asynchronous copy
_NEVER = float("inf")


@dataclass(frozen=True)
class Residents:
    """The blocks and warps that run on the multiprocessor at a time."""

    blocks: int
    warps: int  # per block


@dataclass
class _Warp:
    block: int
    ready: float
    at: int = 0  # the next instruction
    rounds: list[float] = field(default_factory=list)  # the end of each iteration
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * sass.SCOREBOARDS)
    groups: list[float] = field(default_factory=list)  # the arrival of each open group of copies
    copies: float = 0.0  # the arrival of the newest copy


def _bytes_cycles(instruction: sass.Instruction) -> int:
    """Returns the cycles of the unit for shared memory."""
    name = instruction.name
    if instruction.opcode == "LDSM":
        return 4 if ".4" in name else 2 if ".2" in name else 1
    if instruction.opcode == "LDGSTS":
        return 4
    if instruction.opcode == "LDS" and not re.search(r"\[R\d", instruction.operands):
        return 1  # all lanes read the same
    return 4 if ".128" in name else 2 if ".64" in name else 1


def _groups_left(instruction: sass.Instruction) -> int:
    """Returns how many groups of copies a DEPBAR leaves under way."""
    found = re.search(r"SB0, (0x[0-9a-f]+)", instruction.operands)
    return int(found[1], 16) if found else 0


class _Run:
    """A play of the loop, until every warp has gone through it ``rounds`` times."""

    def __init__(
        self, loop: Sequence[sass.Instruction], architecture: int, residents: Residents, apart: float
    ) -> None:
        self._loop, self._busy, self._residents = loop, BUSY[architecture], residents
        # Blocks begin at different times, and barriers end a little late, so that blocks do not synchronise.
        self._dice = random.Random(int(apart * 1000))
        length = sum(instruction.stall for instruction in loop)
        self._warps = [
            [
                _Warp(block, block * apart * length)
                for block in range(residents.blocks)
                for _ in range(scheduler, residents.warps, SCHEDULERS)
            ]
            for scheduler in range(SCHEDULERS)
        ]
        self._all = [warp for warps in self._warps for warp in warps]
        self._free: list[dict[str, float]] = [defaultdict(float) for _ in range(SCHEDULERS)]
        self._requests: list[list[float]] = [[] for _ in range(SCHEDULERS)]
        self._last: list[_Warp | None] = [None] * SCHEDULERS
        self._memory = 0.0  # the time until which the unit for shared memory is busy
        self._arrived = [0] * residents.blocks  # the warps of each block that wait at its barrier
        self.products: list[float] = []  # the time at which each HMMA began

    def play(self, rounds: int, greedy: bool) -> None:
        now = 0
        while any(len(warp.rounds) < rounds for warp in self._all):
            issued, soonest = False, _NEVER
            for scheduler in range(SCHEDULERS):
                for warp in self._order(scheduler, greedy):
                    if len(warp.rounds) >= rounds or warp.ready == _NEVER:
                        continue
                    at = self._earliest(scheduler, warp, now)
                    if at <= now:
                        self._issue(scheduler, warp, now)
                        issued = True
                        break
                    soonest = min(soonest, at)
            now = now + 1 if issued else max(now + 1, int(-(-soonest // 1)))

    def share(self) -> float:
        """Returns the share of time, without the first rounds, in which tensor cores work."""
        begin = max(warp.rounds[2] for warp in self._all)
        end = min(warp.rounds[-1] for warp in self._all)
        count = sum(begin <= at < end for at in self.products)
        return count * self._busy["tensor"] / SCHEDULERS / (end - begin)

    def _order(self, scheduler: int, greedy: bool) -> list[_Warp]:
        last = self._last[scheduler]
        return sorted(self._warps[scheduler], key=lambda w: ((w is last) != greedy, w.ready))

    def _earliest(self, scheduler: int, warp: _Warp, now: int) -> float:
        instruction = self._loop[warp.at]
        unit = instruction.unit
        at = max([warp.ready, *(warp.scoreboards[n] for n in instruction.waits)])
        if instruction.opcode == "DEPBAR" and warp.groups:
            at = max([at, *warp.groups[: len(warp.groups) - _groups_left(instruction)]])
        if unit in self._busy:
            # MUFU accepts another instruction before the first one has ended.
            at = max(at, self._free[scheduler][unit] - (self._busy[unit] if unit == "MUFU" else 0))
        if unit in _MEMORY:
            under_way = [end for end in self._requests[scheduler] if end > now]
            self._requests[scheduler] = under_way
            if len(under_way) >= _REQUESTS:
                at = max(at, min(under_way))
        return at

    def _issue(self, scheduler: int, warp: _Warp, now: int) -> None:
        instruction = self._loop[warp.at]
        end = self._execute(scheduler, warp, instruction, now)
        if instruction.opcode == "LDGDEPBAR":
            warp.groups = [*(there for there in warp.groups if there > now), max(warp.copies, now)]
        elif instruction.sets is not None:
            warp.scoreboards[instruction.sets] = max(warp.scoreboards[instruction.sets], end)
        if instruction.holds is not None:
            read = self._memory + 4 if instruction.unit in _MEMORY else now + 12
            warp.scoreboards[instruction.holds] = max(warp.scoreboards[instruction.holds], read)
        warp.ready = now + instruction.stall
        warp.at += 1
        if warp.at == len(self._loop):
            warp.at = 0
            warp.rounds.append(now)
        if instruction.opcode == "BAR":
            self._arrive(warp, now)
        self._last[scheduler] = warp

    def _execute(self, scheduler: int, warp: _Warp, instruction: sass.Instruction, now: int) -> float:
        """Keeps the instruction's unit busy. Returns the time at which the result is ready."""
        unit = instruction.unit
        if unit in self._busy:
            begin = max(now, self._free[scheduler][unit])
            end = begin + self._busy[unit]
            self._free[scheduler][unit] = end
            if unit == "tensor":
                self.products.append(begin)
            return end + LATENCY.get(unit, 0)
        if unit in _MEMORY:
            self._memory = max(now + 2, self._memory) + _bytes_cycles(instruction)
            self._requests[scheduler].append(self._memory)
            if unit == "LDGSTS":
                warp.copies = max(warp.copies, self._memory + _COPY_CYCLES)
            return self._memory + LATENCY.get(unit, 0)
        return now + (LATENCY["special"] if unit == "special" else 1)

    def _arrive(self, warp: _Warp, now: int) -> None:
        warp.ready = _NEVER
        self._arrived[warp.block] += 1
        if self._arrived[warp.block] == self._residents.warps:
            self._arrived[warp.block] = 0
            start = now + 15 + self._dice.randrange(60)
            for other in self._all:
                if other.block == warp.block:
                    other.ready = start


def tensor_share(
    loop: Sequence[sass.Instruction], architecture: int, residents: Residents, rounds: int = 9
) -> float:
    """Returns the share of time in which tensor cores work.

    It is the mean over four distances between the blocks and two ways to choose the next warp: the last one
    again, or another.
    """
    shares = []
    for apart in (0.03, 0.23, 0.43, 0.63):
        for greedy in (True, False):
            run = _Run(loop, architecture, residents, apart)
            run.play(rounds, greedy)
            shares.append(run.share())
    return sum(shares) / len(shares)


def load_distances(loop: Sequence[sass.Instruction]) -> list[int]:
    """Returns, for every LDSM, the cycles by stall counts until an instruction waits for its scoreboard."""
    begins = [0]
    for instruction in [*loop, *loop]:
        begins.append(begins[-1] + instruction.stall)
    found = []
    for index, load in enumerate(loop):
        if load.opcode != "LDSM" or load.sets is None:
            continue
        for later in range(index + 1, index + len(loop)):
            if load.sets in loop[later % len(loop)].waits:
                found.append(begins[later] - begins[index])
                break
    return found
