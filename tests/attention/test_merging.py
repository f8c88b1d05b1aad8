"""merge_attention: results over parts of the keys give the result and the gradients of one call over all.

The judge is the formula over all keys in float64. test_merging_derivatives.py has the other derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparisons import assert_same
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import (
    attention_with_kvcache,
    flex_attention,
    merge_attention,
    reference,
    scaled_dot_product_attention,
    varlen_attention,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
QUERIES, SIZES = 5, (3, 0, 1, 13, 7)
KEYS, PREFIX = sum(SIZES), 11
Results = dict[str, Tensor]


def in_parts(
    query: Tensor, key: Tensor, value: Tensor, sizes: tuple[int, ...] = SIZES, **options: Any
) -> tuple[Tensor, Tensor]:
    """Merges calls over parts of the keys of these sizes; positions and masks are those of one call."""
    mask, sinks = options.pop("attn_mask", None), options.pop("sinks", None)
    offset, first, outs, lses = options.pop("query_offset", 0), 0, [], []
    for number, size in enumerate(sizes):
        keys = slice(first, first + size)
        out, lse = scaled_dot_product_attention(
            query,
            key[..., keys, :],
            value[..., keys, :],
            None if mask is None else mask[..., keys],
            sinks=sinks if number == 1 else None,
            query_offset=offset - first,
            enable_gqa=True,
            return_lse=True,
            **options,
        )
        outs.append(out)
        lses.append(lse)
        first += size
    return merge_attention(outs, lses)


def behind_a_prefix(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two calls: of queries that come after a prefix to the prefix, and among their own keys."""
    size = key.size(-2) - query.size(-2)
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    before = scaled_dot_product_attention(query, key[..., :size, :], value[..., :size, :], **options)
    own = key[..., size:, :], value[..., size:, :]
    among = scaled_dot_product_attention(query, *own, is_causal=True, **options)
    return merge_attention([before[0], among[0]], [before[1], among[1]])


def one_call(**given: Any) -> tuple[Tensor, Tensor]:
    """Computes the formula over all keys."""
    out, _, lse = reference.attention(**given)
    return out, lse


def with_gradients(attention: Callable[..., Any], tensors: Results, **options: Any) -> Results:
    """Returns out and lse of attention, and the gradients of both by the tensors."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out, lse = attention(**leaves, **options)
    generator = torch.Generator(device="cpu").manual_seed(0)
    incoming = [torch.randn(each.shape, generator=generator, device="cpu").to(each) for each in (out, lse)]
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), incoming)
    named = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def check(tensors: Results, merged: Callable[..., Any] = in_parts, **options: Any) -> None:
    """Compares parts with the formula over all keys."""
    found = with_gradients(merged, tensors, **options)
    options = options if merged is in_parts else {"is_causal": True, "query_offset": PREFIX}
    exact = with_gradients(one_call, {name: tensor.double() for name, tensor in tensors.items()}, **options)
    peer = with_gradients(one_call, tensors, **options)
    dtype = tensors["query"].dtype
    for name, result in found.items():
        assert_accurate(name, result, exact[name], peer[name], dtype=dtype)
    assert found["out"].dtype == dtype
    assert found["lse"].dtype == reference.accumulation_dtype(dtype)


def inputs(dtype: torch.dtype, keys: int = KEYS) -> Results:
    """Two kv heads serve four query heads, and values have a width of their own."""
    shapes = {"query": (2, 4, QUERIES, 8), "key": (2, 2, keys, 8), "value": (2, 2, keys, 6)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def bool_mask() -> Tensor:
    """A mask under which a query sees nothing, and another one only the keys of one part."""
    mask = torch.rand(2, 1, QUERIES, KEYS) < 0.5
    mask[:, :, 1] = False
    mask[:, :, 3, 4:] = False
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": KEYS - QUERIES},
        {"is_causal": True, "query_offset": 2},
        {"window_size": (4, 2), "query_offset": 6, "softcap": 2.0},
    ],
    ids=str,
)
def test_parts_are_one_call(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Some rows see nothing of some parts."""
    check(inputs(dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_among_the_options(dtype: torch.dtype) -> None:
    """A bool mask; a mask, slopes and sinks with gradients: the sinks belong to one part alone."""
    check(inputs(dtype), attn_mask=bool_mask())
    bias = torch.randn(4, QUERIES, KEYS).to(dtype).masked_fill(~bool_mask()[0], -math.inf)
    check({**inputs(dtype), "attn_mask": bias, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cached_prefix_needs_no_mask(dtype: torch.dtype) -> None:
    """The queries come after the prefix, see all of it, and follow the causal rule among themselves."""
    check(inputs(dtype, PREFIX + QUERIES), behind_a_prefix)


def parts_of(count: int, *lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns stacked results of so many parts."""
    lse_dtype = reference.accumulation_dtype(dtype)
    return torch.randn(count, *lead, 4).to(dtype), torch.randn(count, *lead, dtype=lse_dtype)


def test_one_tensor_is_a_list_of_its_parts() -> None:
    outs, lses = parts_of(3, 2, 5)
    expected = merge_attention(outs, lses)
    assert_same(merge_attention(list(outs), tuple(lses)), expected)
    assert_same(merge_attention(tuple(outs), lses), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_stays_as_it_is(dtype: torch.dtype) -> None:
    outs, lses = parts_of(1, 2, 5, dtype=dtype)
    lses[0, 1, 3], outs[0, 1, 3] = -math.inf, math.nan
    out, lse = merge_attention(outs, lses)
    assert_same((out, lse), (outs[0].nan_to_num(0.0), lses[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """At the end, however many parts there are."""
    outs, lses = parts_of(9, 3, 50, dtype=dtype)
    exact, lse = merge_attention(outs.float(), lses)
    assert_same(merge_attention(outs, lses), (exact.to(dtype), lse))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unseen_part_has_no_influence(dtype: torch.dtype, junk: float) -> None:
    """Neither what it holds nor the gradient of a row that has seen nothing reaches anything."""
    outs, lses = parts_of(3, 2, 5, dtype=dtype)
    lses[1, 0, 2] = lses[:, 1, 4] = -math.inf
    found = []
    for hidden in (0.0, junk):
        given = outs.masked_fill((lses == -math.inf).unsqueeze(-1), hidden).requires_grad_()
        lses = lses.detach().requires_grad_()
        results = merge_attention(given, lses)
        incoming = [torch.ones_like(result) for result in results]
        for gradient in incoming:
            gradient[1, 4] = hidden
        found.append([*results, *torch.autograd.grad(results, (given, lses), incoming)])
    assert_same(found[1], found[0])
    out, lse, of_outs, of_lses = found[1]
    assert bool((out[1, 4] == 0).all() and (lse[1, 4] == -math.inf).all())
    assert bool((of_outs[1, 0, 2] == 0).all() and (of_outs[:, 1, 4] == 0).all())
    assert of_lses[1, 0, 2] == 0
    assert bool((of_lses[:, 1, 4] == 0).all() and of_lses.isfinite().all())


def test_what_is_not_a_number_stays_in_its_row() -> None:
    outs, lses = parts_of(3, 4)
    expected = merge_attention(outs, lses)
    lses[0, 1], lses[2, 2] = math.nan, math.inf  # the second is how others write that a row sees nothing
    out, lse = merge_attention(outs, lses)
    assert out.isnan().all(-1).tolist() == lse.isnan().tolist() == [False, True, True, False]
    assert_same((out[::3], lse[::3]), [each[::3] for each in expected])


@pytest.mark.parametrize("size", [-1e30, 1e30])
def test_huge_log_sum_exps(size: float) -> None:
    """Equal ones share the row; otherwise the largest one has it, and the other parts get no gradient."""
    outs, _ = parts_of(3, 2)
    lses = torch.tensor([[size, size], [size, -abs(size)], [-math.inf, -math.inf]], requires_grad=True)
    outs[1, 1] = outs[0, 1] if size < 0 else outs[1, 1]
    out, lse = merge_attention(outs.requires_grad_(), lses)
    torch.testing.assert_close(out[0], (outs[0, 0] + outs[1, 0]) / 2)
    torch.testing.assert_close(out[1], outs[0, 1])
    torch.testing.assert_close(lse, torch.full((2,), size))
    of_outs, of_lses = torch.autograd.grad((out, lse), (outs, lses), (torch.ones(2, 4), torch.ones(2)))
    share = 0.5 if size < 0 else 1.0
    assert of_outs[:, :, 0].tolist() == [[0.5, share], [0.5, 1.0 - share], [0.0, 0.0]]
    assert bool(of_lses.isfinite().all())
    assert of_lses[2].tolist() == [0.0, 0.0]


def test_the_rounding_of_an_lse_bounds_the_error() -> None:
    """Its two neighbours are a unit apart, and a share changes by at most a quarter of that."""
    key, value, query = torch.randn(1, 40, 8), torch.randn(1, 40, 8), torch.full((1, 3, 8), 16.0)
    key[..., 0] += 256.0
    exact = reference.attention(query.double(), key.double(), value.double(), scale=1.0)
    out, lse = in_parts(query, key, value, (20, 20), scale=1.0)
    unit = 2.0**-11  # of float32 numbers between 4096 and 8192
    assert bool((lse > 4096).all() and (lse < 8192).all())
    largest = 2.0 * float(value.abs().max())
    assert float((out - exact.out).abs().max()) <= (unit / 4 + 1e-6) * largest


def test_leading_dimensions_broadcast() -> None:
    """A part that all sequences share is computed once; it gets the sum of their gradients."""
    outs, lses = parts_of(2, 3, 4, 5, dtype=torch.float64)
    for shared in ((1, 4, 5), (4, 5), (5,)):
        few = tuple(
            torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((*shared, 4), shared)
        )
        many = [
            each.detach().expand(3, 4, 5, *each.shape[len(shared) :]).clone().requires_grad_() for each in few
        ]
        results = [
            merge_attention([own[0], outs[0], outs[1]], [own[1], lses[0], lses[1]]) for own in (few, many)
        ]
        assert_same(*results)
        grads = [
            torch.autograd.grad(result[0].sum() + 2 * result[1].sum(), own)
            for result, own in zip(results, (few, many), strict=True)
        ]
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected.sum_to_size(got.shape))


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0), (1, 1, 1), (7,)], ids=str)
def test_sizes(shape: tuple[int, ...]) -> None:
    outs, lses = parts_of(2, *shape)
    out, lse = merge_attention(outs, lses)
    assert (out.shape, lse.shape) == (outs.shape[1:], lses.shape[1:])
    assert merge_attention(outs[..., :0], lses)[0].shape == (*shape, 0)


def test_merged_results_may_be_merged_again() -> None:
    outs, lses = parts_of(5, 2, 7, dtype=torch.float64)
    first, last = merge_attention(outs[:2], lses[:2]), merge_attention(outs[2:], lses[2:])
    again = merge_attention(*zip(first, last, strict=True))
    for got, expected in zip(again, merge_attention(outs, lses), strict=True):
        assert_accurate("merged twice", got, expected)


@pytest.mark.cpu_only("how torch adds up on a GPU may depend on the batch")
@pytest.mark.parametrize("count", [2, 9, 40])
def test_a_row_has_the_same_bits_alone(count: int) -> None:
    outs, lses = parts_of(count, 3, 70)
    out, lse = merge_attention(outs, lses)
    for row in (0, 69):
        alone = merge_attention(outs[:, 1:2, row : row + 1], lses[:, 1:2, row : row + 1])
        assert_same(alone, (out[1:2, row : row + 1], lse[1:2, row : row + 1]))


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout(dropout_p: float) -> None:
    """Parts are weighted by their keys, dropped or not: the log-sum-exp does not know of dropout."""
    query, key, value = (tensor.double() for tensor in inputs(torch.float32).values())
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "dropout_p": dropout_p}
    halves = [(key[:, :, part], value[:, :, part]) for part in (slice(10), slice(10, None))]
    parts = [scaled_dot_product_attention(query, *half, return_weights=True, **options) for half in halves]
    out, lse = merge_attention([part[0] for part in parts], [part[2] for part in parts])
    expected = sum(
        (part[1] * (part[2] - lse).exp().unsqueeze(-1)) @ half[1].repeat_interleave(2, 1)
        for part, half in zip(parts, halves, strict=True)
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, reference.attention(query, key, value).lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_results(dtype: torch.dtype) -> None:
    """Their heads come after their tokens; they merge once they are transposed."""
    starts_q, starts_k, cut = (
        torch.tensor([0, 3, 3, 9]),
        torch.tensor([0, 7, 12, 20]),
        torch.tensor([2, 5, 0]),
    )
    query, key, value = (
        torch.randn(count, heads, 8).to(dtype) for count, heads in ((9, 4), (20, 2), (20, 2))
    )
    whole = reference.varlen_attention(query, key, value, starts_q, starts_k, 6, 8)
    exact = reference.varlen_attention(query.double(), key.double(), value.double(), starts_q, starts_k, 6, 8)
    is_first = torch.cat([torch.arange(size) < at for size, at in zip(starts_k.diff(), cut, strict=True)])
    parts = []
    for chosen, lengths in ((is_first, cut), (~is_first, starts_k.diff() - cut)):
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        given = (query, key[chosen], value[chosen], starts_q, starts, 6, 8)
        parts.append(varlen_attention(*given, enable_gqa=True, return_lse=True))
    out, lse = merge_attention([out.transpose(-3, -2) for out, _ in parts], [lse for _, lse in parts])
    assert out.is_contiguous()
    assert_accurate("out", out.transpose(-3, -2), exact.out, whole.out)
    assert_accurate("lse", lse, exact.lse, whole.lse)


@pytest.mark.cpu_only("flex_attention computes on the CPU alone")
def test_results_with_functions() -> None:
    """Functions of scores count positions from a part's first key, too."""
    query, key, value = torch.randn(3, 2, 4, 20, 8).unbind()

    def part(first: int, end: int) -> Any:
        def near(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - 0.1 * (row - column - first).abs()

        keys = key[:, :, first:end], value[:, :, first:end]
        return flex_attention(query, *keys, score_mod=near, return_lse=True)

    outs, lses = zip(part(0, 7), part(7, 20), strict=True)
    out, lse = merge_attention(outs, lses)
    tensors = (query.double(), key.double(), value.double())
    exact = reference.attention(*tensors, alibi_slopes=torch.full((4,), 0.1, dtype=torch.float64))
    assert_accurate("out", out, exact.out)
    assert_accurate("lse", lse, exact.lse)


def test_results_of_caches() -> None:
    """A prefix in one cache and the tokens after it in another one, of which a sequence has none."""
    query = torch.randn(3, 4, 2, 8)
    caches = [torch.randn(2, 3, 2, capacity, 8).unbind() for capacity in (9, 6)]
    lengths = [torch.tensor([9, 4, 7]), torch.tensor([6, 0, 3])]
    parts = [
        attention_with_kvcache(query, keys, values, cache_seqlens=length, return_lse=True)
        for (keys, values), length in zip(caches, lengths, strict=True)
    ]
    out, lse = merge_attention(*zip(*parts, strict=True))
    for sequence in range(3):
        key, value = (
            torch.cat(
                [
                    cache[which][sequence, :, : length[sequence]]
                    for cache, length in zip(caches, lengths, strict=True)
                ],
                1,
            )
            for which in range(2)
        )
        exact = reference.attention(query[sequence].double(), key.double(), value.double())
        assert_accurate("out", out[sequence], exact.out)
        assert_accurate("lse", lse[sequence], exact.lse)
