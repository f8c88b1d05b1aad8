"""Dropout: the documented pattern to the bit, its statistics, and its source of randomness."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, check, dropout_seed, random_state, set_random_state

from selfattn_ext import attention_weights, ops, reference, scaled_dot_product_attention
from selfattn_ext.arguments import AttentionOptions, keywords_for


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weights_are_dropped_as_documented(p: float, dtype: torch.dtype, kernel: str) -> None:
    query, key = torch.randn(2, 3, 19, 8).to(dtype), torch.randn(2, 3, 70, 8).to(dtype)
    plain = attention_weights(query, key)
    keep = reference.dropout_keep(dropout_seed(5), p, (2, 3, 19, 70))
    torch.manual_seed(5)
    dropped = attention_weights(query, key, dropout_p=p)
    assert torch.equal(dropped != 0, keep & (plain != 0))
    factor = 1 / (1 - p) if p < 1 else 0.0
    expected = torch.where(keep, plain.double() * factor, 0.0)
    # The weights are exact except for two roundings, of the plain weight and of the product.
    torch.testing.assert_close(dropped.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("p", [0.2, 1.0])
def test_results_and_gradients(p: float, kernel: str) -> None:
    check(Case(dropout_p=p, heads=4, keys=70, mask="float", sinks=True, weights=True, lse=True, seed=11))


def test_gradients_of_a_number_for_all_pairs(kernel: str) -> None:
    """A mask of one number for all pairs has a gradient that sums over all rows. With few weights, each of
    1 / (1 - p), it is as small as its rounding errors, or 0.
    """
    shape = Case(batch=3, heads=8, kv_heads=4, queries=130, keys=200, head_dim=64, value_dim=16)
    for seed in range(1 if kernel == "loops" else 3):  # that takes half a second for each
        check(replace(shape, mask="float number", sinks=seed % 2, dropout_p=0.99, seed=seed))


def test_governed_by_manual_seed() -> None:
    query = torch.randn(1, 2, 32, 8)
    torch.manual_seed(1)
    first, second = (scaled_dot_product_attention(query, query, query, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(query, query, query, dropout_p=0.5), first)
    state = random_state()
    third = scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert torch.equal(third, second)
    set_random_state(state)
    assert torch.equal(scaled_dot_product_attention(query, query, query, dropout_p=0.5), third)


@pytest.mark.parametrize("zero", [0, 0.0], ids=repr)
def test_no_dropout_draws_nothing(zero: float) -> None:
    query = torch.randn(1, 1, 4, 4)
    state = random_state()
    out = scaled_dot_product_attention(query, query, query, dropout_p=zero)
    assert torch.equal(out, scaled_dot_product_attention(query, query, query))
    assert torch.equal(random_state(), state)


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_a_pattern(dtype: torch.dtype, queries: int, kernel: str) -> None:
    """A seed of five numbers says what a call's first batch element, head, query and key count as."""
    batch, heads, first_query, keys, p = 1, 1, 7, 40, 0.4
    whole = reference.dropout_keep(dropout_seed(3), p, (3, 4, 40, 150))
    keep = whole[batch:, heads:, first_query : first_query + queries, keys:]
    at = torch.tensor([batch, heads, first_query, keys])
    seed = torch.cat([dropout_seed(3).reshape(1), at.to(dropout_seed(3).device)])
    assert torch.equal(reference.dropout_keep(seed, p, tuple(keep.shape)), keep)

    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, queries, 16), (2, 3, 110, 16), (2, 3, 110, 16), (2, 3, queries, 16)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(keep.device) for shape in shapes]
    query, key, value, grad = (tensor.to(dtype) for tensor in drawn)
    options = keywords_for(AttentionOptions(), query) | {"dropout_p": p, "dropout_seed": seed}
    out, *rows, residual = ops.attention_forward(
        query, key, value, 0.25, need_residual=dtype == torch.bfloat16, **options
    )
    assert torch.equal(ops.attention_weights(query, key, *rows, 0.25, **options) != 0, keep)
    if dtype == torch.bfloat16:
        options["out_residual"] = residual
    found = ops.attention_backward(grad, query, key, value, out, *rows, 0.25, **options)[:3]

    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    exact = torch.softmax(0.25 * leaves[0] @ leaves[1].mT, -1) * keep / (1 - p) @ leaves[2]
    expected = torch.autograd.grad(exact, leaves, grad.double())
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for result, wanted in zip((out, *found), (exact, *expected), strict=True):
        torch.testing.assert_close(result.double(), wanted.detach(), rtol=close, atol=close)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), r"an int64 tensor of one element, or of five.*shape \(2,\)"),
        (torch.zeros(1, 5, dtype=torch.int64), r"shape \(1, 5\)"),
        (torch.zeros(10, dtype=torch.int64)[::2], r"an int64 tensor of one element, or of five"),
        (torch.zeros(5, dtype=torch.int32), r"int32"),
        (torch.tensor([1, 0, 0, -1, 0]), r"position -1, which is not between 0 and 2\^32 - 1"),
        (torch.tensor([1, 2**32, 0, 0, 0]), r"position 4294967296"),
        (torch.tensor([1, 0, 0, 0, 6]), r"key 6, which is not a multiple of 4"),
    ],
    ids=["two", "a row", "every second", "int32", "negative", "large", "key"],
)
@pytest.mark.cpu_only("positions are not read on a GPU, as that would wait for it")
def test_seeds_that_are_refused(seed: torch.Tensor, message: str) -> None:
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=message):
        ops.attention_forward(query, query, query, 1.0, dropout_p=0.5, dropout_seed=seed)
