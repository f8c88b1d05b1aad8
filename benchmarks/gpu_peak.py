"""The peaks of a GPU, measured in the same run: a large matrix product and a large copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from selfattn_ext.bench.cases import Case, Precision
from selfattn_ext.bench.timer import Clock, best_seconds


@dataclass(frozen=True)
class Ceiling:
    """Operations per second of a matrix product in one arithmetic, bytes per second of a copy."""

    tflops: float
    copy_gbs: float

    def of_product(self, case: Case, seconds: float) -> float:
        """Returns the share of the matrix product's speed that a time of the case means."""
        return case.flops() / seconds / 1e12 / self.tflops

    def of_copy(self, case: Case, seconds: float) -> float:
        """Returns the share of the copy's bandwidth that a time of the case means; see moved_bytes()."""
        return moved_bytes(case) / seconds / 1e9 / self.copy_gbs


def moved_bytes(case: Case) -> int:
    """Returns the fewest bytes that a call moves.

    They are query, key, value and output once per pass, and in the backward pass the gradient of each.
    """
    output = case.total_queries() * case.heads * case.value_dimension * case.dtype.itemsize
    once = case.bytes_read() + output
    if not case.backward:
        return once
    return 2 * once if case.graph_kept else 3 * once


class Meter:
    """Measures each peak once.

    Args:
        device: the GPU.
        clock: the function that times calls.
        size: rows and columns of the matrices, large enough to fill the GPU.
        copy_bytes: bytes of the source of the copy.
    """

    def __init__(self, device: str, clock: Clock, size: int = 8192, copy_bytes: int = 4 * 2**30) -> None:
        self._device, self._clock, self._size, self._copy_bytes = device, clock, size, copy_bytes
        self._tflops: dict[str, float] = {}
        self._copy_gbs: float | None = None

    def ceiling(self, dtype: torch.dtype, precision: Precision) -> Ceiling:
        """Returns the peaks that bound a dtype.

        For float32 "highest" it is the faster of plain float32 products and a third of TF32's speed, as that
        precision takes three products of TF32 pieces.
        """
        if dtype != torch.float32:
            return Ceiling(self._product(str(dtype).removeprefix("torch."), dtype), self.copy_gbs())
        tf32 = self._product("tf32", dtype, "high")
        if precision != "highest":
            return Ceiling(tf32, self.copy_gbs())
        return Ceiling(max(self._product("float32", dtype), tf32 / 3), self.copy_gbs())

    def _product(self, name: str, dtype: torch.dtype, precision: Precision = "highest") -> float:
        if name not in self._tflops:
            # A float64 product is smaller, as it would take seconds.
            size = self._size // 4 if dtype == torch.float64 else self._size
            a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = self._best(lambda: torch.mm(a, b, out=out), precision)
            self._tflops[name] = 2.0 * size**3 / seconds / 1e12
        return self._tflops[name]

    def copy_gbs(self) -> float:
        """Returns GB/s of a copy within the GPU's memory, counting bytes read and bytes written."""
        if self._copy_gbs is None:
            source = torch.ones(self._copy_bytes, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            seconds = self._best(lambda: target.copy_(source), "highest")
            self._copy_gbs = 2.0 * self._copy_bytes / seconds / 1e9
        return self._copy_gbs

    def _best(self, call: Callable[[], object], precision: Precision) -> float:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return best_seconds(call, 0.3, self._clock)
        finally:
            torch.set_float32_matmul_precision(before)

    def measured(self) -> dict[str, float]:
        """Returns everything measured so far: TFLOP/s by arithmetic, and "copy GB/s"."""
        copied = {} if self._copy_gbs is None else {"copy GB/s": self._copy_gbs}
        return {**{f"{name} TFLOP/s": value for name, value in self._tflops.items()}, **copied}
