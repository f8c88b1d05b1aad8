"""Score functions of so many operations that recursion over them would be too deep for Python."""

from __future__ import annotations

import pytest
import torch
from functions import Functions, flex_attention, formula
from torch import Tensor

from selfattn_ext.flex.cuda_source import headers_of
from selfattn_ext.flex.source import source_of
from selfattn_ext.flex.tracing import trace

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

OPERATIONS = 500


def test_chain_with_gradients() -> None:
    table = torch.randn(30, dtype=torch.float64, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        number = torch.zeros_like(score)
        for _ in range(OPERATIONS):
            number = number + table[kv]
        return score + number / OPERATIONS

    given = [torch.randn(1, 1, 30, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = flex_attention(*given, score_mod)
    right = formula(*given, Functions(score_mod)).out
    torch.testing.assert_close(out, right)
    leaves = [*given, table]
    first, expected = (
        torch.autograd.grad(result.sin().sum(), leaves, create_graph=True) for result in (out, right)
    )
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(sum(g.sum() for g in grads), leaves) for grads in (first, expected))
    )


def test_chains_of_indices() -> None:
    """These chains read runs of memory, and elements whose indices are elements of tensors."""
    table, next_key = torch.zeros(30, requires_grad=True), torch.arange(30)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = q - kv
        for _ in range(OPERATIONS):
            distance, kv = distance + h, next_key[kv]
        return score * table[distance] + kv

    function = trace(score_mod, None, torch.float32, torch.device("cpu"), True).function
    assert "_inside" in source_of(function)
    assert headers_of(function).function.count("data1[") >= OPERATIONS
