"""This package's functions under torch.compile, called with score functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functions import assert_same, flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import selfattn_ext
from selfattn_ext.flex import kernel_calls

#: The type leaves out the signatures, because tests unpack tensors and options into one call.
varlen_attention: Any = selfattn_ext.varlen_attention
attention_with_kvcache: Any = selfattn_ext.attention_with_kvcache


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_same_in_one_graph(compute: Any, leaves: list[Tensor], *arguments: Any) -> None:
    """Asserts that one graph gives the bits of the eager call and of its gradients."""
    found = []
    for each in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        results = each(*arguments)
        total = sum(result.nan_to_num(neginf=0.0).sin().sum() for result in results if result.requires_grad)
        assert isinstance(total, Tensor)
        found.append([*results, *torch.autograd.grad(total, leaves)])
    assert_same(*found)


def test_flex_attention_with_options() -> None:
    query, key, value = (torch.randn(2, 4, 20, 8, requires_grad=True) for _ in range(3))
    table, bias = torch.randn(2, 20, requires_grad=True), torch.randn(20, 20, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv - 3, None, None, 20, 20, device="cpu", BLOCK_SIZE=16)

    def compute(*given: Tensor) -> list[Tensor]:
        out, weights, aux = flex_attention(
            *given, lambda s, b, h, q, kv: s * table.exp()[b, q], mask, attn_mask=bias, window_size=(9, 9),
            dropout_p=0.2, return_weights=True, return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        return [out, weights, aux.lse, aux.max_scores]

    assert_same_in_one_graph(compute, [query, key, value, table, bias], query, key, value)


def test_packed_sequences() -> None:
    query, key, value = (torch.randn(14, 4, 8, requires_grad=True) for _ in range(3))
    table, slopes = torch.randn(3, 40, requires_grad=True), torch.rand(4, requires_grad=True)

    def compute(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Any:
        return varlen_attention(
            query * 2, key, value, starts, starts, 9, 9, is_causal=True, alibi_slopes=slopes,
            score_mod=lambda s, b, h, q, kv: s + table.tanh()[b, q - kv + 20],
            mask_mod=lambda b, h, q, kv: (kv < b + 1) | (q - kv < 4), return_lse=True,
        )  # fmt: skip

    leaves = [query, key, value, table, slopes]
    assert_same_in_one_graph(compute, leaves, query, key, value, torch.tensor([0, 5, 5, 14]))


@pytest.mark.parametrize("cached", ["slots", "pages"])
def test_caches_stay_outside_of_graphs(cached: str) -> None:
    """The step breaks the graph: the results and the cache are those of the eager call."""
    caches = [torch.randn(6, 4, 8, 8) if cached == "pages" else torch.randn(2, 4, 24, 8) for _ in range(2)]
    table = torch.arange(6).view(2, 3).int() if cached == "pages" else None
    query, key, value = (torch.randn(2, 4, 1, 8) for _ in range(3))

    def compute(query: Tensor, *caches: Tensor) -> Any:
        return attention_with_kvcache(
            query.sin(), *caches, key, value, torch.tensor([3, 9]), table,
            score_mod=lambda s, b, h, q, kv: s * (q + 1) / (kv + 1), mask_mod=lambda b, h, q, kv: q - kv < 5,
        ).cos()  # fmt: skip

    copies = [cache.clone() for cache in caches]
    eager = compute(query, *caches)
    compiled = torch.compile(compute, backend="eager")(query, *copies)
    assert_same([compiled, *copies], [eager, *caches])


def test_functions_that_cannot_be_compiled() -> None:
    """Where options are given, too, a graph refuses them, and the error says what to do."""
    query, key, value = (torch.randn(14, 4, 8) for _ in range(3))
    starts = torch.tensor([0, 5, 14])

    def compute(*given: Tensor) -> Any:
        return varlen_attention(
            *given, starts, starts, 9, 9, score_mod=lambda s, b, h, q, kv: torch.polygamma(1, s.abs() + 1)
        )

    kernel_calls._warned.clear()
    with pytest.raises(Exception, match="must stay out of the graphs"):
        torch.compile(compute, backend="eager", fullgraph=True)(query, key, value)
    with pytest.warns(UserWarning, match="it uses aten.polygamma"):
        assert compute(query, key, value).isfinite().all()
