"""flex_attention with the functions that people use, judged by the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functions import ALL, Functions, Sizes, formula
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from selfattn_ext.flex import flex_attention

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext.flex_attention does not compile")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(sizes: Sizes, dtype: torch.dtype, kv_heads: int | None = None) -> list[Tensor]:
    batch, heads, length, keys = sizes
    kv_heads = kv_heads or heads
    shapes = ((batch, heads, length, 16), (batch, kv_heads, keys, 16), (batch, kv_heads, keys, 24))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def mask_of(functions: Functions, sizes: Sizes, block_size: int | tuple[int, int]) -> BlockMask | None:
    if functions.mask_mod is None:
        return None
    return create_block_mask(functions.mask_mod, *sizes, device="cpu", BLOCK_SIZE=block_size)


def gradients(out: Tensor, given: list[Tensor], learned: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(out.size(-1)) % 5 - 1
    found: list[Tensor] = list(torch.autograd.grad((out * weights).sum(), [*given, *learned], allow_unused=True))
    return [torch.zeros_like(of) if gradient is None else gradient for gradient, of in zip(found, [*given, *learned])]


def exact(given: list[Tensor], functions: Functions, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    doubles = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    out = formula(*doubles, functions, **options).out
    return [out, *gradients(out, doubles, functions.learned)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    sizes = (2, 3, 67, 71)
    functions = ALL[name](sizes, torch.float64 if dtype == torch.float64 else torch.float32)
    given = tensors(sizes, dtype)
    out = flex_attention(*given, functions.score_mod, mask_of(functions, sizes, 32))
    results = [out, *gradients(out, given, functions.learned)]
    judge, peer = exact(given, functions, torch.float64), exact(given, functions, dtype)
    for index, (result, right, other) in enumerate(zip(results, judge, peer, strict=True)):
        assert_accurate(f"{name} {index}", result, right, other, float(right.detach().abs().max()), dtype)
