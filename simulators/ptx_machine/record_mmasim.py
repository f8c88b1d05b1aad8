"""Writes oracle/, the answers of mmasim 2.1.1 (PyPI). It is a published bit-accurate model of tensor cores.

    pip install mmasim==2.1.1 && python simulators/ptx_machine/record_mmasim.py

The answers are kept because importing mmasim compiles C++ and, with a GPU, needs triton. The part that does
so is left out here, because it computes float64 products only.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import probe
import torch

sys.modules["mmasim.arithmetic.fma"] = types.ModuleType("mmasim.arithmetic.fma")
from mmasim.nv_ptx import MMA  # noqa: E402

GENERATIONS = {80: "Ampere", 90: "Hopper"}
FORMATS = {
    "multiply_bfloat16": ("m16n8k16.f32.bf16.bf16.f32", torch.bfloat16),
    "multiply_float16": ("m16n8k16.f32.f16.f16.f32", torch.float16),
}


def matrices(words: np.ndarray, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and C of one problem, from the fragments of its lanes as the PTX manual draws them."""
    a, b, c = torch.empty(16, 16, dtype=dtype), torch.empty(16, 8, dtype=dtype), torch.empty(16, 8)
    elements = torch.from_numpy(words[:, :6].copy().view(np.int32)).view(dtype).reshape(32, 6, 2)
    accumulators = torch.from_numpy(words[:, 6:].copy().view(np.float32))
    for lane in range(32):
        group, place = divmod(lane, 4)
        for r in range(4):
            k = 2 * place + 8 * (r // 2)
            a[group + 8 * (r % 2), k : k + 2] = elements[lane, r]
            c[group + 8 * (r // 2), 2 * place + r % 2] = accumulators[lane, r]
        for r in range(2):
            k = 2 * place + 8 * r
            b[k : k + 2, group] = elements[lane, 4 + r]
    return a, b, c


def fragments(d: torch.Tensor) -> np.ndarray:
    words = np.empty((32, 4), dtype=np.uint32)
    bits = d.contiguous().numpy().view(np.uint32)
    for lane in range(32):
        for r in range(4):
            words[lane, r] = bits[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2]
    return words


def main() -> None:
    for wrapper, (shape_and_type, dtype) in FORMATS.items():
        operands = probe.operands_of(wrapper, 10)
        for capability, generation in GENERATIONS.items():
            multiply = MMA(generation, shape_and_type)
            results = np.stack([fragments(multiply(*matrices(words, dtype))) for words in operands])
            source = f"mmasim 2.1.1, {generation}"
            print(probe.Recording(wrapper, source, capability, operands, results).save(probe.ORACLE))


if __name__ == "__main__":
    main()
