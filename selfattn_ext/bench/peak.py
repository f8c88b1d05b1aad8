"""The machine's peaks, measured in the same run: multiply-adds and bytes read per second.

Loops in csrc/peak that do nothing else measure both, on as many threads as torch has at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfattn_ext.bench.cases import Precision
from selfattn_ext.bench.timer import Timing
from selfattn_ext.build import library

#: Larger than the caches, so that memory is read.
READ_BYTES = 256 * 2**20

# The instruction sets that multiply pairs of bfloat16, and the one that does their other arithmetic.
_PAIRS = {"amx": "avx512", "avx512_bf16": "avx512"}

# The number of products of bfloat16 pieces in one product, by precision. float32 is the sum of three pieces,
# and the six largest of their nine products are needed; "high" has two pieces and needs three. float16 takes
# four for its scores and three for its values.
_PRODUCTS = {"highest": 6, "high": 3, "medium": 1}


@dataclass(frozen=True)
class Ceiling:
    """The most that one kind of arithmetic can attain on some number of threads."""

    isa: str
    gflops: float
    read_gbs: float

    def seconds(self, flops: float, bytes_read: float) -> float:
        """Returns the shortest possible time of some work: that of arithmetic or reading, the longer one."""
        return max(flops / self.gflops, bytes_read / self.read_gbs) / 1e9

    def bound(self, flops: float, bytes_read: float) -> str:
        """Returns which of the two is longer: the name of the instruction set, or "read"."""
        return self.isa if flops / self.gflops >= bytes_read / self.read_gbs else "read"


class Reading:
    """A call that reads about as much memory as a call of attention does.

    The two are timed in turns, because the bandwidth of a shared machine changes by half within minutes.
    """

    def __init__(self, bytes_read: int) -> None:
        self._memory = library.extension().MemoryReader(READ_BYTES)
        self.passes = max(1, round(bytes_read / READ_BYTES))
        self._share = bytes_read / (self.passes * READ_BYTES)

    def __call__(self) -> None:
        for _ in range(self.passes):
            self._memory.seconds()

    def timing(self, taken: Timing) -> Timing:
        """Scales the times of calls of this to the number of bytes that the attention reads."""
        return Timing(tuple(seconds * self._share for seconds in taken.samples))


class Meter:
    """Measures each peak once, on torch's current number of threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._gflops: dict[tuple[str, int], float] = {}
        self._read_gbs: dict[int, float] = {}

    def gflops(self, isa: str) -> float:
        """Returns GFLOP/s of one instruction set's multiply-adds: bfloat16 if it has those, else float32."""
        key = isa, torch.get_num_threads()
        if key not in self._gflops:
            self._gflops[key] = library.extension().multiply_add_gflops(isa, self._seconds)
        return self._gflops[key]

    def read_gbs(self) -> float:
        """Returns GB/s of reading memory."""
        threads = torch.get_num_threads()
        if threads not in self._read_gbs:
            self._read_gbs[threads] = library.extension().read_gbs(READ_BYTES, self._seconds)
        return self._read_gbs[threads]

    def ceiling(self, isa: str, dtype: torch.dtype, precision: Precision = "highest") -> Ceiling:
        """Returns the most that a kernel compiled for ``isa`` can attain in a dtype.

        It may use float multiply-adds, or products of bfloat16 pieces if the instruction set has them; the
        faster way counts.
        """
        vectors = _PAIRS.get(isa, isa)
        # A vector holds half as many doubles.
        found = Ceiling(vectors, self.gflops(vectors) / (2 if dtype == torch.float64 else 1), self.read_gbs())
        if isa not in _PAIRS or dtype == torch.float64:
            return found
        products = {torch.bfloat16: 1, torch.float16: 3.5}.get(dtype, _PRODUCTS[precision])
        pairs = self.gflops(isa) / products
        return Ceiling(isa, pairs, found.read_gbs) if pairs > found.gflops else found

    def measured(self) -> list[dict[str, object]]:
        """Returns everything measured so far as plain data."""
        rows: list[dict[str, object]] = [
            {"threads": threads, "isa": isa, "gflops": value}
            for (isa, threads), value in self._gflops.items()
        ]
        rows += [{"threads": threads, "read_gbs": value} for threads, value in self._read_gbs.items()]
        return rows
