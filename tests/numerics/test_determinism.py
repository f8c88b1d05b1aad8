"""Determinism: the same bits for any number of threads, in every run, in any batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import Case, cotangents_of, gradients
from comparisons import assert_same

from selfattn_ext import attention_scores, masked_softmax, scaled_dot_product_attention

CASES = [
    Case(batch=3, heads=4, kv_heads=2, queries=65, keys=150, head_dim=32, value_dim=24, **options)
    for options in (
        {},
        {"dtype": torch.bfloat16, "is_causal": True, "mask": "float heads", "weights": True},
        {"dtype": torch.float64, "alibi": 1, "sinks": True, "lse": True, "mask": "float square"},
        {"dtype": torch.float16, "dropout_p": 0.3, "softcap": 3.0, "window": (30, 20), "query_offset": 50},
    )
] + [
    # These are divided along the queries or the keys, and are large enough for three threads.
    Case(batch=1, heads=1, kv_heads=1, queries=300, keys=130, mask="float rows"),
    Case(batch=1, heads=2, kv_heads=1, queries=2, keys=9000),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_and_runs(case: Case, isa: str, one_thread: None) -> None:
    tensors = case.inputs()
    alone = case.run_with_gradients(tensors)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_same(case.run_with_gradients(tensors), alone, f"{threads} threads")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_threads_with_a_window(isa: str, head_dim: int, one_thread: None) -> None:
    """The queries that a thread takes at a time see a part of many keys, which begins elsewhere if there
    are more threads.
    """
    query, key, value = (torch.randn(1, 1, 900, head_dim) for _ in range(3))
    alone = scaled_dot_product_attention(query, key, value, window_size=(500, 50))
    for threads in (2, 16):
        torch.set_num_threads(threads)
        again = scaled_dot_product_attention(query, key, value, window_size=(500, 50))
        assert torch.equal(alone, again), threads


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_rows_do_not_depend_on_their_batch(case: Case, isa: str) -> None:
    if case.dropout_p:
        # The dropout pattern depends on the number of a batch element, by definition.
        case = replace(case, dropout_p=0.0)
    tensors = case.inputs()
    names = ("query", "key", "value")
    whole = case.run(tensors)
    cotangents = cotangents_of(whole, 0)
    grads = gradients(whole, cotangents, tensors)
    for index in range(case.batch):
        part = {
            name: tensor.detach()[index : index + 1].clone().requires_grad_() if name in names else tensor
            for name, tensor in tensors.items()
        }
        results = case.run(part)
        part_grads = gradients(
            results, {name: value[index : index + 1] for name, value in cotangents.items()}, part
        )
        assert_same(*([of[name][row] for name in of] for of, row in ((results, 0), (whole, index))))
        for name in names:
            assert_same(part_grads[f"grad of {name}"][0], grads[f"grad of {name}"][index], name)


@pytest.mark.parametrize("queries", [1, 47, 48, 49, 144, 145, 191, 192, 193, 241])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_do_not_depend_on_how_queries_are_taken_together(
    dtype: torch.dtype, queries: int, isa: str
) -> None:
    """If a mask's gradient is summed over heads, strips of queries add to the gradients of keys and values
    one by one; otherwise several do at once. The key beyond whole blocks has a block of its own.
    """
    tensors = [torch.randn(1, 2, n, 32, dtype=dtype, requires_grad=True) for n in (queries, 129, 129)]
    mask = torch.randn(queries, 129)
    grad_out = torch.randn(1, 2, queries, 32, dtype=dtype)

    def grads(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scaled_dot_product_attention(*tensors, mask), tensors, grad_out)

    assert_same(grads(mask), grads(mask.clone().requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_and_scores(dtype: torch.dtype, isa: str, one_thread: None) -> None:
    query = torch.randn(2, 3, 40, 16).to(dtype).requires_grad_()
    key = torch.randn(2, 3, 90, 16).to(dtype).requires_grad_()
    mask = torch.randn(40, 1).requires_grad_()

    def step() -> list[torch.Tensor]:
        weights = masked_softmax(attention_scores(query, key), mask, is_causal=True, query_offset=50)
        return [weights, *torch.autograd.grad(weights.float().square().sum(), (query, key, mask))]

    alone = step()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same(step(), alone)


def test_inside_another_parallel_region(one_thread: None) -> None:
    """Several Python threads call at once, as in data-parallel trainers."""
    case = CASES[1]
    tensors = case.inputs()
    alone = case.run_with_gradients(tensors)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        for run in pool.map(lambda _: case.run_with_gradients(tensors), range(8)):
            assert_same(run, alone)
