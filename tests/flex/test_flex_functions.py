"""flex_attention with score functions that people use, judged by the formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu
import pytest
import torch
from functions import ALL, Functions, Sizes, flex_attention, formula
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(sizes: Sizes, dtype: torch.dtype, kv_heads: int | None = None) -> list[Tensor]:
    batch, heads, length, keys = sizes
    kv_heads = kv_heads or heads
    shapes = ((batch, heads, length, 16), (batch, kv_heads, keys, 16), (batch, kv_heads, keys, 24))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def mask_of(functions: Functions, sizes: Sizes, block_size: int | tuple[int, int]) -> BlockMask | None:
    if functions.mask_mod is None:
        return None
    return create_block_mask(functions.mask_mod, *sizes, device=gpu.DEVICE, BLOCK_SIZE=block_size)


def gradients(out: Tensor, given: Sequence[Tensor], learned: Sequence[Tensor] = ()) -> list[Tensor]:
    leaves, weights = [*given, *learned], torch.arange(out.size(-1)) % 5 - 1
    found = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(found, leaves, strict=True)
    ]


def exact(given: list[Tensor], functions: Functions, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    doubles = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    out = formula(*doubles, functions, **options).out
    return [out, *gradients(out, doubles, functions.learned)]


def size_of_terms(given: list[Tensor], functions: Functions, **options: Any) -> float:
    """Returns the sum of the scores' absolute gradients, whose sums are the gradients of learned numbers."""
    doubles = [tensor.detach().double() for tensor in given]
    scores = torch.zeros(*doubles[0].shape[:3], doubles[1].size(2), dtype=torch.float64, requires_grad=True)
    mask = scores + options.pop("attn_mask", 0.0)
    out = formula(*doubles, functions, attn_mask=mask, **options).out
    return float(gradients(out, [scores])[0].abs().sum())


def judge(
    name: str,
    results: list[Tensor],
    given: list[Tensor],
    functions: Functions,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Asserts that out and the gradients of given and of learned tensors are accurate."""
    exactly, peer = (
        exact(given, functions, torch.float64, **options),
        exact(given, functions, dtype, **options),
    )
    of_scores = size_of_terms(given, functions, **options) if functions.learned else 0.0
    for index, (result, right, other) in enumerate(zip(results, exactly, peer, strict=True)):
        # The gradients of a row's scores add up to 0, so such sums are small compared with their terms.
        terms = float(right.detach().abs().max())
        if index > 3:
            terms = max(terms, of_scores / right.numel())
        assert_accurate(f"{name} {index}", result.detach(), right.detach(), other.detach(), terms, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    sizes = (2, 3, 67, 71)
    functions = ALL[name](sizes, torch.float64 if dtype == torch.float64 else torch.float32)
    given = tensors(sizes, dtype)
    out = flex_attention(*given, functions.score_mod, mask_of(functions, sizes, 32))
    judge(name, [out, *gradients(out, given, functions.learned)], given, functions, dtype)
