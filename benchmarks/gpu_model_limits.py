"""Limits of GPUs, and a model of the least time that a kernel takes there.

A kernel's demands are divided by published limits; nothing here is measured. docs/cuda-performance.md ("What
bounds a kernel") has the formulas and the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LANES = 32
#: Operations of one mma.m16n8k16.
MMA_OPERATIONS = 2 * 16 * 8 * 16
SECTOR_BYTES = 32
SCHEDULERS = 4  # per multiprocessor; each issues one instruction of a warp per cycle
SPECIAL_LANES = 16  # results of ex2, rcp and others per cycle and multiprocessor

#: Classes of PTX instructions that ptxas leaves as they are. It makes more or fewer machine instructions of
#: the others: addresses become parts of loads and stores, moves and a kernel's parameters become operands.
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
        float32, float64: lanes per multiprocessor; each does one multiply-add per cycle.
        l2_bytes: bytes per cycle from the second-level cache, of the whole device.
        dram_bytes: bytes per second from memory.
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
    """Returns the PTX instructions that machine code certainly has, too.

    It also has integer arithmetic, comparisons and branches, which are not counted here.
    """
    return sum(counts[f"instructions.{name}"] for name in KEPT)


def ptx_issued(counts: Mapping[str, float]) -> float:
    """Returns all PTX instructions but moves and parameters.

    Machine code has fewer in plain loops; where options make most of a kernel, this is an estimate.
    """
    every = sum(count for name, count in counts.items() if name.startswith("instructions."))
    return every - counts["instructions.move"] - counts["instructions.parameter"]


def conflicts(counts: Mapping[str, float]) -> float:
    """Returns the share of shared memory's wavefronts that bank conflicts cause."""
    wavefronts = counts["shared.wavefronts"]
    return 1 - counts["shared.accesses"] / wavefronts if wavefronts else 0.0


def l2_sectors(counts: Mapping[str, float]) -> float:
    """Counts the sectors at the second-level cache: all copies and stores, but each load once per block."""
    beside = counts["copy.sectors"] + counts["store.sectors"] + counts["atomic.sectors"]
    return counts["sectors.loaded_by_blocks"] + beside


def dram_sectors(counts: Mapping[str, float]) -> float:
    """Counts the sectors read and written, each once, as if the second-level cache held all of them."""
    return counts["sectors.read"] + counts["sectors.written"]


@dataclass(frozen=True)
class Bound:
    """The least time by each resource alone, as if the others took none.

    `ptx_issue` is the time of issuing if machine code had all instructions of the PTX; it is not a bound.
    """

    seconds: Mapping[str, float]
    ptx_issue: float

    @property
    def resource(self) -> str:
        """The resource that takes longest."""
        return max(RESOURCES, key=lambda name: self.seconds[name])

    @property
    def least(self) -> float:
        return self.seconds[self.resource]

    def share(self, resource: str) -> float:
        """Returns the share of the least time that this resource needs."""
        return self.seconds[resource] / self.least if self.least else 0.0

    @property
    def next(self) -> str:
        """The resource that takes second longest."""
        return max(set(RESOURCES) - {self.resource}, key=lambda name: self.seconds[name])


def bound(counts: Mapping[str, float], device: Device) -> Bound:
    """Returns the least time of launches with these counts on a device.

    The model spreads work evenly over as many multiprocessors as have a block. It ignores imperfect overlap,
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
