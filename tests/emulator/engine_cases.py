"""The operators on CUDA tensors, from the dispatcher to the emulated kernels: csrc/ops/cuda without a GPU.

    PYTHONPATH=tests python -m emulator.engine_cases

compares every operator with itself on the CPU, tensors without elements included, and prints how many calls
it has made. tests/test_emulated_engine.py does so. The memory of results and workspaces is NaN beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from . import build

if "SELFATTN_LIBRARY" not in os.environ:
    os.environ["SELFATTN_LIBRARY"] = str(build.build("device"))

# isort: split
import torch
from torch import Tensor

from selfattn_ext import library, ops

_own = library.ops()
to_device, to_host = _own.to_device.default, _own.to_host.default

#: The largest error beside the largest number.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: batch, heads, kv_heads, queries, keys, head_dim, value_dim
SIZES = [
    (2, 4, 2, 33, 40, 16, 24),
    (1, 2, 2, 5, 0, 8, 8),
    (2, 2, 1, 0, 7, 8, 8),
    (0, 2, 2, 3, 4, 8, 8),
    (2, 2, 2, 9, 70, 8, 0),
    (1, 1, 1, 6, 7, 0, 8),
]
#: "" is the automatic choice.
KERNELS = ("", "simt", "sm80")


def taken_to(device: Callable[[Tensor], Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: device(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


class Comparison:
    """Calls an operator on both devices and compares the results."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, name: str, kernel: str | None, **arguments: Any) -> tuple[Tensor, ...]:
        """The results on the CPU. None: the operator lets nobody choose a kernel."""
        self.calls += 1
        operator = getattr(ops, name)
        chosen = {} if kernel is None else {"kernel_name": kernel}
        expected, found = operator(**arguments), operator(**taken_to(to_device, arguments), **chosen)
        if isinstance(expected, Tensor):
            expected, found = (expected,), (found,)
        dtype = next(value.dtype for value in arguments.values() if isinstance(value, Tensor))
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if other is None:
                assert one is None, name
                continue
            where = f"{name} {kernel!r} result {index} of {dtype} {tuple(other.shape)}"
            assert one.device.type == "cuda", where
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype), where
            worst = TOLERANCES[dtype] * (1 + float(other.abs().max())) if other.numel() else 0.0
            assert torch.allclose(to_host(one).double(), other.double(), rtol=0, atol=worst), where
        return tuple(expected)


def options(size: tuple[int, ...], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Nothing; everything with a row per batch; and what is shared by the batch, a seed with it."""
    batch, heads, _, queries, keys, *_ = size
    numbers = torch.float64 if dtype == torch.float64 else torch.float32
    yield {}
    for shared in (False, True):
        rows = 1 if shared else batch
        yield {
            "attn_mask": torch.randn(rows, heads, 1 if shared else queries, keys).to(dtype),
            "alibi_slopes": torch.rand(rows, heads, dtype=numbers),
            "sinks": torch.randn(rows, heads, dtype=numbers),
            "softcap": 3.0,
            "is_causal": not shared,
            "query_offset": 3,
            "dropout_p": 0.3,
            "dropout_seed": torch.tensor([12345]),
        }


def compare(same: Comparison, size: tuple[int, ...], dtype: torch.dtype, kernel: str) -> None:
    batch, heads, kv_heads, queries, keys, head_dim, value_dim = size
    numbers = torch.float64 if dtype == torch.float64 else torch.float32

    def swapped(*shape: int) -> Tensor:
        """Heads inside, as projections give them."""
        return torch.randn(shape[0], shape[2], shape[1], shape[3]).to(dtype).transpose(1, 2)

    query, key = swapped(batch, heads, queries, head_dim), swapped(batch, kv_heads, keys, head_dim)
    value = torch.randn(batch, kv_heads, keys, value_dim).to(dtype)
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value, "scale": 0.3}
    square = torch.randn(batch, heads, queries, keys).to(dtype)
    for extra in options(size, dtype):
        rounds = dtype in ops.SIXTEEN_BITS
        out, *statistics, residual = same(
            "attention_forward", kernel, **tensors, **extra, need_residual=rounds
        )
        saved: dict[str, Any] = dict(zip(("row_max", "row_sum"), statistics, strict=True))
        saved |= {"out": out, "out_residual": residual if rounds else None}
        # As torch gives the gradient of a sum.
        saved["grad_out"] = torch.ones((), dtype=dtype).expand(out.shape)
        if extra:
            saved |= {"grad_row": torch.randn(batch, heads, queries, dtype=numbers), "grad_weights": square}
        same("attention_backward", kernel, **tensors, **extra, **saved, need_mask_grad=bool(extra))
        saved = {"row_max": saved["row_max"], "row_sum": saved["row_sum"]}
        same("attention_weights", kernel, query=query, key=key, scale=0.3, **extra, **saved)
    if kernel == "":
        plain = {**tensors, "is_causal": True}
        same("plain_attention", None, **plain, enable_gqa=True)
        out, rows, residual = same("plain_attention_forward", None, **plain, enable_gqa=True)
        plain |= {"out": out, "statistics": rows, "out_residual": residual, "grad_out": torch.randn_like(out)}
        same("plain_attention_backward", None, **plain)
    both = {"query": query, "key": key, "scale": 0.3}
    same("attention_scores", kernel, **both)
    same("attention_scores_backward", kernel, grad_scores=square, **both)
    mask = torch.randn(1, heads, 1, keys)
    (weights,) = same("masked_softmax", kernel, scores=square, scale=0.5, mask=mask, is_causal=True)
    same(
        "masked_softmax_backward", kernel, grad_weights=square.mT.contiguous().mT, weights=weights, scale=0.5
    )


def main() -> None:
    torch.manual_seed(0)
    same = Comparison()
    for size, dtype, kernel in product(SIZES, TOLERANCES, KERNELS):
        if kernel != "sm80" or dtype != torch.float64:
            compare(same, size, dtype, kernel)
    print(same.calls)


if __name__ == "__main__":
    main()
