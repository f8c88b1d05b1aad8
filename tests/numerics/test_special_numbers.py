"""NaN, infinities and extreme magnitudes: hidden ones change no bit, visible ones count."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import remembered
from comparisons import (
    assert_results,
    assert_same,
    attend,
    check_call,
    exact_and_peer,
    junk_of,
    results_of,
)
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import reference, scaled_dot_product_attention, varlen_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Numbers of queries: a few, and more than a tile.
LENGTHS = (3, 70)
KEYS = 150


def inputs(dtype: torch.dtype, queries: int, head_dim: int = 40, keys: int = KEYS) -> list[Tensor]:
    """Draws query, key and value of two batch elements, and two heads that share a kv head."""
    shapes = (2, 2, queries, head_dim), (2, 1, keys, head_dim), (2, 1, keys, 24)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def with_weights(tensors: list[Tensor], incoming: Tensor | None = None, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)  # dropout
    return list(results_of(attend, tensors, incoming, return_weights=True, **options).values())


def hiding(how: str, queries: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[int]]:
    """Returns options, and some of the keys that they hide from every query."""
    if how == "causal":
        return {"is_causal": True, "query_offset": 75 - queries}, [75, 100, 149]
    if how == "window":
        window = {"window_size": (20, 10), "query_offset": 60, "dropout_p": 0.2}
        return window, [3, 39, 149] if queries > 3 else [3, 39, 80, 149]
    hidden = [3, 70, 71, 149]
    seen = torch.rand(2, 1, queries, KEYS) < 0.7
    seen[..., hidden] = False
    mask = seen if how == "mask" else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    return {"attn_mask": mask}, hidden


@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["mask", "float mask", "causal", "window"])
def test_hidden_keys_leave_every_bit(how: str, dtype: torch.dtype, queries: int, kernel: str) -> None:
    tensors = inputs(dtype, queries)
    options, hidden = hiding(how, queries, dtype)
    options["incoming"] = torch.randn(2, 2, queries, 24)
    clean = with_weights(tensors, **options)
    assert not any(grad[:, :, hidden].any() for grad in clean[-2:])
    for junk in junk_of(dtype):
        dirty = [tensor.clone() for tensor in tensors]
        dirty[1][:, :, hidden] = dirty[2][:, :, hidden] = junk
        assert_same(with_weights(dirty, **options), clean, junk)


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_hidden_number_leaves_every_bit_wherever_it_stands(rows: int, kernel: str) -> None:
    """A single NaN among keys or values that are hidden from a query changes neither output nor gradient."""
    width = 19
    *tensors, incoming = (torch.randn(1, 1, rows, width) for _ in range(4))

    def before(row: int, given: list[Tensor]) -> list[Tensor]:
        """Computes output and gradient of the queries that do not see the row."""
        query = given[0].requires_grad_()
        out = scaled_dot_product_attention(*given, is_causal=True)
        return [part[:, :, :row] for part in (out, *torch.autograd.grad(out, query, incoming))]

    for which in (1, 2):
        for row in range(1, rows):
            clean = before(row, tensors)
            for column in range(width):
                dirty = [tensor.detach().clone() for tensor in tensors]
                dirty[which][0, 0, row, column] = torch.nan
                assert_same(before(row, dirty), clean, f"NaN at {row}, {column} of tensor {which}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_without_keys_leaves_every_bit(dtype: torch.dtype, kernel: str) -> None:
    """This includes the gradients of keys and values, to which neighbouring queries add in one product."""
    queries, blind = 200, [2, 70, 199]
    tensors = inputs(dtype, queries)
    seen = torch.rand(queries, KEYS) < 0.7
    seen[blind] = False
    seen[:100, 128:] = False  # only later queries see this block of keys
    tensors.append(torch.randn(2, 2, queries, 24).to(dtype))

    def results(query: Tensor, key: Tensor, value: Tensor, incoming: Tensor) -> dict[str, Tensor]:
        return results_of(attend, (query, key, value), incoming, attn_mask=seen)

    clean = results(*tensors)
    for junk, which in itertools.product((torch.nan, torch.inf), (0, 3)):
        dirty = [tensor.clone() for tensor in tensors]
        dirty[which][:, :, blind] = junk
        found = results(*dirty)
        if which == 3:  # the gradient of such a query may be junk as well
            found["grad of query"][:, :, blind] = 0.0
        assert_same(found, clean, f"{junk} in tensor {which}")


@remembered
def of_formula(tensors: list[Tensor], seen: Tensor) -> dict[str, Tensor]:
    return reference.attention(*(tensor.double() for tensor in tensors), seen)._asdict()


@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_numbers_count(dtype: torch.dtype, queries: int, kernel: str) -> None:
    """The results that are NaN or infinite are those of the formula; other rows keep theirs."""
    seen = torch.rand(queries, KEYS) < 0.6
    tensors = inputs(dtype, queries)
    clean = with_weights(tensors, attn_mask=seen)[0]
    for where in range(3):
        for junk in (torch.nan, torch.inf, -torch.inf):
            dirty = [tensor.clone() for tensor in tensors]
            dirty[where][0, 0, 2, 7] = junk
            out, _, lse = with_weights(dirty, attn_mask=seen)
            exact = of_formula(dirty, seen)
            for name, found in (("out", out), ("lse", lse)):
                assert torch.equal(found.isnan(), exact[name].isnan()), (
                    f"{name} with {junk} in tensor {where}"
                )
            if where == 0:
                others = [row for row in range(queries) if row != 2]
                assert torch.equal(out[:, :, others], clean[:, :, others]), f"beside {junk}"
                assert torch.equal(out[1], clean[1])


#: Factors that multiply query, key and value.
FACTORS = [
    (1, 1, 1),
    (10, 1, 1),
    (100, 1, 1),
    (10, 10, 10),
    (1, 1, 1e-36),
    (1e-36, 1e-36, 1),
    (1e-40, 1, 1),
    (1e-24, 1e24, 1),
    (1, 1, 1e30),
    (1, 1, 1e37),
]


@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_float32_of_any_magnitude(factors: tuple[float, ...], queries: int, kernel: str) -> None:
    """Results of any size are as accurate as those of the formula in float32."""
    tensors = [
        tensor * factor for tensor, factor in zip(inputs(torch.float32, queries, 64), factors, strict=True)
    ]
    check_call(tensors, unit=lambda _, exact: exact.abs().max())


#: Factors of grad_out, which make gradients of scores of any magnitude, down to the least normal numbers.
SMALL = (1.0, 1e-15, 1e-23, 1e-36)


@pytest.mark.parametrize("small", SMALL)
def test_float32_gradients_of_any_magnitude(small: float, kernel: str) -> None:
    """Small gradients of scores multiply columns of queries and keys of 1e38 or of 1; each column of the
    result is as accurate as with the formula in float32.
    """
    tensors = inputs(torch.float32, 70, 64)
    # Large numbers are multiplied by zeros, so that they do not enter the scores.
    for one, other, column in ((0, 1, 5), (1, 0, 40)):
        tensors[one][..., column] *= 0.5e38
        tensors[other][..., column] = 0.0
    incoming = small * torch.randn(2, 2, 70, 24)

    def of_column(name: str, exact: Tensor) -> Tensor:
        return exact.abs().amax(0 if name == "lse" else (0, 1, 2)) + torch.finfo(torch.float32).tiny

    check_call(tensors, incoming, unit=of_column)


#: Division or multiplication by these leaves the range of float32, of float64, or of neither.
SOFTCAPS = (5e-324, 1e-310, 1e-45, 2e-39, 1e-38, 1e37, 3e38, 1e39, 1.7e308)


@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_softcap_of_any_magnitude(softcap: float, dtype: torch.dtype, queries: int, kernel: str) -> None:
    """A large softcap changes no score, a small one bounds all scores by 0; neither changes a score of 0."""
    tensors = inputs(dtype, queries, keys=37)
    tensors[0][:, :, 1] = 0.0
    incoming = torch.randn(2, 2, queries, 24, dtype=torch.float64)
    # The formula can compute with softcaps in this range.
    largest = 1e150 if dtype == torch.float64 else 1e30
    judges = exact_and_peer(tensors, {"softcap": min(max(softcap, 1 / largest), largest)}, incoming)
    # The formula must be right for any softcap, too, as it computes derivatives of third order.
    for attention in (attend, reference.attention):
        found = results_of(attention, tensors, incoming, softcap=softcap)
        assert_results(found, judges, attention.__name__)


# If one key has all the attention, dS is 0. On a GPU dP and delta are summed in different orders, and the
# scale multiplies the rounding error of their difference.
@pytest.mark.cpu_only("a scale of 1e20 times what rounding leaves of dS")
@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-60, 1e-39, 1e-30, 1e20, 1e30, -1e30])
def test_scale_of_any_magnitude(scale: float, dtype: torch.dtype, queries: int, kernel: str) -> None:
    check_call(inputs(dtype, queries, keys=37), torch.randn(2, 2, queries, 24), {"scale": scale})


@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("sink", [-56.0, -70.0, -85.0])
def test_gradient_of_a_sink_of_tiny_weight(sink: float, queries: int, kernel: str) -> None:
    """A weight of 1e-24 to 1e-38 has a gradient of that order, which float32 can hold."""
    tensors = inputs(torch.float32, queries, keys=37)
    incoming = torch.randn(2, 2, queries, 24)
    offsets = [torch.arange(3, dtype=torch.int32) * rows for rows in (queries, 37)]

    def packed(*leaves: Tensor, sinks: Tensor) -> Tensor:
        rows = [leaf.transpose(1, 2).flatten(0, 1) for leaf in leaves]
        out = varlen_attention(*rows, *offsets, queries, 37, sinks=sinks, enable_gqa=True)
        return out.unflatten(0, (2, queries)).transpose(1, 2)

    def gradient(run: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        sinks = torch.full((2,), sink, dtype=dtype, requires_grad=True)
        results = run(*(tensor.to(dtype) for tensor in tensors), sinks=sinks)
        out = results[0] if isinstance(results, tuple) else results
        return torch.autograd.grad(out, sinks, incoming.to(dtype))[0]

    exact, peer = (gradient(reference.attention, dtype) for dtype in (torch.float64, torch.float32))
    size = exact.abs().max()
    # The weight is exp of a difference as large as the sink, which float32 rounds by up to 2^-24 of it. Rows
    # of both signs are summed.
    terms = abs(sink) / 8
    for run in (attend, packed):
        result = gradient(run)
        assert_accurate(run.__name__, result / size, exact / size, peer / size, terms, torch.float32)


@pytest.mark.parametrize("rise", [2.0, 7.0, 11.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_rise(dtype: torch.dtype, rise: float, kernel: str) -> None:
    """From block to block, scores rise by less and by more than a kernel may ignore in its maximum."""
    query, key, value = (torch.randn(1, 2, count, 32) for count in (40, 300, 300))
    query[..., 0], key[..., 0] = 1.0, torch.arange(300) // 64 * rise
    query[:, 1, ::2, 0] = -1.0  # the scores of these queries fall
    check_call([tensor.to(dtype) for tensor in (query, key, value)], None, {"scale": 1.0})


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("what", ["rises", "starts late", "sees NaN"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_of_a_row_change_no_bit(dtype: torch.dtype, what: str, dropout_p: float, isa: str) -> None:
    """One row may make a kernel treat its block differently, but other rows keep their bits."""
    query, key, value = (torch.randn(1, 2, count, 32) for count in (70, 300, 300))
    query[..., 0], key[..., 0] = 0.0, torch.arange(300) // 64
    mask = torch.ones(70, 300, dtype=torch.bool)
    mask[:, 200] = False
    odd, others = [3, 40], [row for row in range(70) if row not in (3, 40)]

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(1)  # dropout
        points = [tensor.to(dtype) for tensor in (query, key, value)]
        return scaled_dot_product_attention(*points, mask, dropout_p, return_lse=True)

    before = run()
    if what == "rises":
        query[..., odd, 0] = 60.0
    elif what == "starts late":
        mask[odd, :130] = False
    else:
        mask[odd, 200] = True
        value[..., 200, :] = torch.nan
    for one, other in zip(before, run(), strict=True):
        assert torch.equal(one[:, :, others], other[:, :, others])
        assert not torch.equal(one[:, :, odd], other[:, :, odd]) or (what == "sees NaN" and one.ndim == 3)


def test_every_nan_is_one(kernel: str) -> None:
    """One of the NaNs becomes a number if half a unit is added to its bits."""
    query, key, value = (torch.randn(1, 1, count, 32, dtype=torch.bfloat16) for count in (40, 70, 70))
    mask = torch.zeros(40, 70)
    mask[7, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    out = scaled_dot_product_attention(query, key, value, mask)
    assert out[0, 0, 7].isnan().all()
    assert out.isnan().sum() == 32
