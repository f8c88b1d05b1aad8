"""The yardstick of the machine: how fast torch multiplies two large matrices in this run."""

from __future__ import annotations

import torch

from selfattn_ext.bench.timer import best_seconds

SIZE = 2048
QUICK_SIZE = 1024


def matmul_gflops(dtype: torch.dtype, size: int = SIZE, seconds: float = 0.5) -> float:
    """GFLOP/s of ``torch.mm`` of two (size, size) matrices, the best of the runs in ``seconds``.

    This is what the machine's matrix library attains, which is a little below the arithmetic peak of its
    cores; the frequency, and so the number, differs from run to run.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), seconds) / 1e9
