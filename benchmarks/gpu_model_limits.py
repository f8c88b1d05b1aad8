"""A model of the least time that a kernel takes on a GPU: what it asks for, over published limits.

Nothing here is measured. docs/cuda-performance.md ("What bounds a kernel") has the formulas and the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LANES = 32
#: Operations of one mma.m16n8k16.
MMA_OPERATIONS = 2 * 16 * 8 * 16
SECTOR_BYTES = 32
SCHEDULERS = 4  # of a multiprocessor, an instruction of a warp each in a cycle
SPECIAL_LANES = 16  # results of ex2, rcp and others in a cycle of a multiprocessor

#: Classes of PTX instructions that ptxas leaves as they are. Of the others it makes more or fewer: addresses
#: become parts of loads and stores, moves and a kernel's parameters become operands.
KEPT = (
    *("mma_bfloat16", "mma_float16", "float32", "float32_choice", "float64", "float16", "conversion"),
    *("special", "ldmatrix", "shared_load", "shared_store", "global_load", "global_store", "atomic"),
    *("copy", "copy_wait", "shuffle", "vote", "barrier", "warp_barrier"),
)


@dataclass(frozen=True)
class Device:
    """Published limits; `clock` is the one at which the tensor cores have their published peak.

    Attributes:
        tensor: operations per second of dense bfloat16 products with float sums.
        float32, float64: lanes of a multiprocessor, one multiply-add in a cycle each.
        l2_bytes: in a cycle, of the whole device.
        dram_bytes: in a second.
    """

    name: str
    multiprocessors: int
    clock: float
    tensor: float
    float32: int
    float64: int
    l2_bytes: int
    dram_bytes: float


A100 = Device("A100 SXM 80 GB", 108, 1.41e9, 312e12, 64, 32, 5120, 2.039e12)
H100 = Device("H100 SXM", 132, 1.83e9, 989.4e12, 128, 64, 132 * 64, 3.35e12)
H200 = Device("H200 SXM", 132, 1.83e9, 989.4e12, 128, 64, 132 * 64, 4.8e12)
RTX4090 = Device("RTX 4090", 128, 2.52e9, 165.2e12, 128, 2, 128 * 64, 1.008e12)
DEVICES = (A100, H100, H200, RTX4090)

RESOURCES = ("tensor", "float", "special", "issue", "shared", "L2", "DRAM")


def tensor_products(counts: Mapping[str, float]) -> float:
    return counts["instructions.mma_bfloat16"] + counts["instructions.mma_float16"]


def issued(counts: Mapping[str, float]) -> float:
    """Instructions that warps issue in machine code, too; beside them it has integer arithmetic, comparisons
    and branches."""
    return sum(counts[f"instructions.{name}"] for name in KEPT)


def ptx_issued(counts: Mapping[str, float]) -> float:
    """All instructions of the PTX but moves and parameters: more than machine code has in plain loops, and an
    estimate where options make most of a kernel."""
    every = sum(count for name, count in counts.items() if name.startswith("instructions."))
    return every - counts["instructions.move"] - counts["instructions.parameter"]


def conflicts(counts: Mapping[str, float]) -> float:
    """The share of the wavefronts of shared memory that are there for bank conflicts."""
    wavefronts = counts["shared.wavefronts"]
    return 1 - counts["shared.accesses"] / wavefronts if wavefronts else 0.0


def l2_sectors(counts: Mapping[str, float]) -> float:
    """Copies and stores go to the second-level cache each time, loads once for each block."""
    beside = counts["copy.sectors"] + counts["store.sectors"] + counts["atomic.sectors"]
    return counts["sectors.loaded_by_blocks"] + beside


def dram_sectors(counts: Mapping[str, float]) -> float:
    """What is read and what is written, each once: as if the second-level cache held all of it."""
    return counts["sectors.read"] + counts["sectors.written"]


@dataclass(frozen=True)
class Bound:
    """The least time by each resource alone, as if nothing else took any; and what issuing would take if
    machine code had all instructions of the PTX, which bounds nothing."""

    seconds: Mapping[str, float]
    ptx_issue: float

    @property
    def resource(self) -> str:
        """The one that takes longest."""
        return max(RESOURCES, key=lambda name: self.seconds[name])

    @property
    def least(self) -> float:
        return self.seconds[self.resource]

    def share(self, resource: str) -> float:
        """Of the least time, how much this resource needs."""
        return self.seconds[resource] / self.least if self.least else 0.0

    @property
    def next(self) -> str:
        """The resource that takes longest but for one."""
        return max(set(RESOURCES) - {self.resource}, key=lambda name: self.seconds[name])


def bound(counts: Mapping[str, float], device: Device) -> Bound:
    """What a launch of so many blocks asks of the device.

    Work is spread evenly over as many multiprocessors as have a block. Left out are what does not overlap,
    the last wave of blocks, the launch, latencies and registers.
    """
    busy = min(float(device.multiprocessors), counts["blocks"])
    cycles = busy * device.clock
    float_lanes = LANES * (
        counts["instructions.float32"] / device.float32 + counts["instructions.float64"] / device.float64
    )
    tensor = device.tensor * busy / device.multiprocessors
    return Bound(
        {
            "tensor": tensor_products(counts) * MMA_OPERATIONS / tensor,
            "float": float_lanes / cycles,
            "special": counts["instructions.special"] * LANES / SPECIAL_LANES / cycles,
            "issue": issued(counts) / SCHEDULERS / cycles,
            "shared": counts["shared.least"] / cycles,
            "L2": l2_sectors(counts) * SECTOR_BYTES / (device.l2_bytes * device.clock),
            "DRAM": dram_sectors(counts) * SECTOR_BYTES / device.dram_bytes,
        },
        ptx_issued(counts) / SCHEDULERS / cycles,
    )
