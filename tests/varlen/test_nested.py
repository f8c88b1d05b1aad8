"""Jagged tensors of torch.nested: the bits of packed calls, and the results of torch's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext import attention_weights, scaled_dot_product_attention, varlen_attention

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]
LENGTHS, KEYS = (5, 1, 17, 2), (7, 3, 2, 31)


def jagged(lengths: Sequence[int], *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a jagged leaf (B, j, *sizes) that requires a gradient."""
    rows = [torch.randn(length, *sizes).to(dtype) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def heads(tensor: Tensor) -> Tensor:
    """Returns (B, j, H, E) as (B, H, j, E)."""
    return tensor.transpose(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "rules": {"is_causal": True, "window_size": (6, -1), "query_offset": 3, "softcap": 2.0},
    "tensors": {
        "alibi_slopes": torch.rand(4, 4),
        "sinks": torch.randn(4),
        "attn_mask": torch.randn(4, 1, 17, 31),
        "scale": 0.3,
    },
    "a position for each": {"is_causal": True, "query_offset": torch.tensor([2, 2, -15, 29])},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_bits_of_the_packed_call(name: str, dtype: torch.dtype) -> None:
    """tests/varlen/test_varlen.py judges the packed call."""
    query = jagged(LENGTHS, 4, 16, dtype=dtype)
    key, value = jagged(KEYS, 2, 16, dtype=dtype), jagged(KEYS, 2, 8, dtype=dtype)
    options = OPTIONS[name]
    out = scaled_dot_product_attention(*map(heads, (query, key, value)), enable_gqa=True, **options)
    grads = torch.autograd.grad(out.values().square().sum(), (query, key, value))
    rows = [tensor.values().detach().requires_grad_() for tensor in (query, key, value)]
    expected = varlen_attention(*rows, query.offsets(), key.offsets(), 17, 31, enable_gqa=True, **options)
    assert torch.equal(heads(out).values(), expected)
    expected_grads = torch.autograd.grad(expected.square().sum(), rows)
    assert all(torch.equal(g.values(), e) for g, e in zip(grads, expected_grads, strict=True))


def test_beside_the_attention_of_torch() -> None:
    x, other, value = (jagged(lengths, 4, 16, dtype=torch.float64) for lengths in (LENGTHS, KEYS, KEYS))
    for leaves in ((x, x, x), (x, other, value)):
        outcomes = []
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
            out = heads(function(*map(heads, leaves))).values()
            grads = torch.autograd.grad(out.square().sum(), list(dict.fromkeys(leaves)))
            outcomes.append([out, *(grad.values() for grad in grads)])
        torch.testing.assert_close(*outcomes)


def test_the_result_goes_on_like_the_query() -> None:
    """Structure, symbolic size and order of dimensions are the query's, so a residual can be added."""
    x = jagged(LENGTHS, 64)
    projection = torch.nn.Linear(64, 3 * 64)
    query, key, value = (
        part.unflatten(-1, (4, 16)).transpose(1, 2) for part in projection(x).chunk(3, dim=-1)
    )
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.transpose(1, 2).is_contiguous()
    y = x + out.transpose(1, 2).flatten(-2)
    assert y.shape == x.shape
    assert y.offsets() is x.offsets()
    (grad,) = torch.autograd.grad(y.values().square().sum(), x)
    assert grad.shape == x.shape
    rows = scaled_dot_product_attention(*(t.unbind()[2] for t in (query, key, value)), is_causal=True)
    assert torch.equal(out.unbind()[2], rows)


def test_three_dimensions_are_one_head() -> None:
    query, key = jagged(LENGTHS, 16), jagged(KEYS, 16)
    mask = torch.randn(4, 17, 31)
    out, weights, lse = scaled_dot_product_attention(
        query, key, key, mask, return_weights=True, return_lse=True
    )
    assert (out.shape[0], out.dim(), lse.dim()) == (4, 3, 2)
    assert weights.shape == (4, 17, 31)
    for index, (q, k) in enumerate(zip(query.unbind(), key.unbind(), strict=True)):
        part = mask[index, : len(q), : len(k)]
        expected = scaled_dot_product_attention(q, k, k, part, return_weights=True, return_lse=True)
        assert torch.equal(out.unbind()[index], expected[0])
        assert torch.equal(weights[index, : len(q), : len(k)], expected[1])
        assert torch.equal(lse.unbind()[index], expected[2])


def test_weights_and_lse() -> None:
    query, key = heads(jagged(LENGTHS, 4, 16)), heads(jagged(KEYS, 4, 16))
    out, weights, lse = scaled_dot_product_attention(query, key, key, return_weights=True, return_lse=True)
    assert weights.shape == (4, 4, 17, 31)
    assert (lse.shape[:2], lse.shape[2]) == ((4, 4), query.shape[2])
    direct, direct_lse = attention_weights(query, key, return_lse=True)
    assert torch.equal(direct, weights)
    assert torch.equal(direct_lse.values(), lse.values())
    offsets = (query.offsets(), key.offsets(), 17, 31)
    rows = [tensor.values().transpose(0, 1) for tensor in (query, key, key)]
    expected = varlen_attention(*rows, *offsets, return_weights=True, return_lse=True)
    assert torch.equal(weights, expected[1])
    assert torch.equal(lse.values(), expected[2])
    assert torch.equal(heads(out).values(), expected[0])


def test_a_mask_for_each_sequence() -> None:
    x = heads(jagged((3, 6), 2, 8))
    masks = [torch.randn(3, 3), torch.randn(1, 2, 6, 6)]
    out = scaled_dot_product_attention(x, x, x, masks)
    for part, q, mask in zip(out.unbind(), x.unbind(), masks, strict=True):
        assert torch.equal(part, scaled_dot_product_attention(q, q, q, mask))


def test_rows_between_the_sequences() -> None:
    """torch.nested.narrow makes sequences with lengths, which lie anywhere in a buffer."""
    buffer = torch.randn(3, 10, 2, 8, requires_grad=True)
    first, count = torch.tensor([1, 2, 0]), torch.tensor([3, 8, 4])
    x = heads(torch.nested.narrow(buffer, 1, first, count, layout=torch.jagged))
    assert x.lengths() is not None
    out, lse = scaled_dot_product_attention(x, x, x, is_causal=True, return_lse=True)
    assert out.shape[2] == x.shape[2]
    for index, (part, part_lse) in enumerate(zip(out.unbind(), lse.unbind(), strict=True)):
        rows = buffer[index, first[index] : first[index] + count[index]].transpose(0, 1)
        expected = scaled_dot_product_attention(rows, rows, rows, is_causal=True, return_lse=True)
        assert all(map(torch.equal, (part, part_lse), expected))
    between = lse.values().unflatten(1, (3, 10))[:, 0, [0, 4, 9]]
    assert torch.isneginf(between).all()
    (grad,) = torch.autograd.grad(out.values().square().sum(), buffer)
    assert grad[0, 0].abs().max() == grad[0, 4:].abs().max() == 0
    assert grad[0, 1:4].abs().min() > 0


def test_gradcheck() -> None:
    """Only first derivatives are checked: torch has no second derivative of values()."""
    x = jagged((2, 1), 1, 2, dtype=torch.float64)

    def function(rows: Tensor) -> Tensor:
        y = heads(torch.nested.nested_tensor_from_jagged(rows, x.offsets(), min_seqlen=1, max_seqlen=2))
        return scaled_dot_product_attention(y, y, y, is_causal=True).values()

    assert torch.autograd.gradcheck(function, x.values().detach().requires_grad_())


def test_dropout_is_that_of_the_packed_call() -> None:
    x = heads(jagged(LENGTHS, 2, 8))
    torch.manual_seed(7)
    out = scaled_dot_product_attention(x, x, x, dropout_p=0.4)
    rows = x.values().transpose(0, 1)
    torch.manual_seed(7)
    expected = varlen_attention(rows, rows, rows, x.offsets(), x.offsets(), 17, 17, dropout_p=0.4)
    assert torch.equal(heads(out).values(), expected)


@pytest.mark.parametrize("known", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_one_graph(known: bool) -> None:
    """One graph suffices even if the longest length is not known, which a graph cannot read."""

    def step(x: Tensor) -> Tensor:
        return heads(scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True))

    def made(lengths: Sequence[int]) -> Tensor:
        x = jagged(lengths, 2, 8)
        if known:
            return x
        return torch.nested.nested_tensor_from_jagged(x.values().detach(), x.offsets()).requires_grad_()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, KEYS, (1,) * len(LENGTHS)):
        x = made(lengths)
        outs = [function(x) for function in (compiled, step)]
        assert torch.equal(*(out.values() for out in outs))
        grads = [torch.autograd.grad(out.values().square().sum(), x)[0].values() for out in outs]
        assert torch.equal(*grads)


def strided() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 5, 8)])


X, OTHER = jagged(LENGTHS, 4, 16), jagged(KEYS, 4, 16)
#: name -> (arguments, exception, words in the message).
BAD: dict[str, tuple[list[Any], type[Exception], list[str]]] = {
    "strided layout": ([strided()] * 3, TypeError, ["query", "nested", "torch.jagged"]),
    "one of another layout": ([heads(X), strided(), heads(X)], TypeError, ["torch.jagged", "key", "layout"]),
    "one dense": ([heads(X), heads(X), torch.ones(4, 4, 3, 16)], TypeError, ["value", "(4, 4, 3, 16)"]),
    "dense query": ([torch.ones(4, 4, 3, 16), heads(X), heads(X)], TypeError, ["query", "(4, 4, 3, 16)"]),
    "not transposed": ([X, X, X], ValueError, ["query", "transpose(1, 2)"]),
    "five dimensions": ([jagged((2, 3), 2, 2, 8)] * 3, ValueError, ["query", "(B, H, j, E)"]),
    "lengths of key and value": ([heads(X), heads(X), heads(OTHER)], ValueError, ["key", "value", "lengths"]),
    "batches": ([heads(X), *[heads(jagged((2, 3), 4, 16))] * 2], ValueError, ["number", "query", "key"]),
    "head dims": ([heads(X), *[heads(jagged(KEYS, 4, 8))] * 2], ValueError, ["head dim"]),
    "heads": ([heads(X), *[heads(jagged(KEYS, 2, 16))] * 2], ValueError, ["heads", "enable_gqa"]),
    "nested mask": ([heads(X)] * 4, TypeError, ["attn_mask", "dense", "nested"]),
    "mask shape": ([*[heads(X)] * 3, torch.ones(4, 4, 17, 16)], ValueError, ["attn_mask", "(4, 4, 17, 17)"]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_arguments(name: str) -> None:
    arguments, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        scaled_dot_product_attention(*arguments)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), f"{word!r} in {caught.value}"
