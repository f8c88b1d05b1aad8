"""NaN, infinities and extreme magnitudes: hidden ones change no bit, visible ones count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import reference, scaled_dot_product_attention, varlen_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Numbers of queries: a few, and more than a tile.
LENGTHS = (3, 70)
KEYS = 150
NAMES = ("out", "grad of query", "grad of key", "grad of value")


def inputs(dtype: torch.dtype, queries: int, head_dim: int = 40) -> list[Tensor]:
    """Draws query, key and value of two batch elements, and two heads that share a kv head."""
    shapes = (2, 2, queries, head_dim), (2, 1, KEYS, head_dim), (2, 1, KEYS, 24)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def junk_of(dtype: torch.dtype) -> tuple[float, ...]:
    inf, nan = torch.inf, torch.nan
    return (nan, inf, -inf) if dtype == torch.float16 else (nan, inf, -inf, 3e38, 2.0**61, 2.0**-81, 1e-40)


def forward(tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)  # dropout
    options = {"enable_gqa": True, "return_weights": True, "return_lse": True} | options
    return scaled_dot_product_attention(*tensors, **options)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) & (one.signbit() == other.signbit()) | one.isnan() & other.isnan()).all())


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
    clean = forward(tensors, **options)
    for junk in junk_of(dtype):
        dirty = [tensor.clone() for tensor in tensors]
        dirty[1][:, :, hidden] = junk
        dirty[2][:, :, hidden] = junk
        for name, one, other in zip(("out", "weights", "lse"), forward(dirty, **options), clean, strict=True):
            assert same_bits(one, other), f"{name} with {junk}"


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_hidden_number_leaves_every_bit_wherever_it_stands(rows: int, kernel: str) -> None:
    """A single NaN among keys or values that are hidden from a query changes neither output nor gradient."""
    width = 19
    tensors = [torch.randn(1, 1, rows, width).requires_grad_() for _ in range(3)]
    incoming = torch.randn(1, 1, rows, width)

    def before(row: int, given: list[Tensor]) -> list[Tensor]:
        """Computes output and gradient of the queries that do not see the row."""
        out = scaled_dot_product_attention(*given, is_causal=True)
        (grad,) = torch.autograd.grad(out, given[0], incoming)
        return [out[:, :, :row], grad[:, :, :row]]

    for which in (1, 2):
        for row in range(1, rows):
            clean = before(row, tensors)
            for column in range(width):
                dirty = [tensor.detach().clone().requires_grad_() for tensor in tensors]
                dirty[which].detach()[0, 0, row, column] = torch.nan
                for one, other in zip(before(row, dirty), clean, strict=True):
                    assert same_bits(one, other), (
                        f"NaN at {row}, {column} of {('query', 'key', 'value')[which]}"
                    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_without_keys_leaves_every_bit(dtype: torch.dtype, kernel: str) -> None:
    """This includes the gradients of keys and values, to which neighbouring queries add in one product."""
    queries, blind = 200, 70
    tensors = [tensor.requires_grad_() for tensor in inputs(dtype, queries)]
    seen = torch.rand(queries, KEYS) < 0.7
    seen[blind] = False
    seen[:100, 128:] = False  # only later queries see this block of keys
    incoming = torch.randn(2, 2, queries, 24).to(dtype)

    def gradients(query: Tensor, incoming: Tensor) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(query, *tensors[1:], attn_mask=seen, enable_gqa=True)
        grads = torch.autograd.grad(out, (query, *tensors[1:]), incoming)
        return torch.cat((grads[0][:, :, :blind], grads[0][:, :, blind + 1 :]), 2), *grads[1:]

    clean = gradients(tensors[0], incoming)
    for junk in (torch.nan, torch.inf):
        for dirty_query, dirty_incoming in ((True, False), (False, True)):
            query, grad = tensors[0].detach().clone(), incoming.clone()
            if dirty_query:
                query[:, :, blind] = junk
            if dirty_incoming:
                grad[:, :, blind] = junk
            dirty = gradients(query.requires_grad_(), grad)
            for name, one, other in zip(("query", "key", "value"), dirty, clean, strict=True):
                assert same_bits(one, other), f"gradient of {name} with {junk}"


@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_numbers_count(dtype: torch.dtype, queries: int, kernel: str) -> None:
    """The results that are NaN or infinite are those of the formula; other rows keep theirs."""
    seen = torch.rand(queries, KEYS) < 0.6
    tensors = inputs(dtype, queries)
    clean = forward(tensors, attn_mask=seen)[0]
    for where in range(3):
        for junk in (torch.nan, torch.inf, -torch.inf):
            dirty = [tensor.clone() for tensor in tensors]
            dirty[where][0, 0, 2, 7] = junk
            results = forward(dirty, attn_mask=seen)
            exact = reference.attention(*(tensor.double() for tensor in dirty), attn_mask=seen)
            named = dict(zip(("out", "weights", "lse"), results, strict=True))
            for name in ("out", "lse"):
                expected = getattr(exact, name).isnan()
                assert torch.equal(named[name].isnan(), expected), f"{name} with {junk} in tensor {where}"
            if where == 0:
                others = [row for row in range(queries) if row != 2]
                assert torch.equal(results[0][:, :, others], clean[:, :, others]), f"beside {junk}"
                assert torch.equal(results[0][1], clean[1])


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
    exact = reference.attention(*(tensor.double() for tensor in tensors)).out
    peer = reference.attention(*tensors).out
    out = forward(tensors)[0]
    size = exact.abs().max()
    assert_accurate("out", out / size, exact / size, peer / size, dtype=torch.float32)


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
    cotangent = small * torch.randn(2, 2, 70, 24)

    def gradients(run: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = run(*leaves)
        return list(torch.autograd.grad(out, leaves, cotangent.to(dtype)))

    def formula(*leaves: Tensor) -> Tensor:
        return reference.attention(*leaves).out

    exact = gradients(formula, torch.float64)
    peer = gradients(formula, torch.float32)
    ours = gradients(lambda *leaves: scaled_dot_product_attention(*leaves, enable_gqa=True), torch.float32)
    for name, truth, theirs, result in zip(("query", "key", "value"), exact, peer, ours, strict=True):
        size = truth.abs().amax((0, 1, 2)) + torch.finfo(torch.float32).tiny
        assert_accurate(name, result / size, truth / size, theirs / size, dtype=torch.float32)


#: Division or multiplication by these leaves the range of float32, of float64, or of neither.
SOFTCAPS = (5e-324, 1e-310, 1e-45, 2e-39, 1e-38, 1e37, 3e38, 1e39, 1.7e308)


@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_softcap_of_any_magnitude(softcap: float, dtype: torch.dtype, queries: int, kernel: str) -> None:
    """A large softcap changes no score, a small one bounds all scores by 0; neither changes a score of 0."""
    tensors = [tensor[:, :, :37] for tensor in inputs(dtype, queries)]
    tensors[0][:, :, 1] = 0.0
    cotangent = torch.randn(2, 2, queries, 24, dtype=torch.float64)

    def results(run: Callable[..., Any], dtype: torch.dtype, softcap: float) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = run(*leaves, softcap=softcap)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))]

    def ours(*leaves: Tensor, softcap: float) -> Tensor:
        return scaled_dot_product_attention(*leaves, softcap=softcap, enable_gqa=True)

    def formula(*leaves: Tensor, softcap: float) -> Tensor:
        return reference.attention(*leaves, softcap=softcap).out

    # The formula in float64 can compute with softcaps in this range.
    within = min(max(softcap, 1e-150), 1e150)
    exact = results(formula, torch.float64, within)
    peer = results(formula, dtype, within if dtype == torch.float64 else min(max(within, 1e-30), 1e30))
    for name, truth, theirs, result in zip(NAMES, exact, peer, results(ours, dtype, softcap), strict=True):
        assert_accurate(name, result, truth, theirs)
    # The formula must be right, too, as it computes derivatives of third order.
    for name, truth, theirs, result in zip(NAMES, exact, peer, results(formula, dtype, softcap), strict=True):
        assert_accurate(f"the formula's {name}", result, truth, theirs)


# If one key has all the attention, dS is 0. On a GPU dP and delta are summed in different orders, and the
# scale multiplies the rounding error of their difference.
@pytest.mark.cpu_only("a scale of 1e20 times what rounding leaves of dS")
@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-60, 1e-39, 1e-30, 1e20, 1e30, -1e30])
def test_scale_of_any_magnitude(scale: float, dtype: torch.dtype, queries: int, kernel: str) -> None:
    tensors = [tensor[:, :, :37] for tensor in inputs(dtype, queries)]
    cotangent = torch.randn(2, 2, queries, 24)

    def results(run: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))]

    def ours(*leaves: Tensor) -> Tensor:
        return scaled_dot_product_attention(*leaves, scale=scale, enable_gqa=True)

    def formula(*leaves: Tensor) -> Tensor:
        return reference.attention(*leaves, scale=scale).out

    outcomes = results(formula, torch.float64), results(formula, dtype), results(ours, dtype)
    for name, exact, peer, result in zip(NAMES, *outcomes, strict=True):
        assert_accurate(name, result, exact, peer)


@pytest.mark.parametrize("queries", [3, 35])
@pytest.mark.parametrize("sink", [-56.0, -70.0, -85.0])
def test_gradient_of_a_sink_of_tiny_weight(sink: float, queries: int, kernel: str) -> None:
    """A weight of 1e-24 to 1e-38 has a gradient of that order, which float32 can hold."""
    tensors = [tensor[:, :, :37] for tensor in inputs(torch.float32, queries)]
    cotangent = torch.randn(2, 2, queries, 24)
    offsets = [torch.arange(3, dtype=torch.int32) * rows for rows in (queries, 37)]

    def packed(*leaves: Tensor, sinks: Tensor) -> Tensor:
        rows = [leaf.transpose(1, 2).flatten(0, 1) for leaf in leaves]
        out = varlen_attention(*rows, *offsets, queries, 37, sinks=sinks, enable_gqa=True)
        return out.unflatten(0, (2, queries)).transpose(1, 2)

    def dense(*leaves: Tensor, sinks: Tensor) -> Tensor:
        return scaled_dot_product_attention(*leaves, sinks=sinks, enable_gqa=True)

    def formula(*leaves: Tensor, sinks: Tensor) -> Tensor:
        return reference.attention(*leaves, sinks=sinks).out

    def gradient(run: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        sinks = torch.full((2,), sink, dtype=dtype, requires_grad=True)
        out = run(*(tensor.to(dtype) for tensor in tensors), sinks=sinks)
        return torch.autograd.grad(out, sinks, cotangent.to(dtype))[0]

    exact, peer = gradient(formula, torch.float64), gradient(formula, torch.float32)
    size = exact.abs().max()
    # The weight is exp of a difference as large as the sink, which float32 rounds by up to 2^-24 of it. Rows
    # of both signs are summed.
    terms = abs(sink) / 8
    for run in (dense, packed):
        result = gradient(run, torch.float32)
        assert_accurate(run.__name__, result / size, exact / size, peer / size, terms, torch.float32)


@pytest.mark.parametrize("rise", [2.0, 7.0, 11.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_rise(dtype: torch.dtype, rise: float, kernel: str) -> None:
    """From block to block, scores rise by less and by more than a kernel may ignore in its maximum."""
    query, key, value = (torch.randn(1, 2, count, 32) for count in (40, 300, 300))
    query[..., 0], key[..., 0] = 1.0, torch.arange(300) // 64 * rise
    query[:, 1, ::2, 0] = -1.0  # the scores of these queries fall
    points = [tensor.to(dtype) for tensor in (query, key, value)]
    out, lse = scaled_dot_product_attention(*points, scale=1.0, return_lse=True)
    exact, peer = (
        reference.attention(*(point.double() for point in points), scale=1.0),
        reference.attention(*points, scale=1.0),
    )
    assert_accurate("out", out, exact.out, peer.out)
    assert_accurate("lse", lse, exact.lse, peer.lse)


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
