"""flex_attention with score functions that people use, judged by the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functions import ALL, Functions, Sizes, flex_attention, formula, gradients, mask_of, tensors
from tolerances import assert_accurate
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def judge(name: str, out: Tensor, given: list[Tensor], functions: Functions, **options: Any) -> None:
    """Asserts that out and the gradients of given and of learned tensors are accurate."""
    results = [out, *gradients(out, given, functions.learned)]
    dtype = given[0].dtype
    exactly, peer = (exact(given, functions, each, **options) for each in (torch.float64, dtype))
    of_scores = size_of_terms(given, functions, **options) if functions.learned else 0.0
    for index, (result, right, other) in enumerate(zip(results, exactly, peer, strict=True)):
        # The gradients of a row's scores add up to 0, so such sums are small compared with their terms.
        terms = float(right.detach().abs().max())
        if index > 3:
            terms = max(terms, of_scores / right.numel())
        assert_accurate(f"{name} {index}", result.detach(), right.detach(), other.detach(), terms, dtype)


def check(
    name: str, sizes: Sizes, dtype: torch.dtype = torch.float32, block_size: Any = 128, **options: Any
) -> None:
    # torch sums gradients of 16 bits in 16 bits, too inaccurately to judge ours.
    functions = ALL[name](sizes, torch.float64 if dtype == torch.float64 else torch.float32)
    given = tensors(sizes, dtype, options.pop("kv_heads", None))
    mask = mask_of(functions, sizes, block_size)
    out = flex_attention(
        *given, functions.score_mod, mask, enable_gqa=given[0].size(1) != given[1].size(1), **options
    )
    judge(name, out, given, functions, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    check(name, (2, 3, 67, 71), dtype, 32)
