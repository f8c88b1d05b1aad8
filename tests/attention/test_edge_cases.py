"""Sizes of 0 and 1, sizes around every tile edge, awkward memory layouts, and extreme numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, LAYOUTS, Case, check
from comparisons import check_call
from tolerances import assert_accurate

from selfattn_ext import (
    attention_scores,
    attention_with_kvcache,
    masked_softmax,
    reference,
    scaled_dot_product_attention,
    varlen_attention,
)

QUERY_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 127, 128, 129)
KEY_EDGES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257)
HEAD_DIMS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 65, 96, 97, 127, 128, 129, 192, 193, 256, 300)


@pytest.mark.parametrize("queries", QUERY_EDGES)
def test_query_tiles(queries: int, device: str) -> None:
    case = Case(device=device, batch=1, queries=queries)
    check(replace(case, keys=66, head_dim=24, value_dim=24))
    check(replace(case, heads=4, keys=queries, is_causal=True, dtype=torch.float64))


@pytest.mark.parametrize("keys", KEY_EDGES)
def test_key_tiles(keys: int, device: str) -> None:
    case = Case(device=device, batch=1, queries=19, keys=keys)
    check(replace(case, mask="bool"))
    check(replace(case, queries=34, is_causal=True, query_offset=keys - 34, dtype=torch.bfloat16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, device: str) -> None:
    one = Case(device=device, batch=1, heads=1, kv_heads=1, queries=18, keys=35)
    check(replace(one, head_dim=head_dim, value_dim=24))
    check(replace(one, head_dim=24, value_dim=head_dim, dtype=torch.float16))
    check(replace(one, queries=5, keys=67, head_dim=head_dim, value_dim=head_dim, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 8, 1, 50), (1, 8, 1, 700), (3, 5, 2, 1), (1, 1, 130, 1)], ids=str)
def test_decoding(shape: tuple[int, ...], device: str) -> None:
    batch, heads, queries, keys = shape
    case = Case(batch, heads, heads, queries, keys, 64, 64, device=device)
    for kv_heads in {1, heads}:
        check(replace(case, kv_heads=kv_heads, is_causal=True, query_offset=keys - queries))


def test_strides_of_what_has_no_elements() -> None:
    """torch calls tensors without elements contiguous, and copies none of them."""
    rows, no_rows = torch.randn(2, 3, 8), torch.randn(8, 3, 2).permute(2, 1, 0)[:, :0]
    assert no_rows.stride(-1) > 1
    assert scaled_dot_product_attention(no_rows, rows, rows).shape == (2, 0, 8)
    assert not scaled_dot_product_attention(rows, no_rows, no_rows).any()
    leaf = no_rows.detach().requires_grad_()
    (grad,) = torch.autograd.grad(scaled_dot_product_attention(leaf, leaf, leaf).sum(), leaf)
    assert grad.shape == (2, 0, 8)
    starts, packed = torch.tensor([0, 0]), no_rows.transpose(0, 1)
    assert varlen_attention(packed, packed, packed, starts, starts, 0, 0).shape == (0, 2, 8)
    assert attention_with_kvcache(no_rows[None], rows[None], rows[None]).shape == (1, 2, 0, 8)


@pytest.mark.parametrize("zero", ["batch", "heads", "queries", "keys", "head_dim", "value_dim"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_zero(zero: str, dtype: torch.dtype, device: str) -> None:
    sizes = {zero: 0, "kv_heads": 0} if zero == "heads" else {zero: 0}
    case = Case(dtype=dtype, sinks=True, mask="float32", weights=True, lse=True, device=device)
    case = replace(case, **{"queries": 5, "keys": 6, **sizes})
    tensors = case.inputs()
    results = case.run(tensors)
    expected = case.formula(tensors)
    for name, result in results.items():
        assert result.shape == expected[name].shape
        assert_accurate(name, result.detach(), expected[name].detach().double())
    grads = torch.autograd.grad(sum(r.float().sum() for r in results.values()), list(tensors.values()))
    assert all(grad.isfinite().all() for grad in grads)
    if zero in ("queries", "keys"):
        assert not any(grad.any() for grad in grads[:3])
    plain = scaled_dot_product_attention(*(tensors[name] for name in ("query", "key", "value")))
    assert plain.shape == results["out"].shape
    assert not (plain.any() and zero == "keys")


def test_no_keys_without_a_sink(kernel: str) -> None:
    query, key = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 0, 5)
    out, weights, lse = scaled_dot_product_attention(query, key, key, return_weights=True, return_lse=True)
    assert out.shape == (2, 3, 4, 5)
    assert not out.any()
    assert weights.shape == (2, 3, 4, 0)
    assert (lse == -torch.inf).all()
    assert attention_scores(query, key).shape == (2, 3, 4, 0)
    assert masked_softmax(torch.randn(2, 0, 5)).shape == (2, 0, 5)
    assert masked_softmax(torch.randn(2, 5, 0)).shape == (2, 5, 0)


def test_head_dim_of_zero_mixes_evenly(kernel: str) -> None:
    out = scaled_dot_product_attention(
        torch.ones(1, 1, 3, 0), torch.ones(1, 1, 4, 0), torch.arange(4.0).view(1, 1, 4, 1)
    )
    torch.testing.assert_close(out, torch.full((1, 1, 3, 1), 1.5))
    assert not attention_scores(torch.ones(3, 0), torch.ones(4, 0)).any()


@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(LAYOUTS, DTYPES)), ids=str)
def test_layouts(layout: str, dtype: torch.dtype, isa: str) -> None:
    check(Case(heads=3, kv_heads=3, layout=layout, dtype=dtype, mask="float"))


def test_layouts_mixed_and_masked() -> None:
    """Each input has a layout of its own, and masks have every stride."""
    query = torch.randn(2, 9, 3, 8).transpose(1, 2)
    key = torch.randn(1, 3, 11, 8).expand(2, -1, -1, -1)
    value = torch.randn(2, 3, 8, 11).mT
    dense = scaled_dot_product_attention(query.contiguous(), key.contiguous(), value.contiguous())
    assert torch.equal(scaled_dot_product_attention(query, key, value), dense)
    base = torch.randn(2, 3, 22, 18)
    for mask in (
        base[:, :, ::2, ::2].mT,
        base[:, :, :9, 1:12],
        base[:1, 1:2, 3:4, :11].expand(2, 3, 9, 11),
        base[..., :9, 5:6].expand(2, 3, 9, 11),
        (base > 0)[:, :, ::2, ::2].mT,
        base.half()[:, 0, :9, 7:18].unsqueeze(1),
    ):
        result = scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(result, scaled_dot_product_attention(query, key, value, mask.contiguous()))
        torch.testing.assert_close(result, reference.attention(query, key, value, mask).out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_stay_finite(dtype: torch.dtype, kernel: str) -> None:
    query, key, value = (torch.randn(1, 2, 33, 16).to(dtype) for _ in range(3))
    for factor in (30.0, 1000.0):
        check_call([query * factor, key, value], None, {"return_weights": True})


def test_small_numbers(kernel: str) -> None:
    """Weights and inputs down to the subnormal range neither trap nor vanish where they count."""
    query, key, value = (torch.randn(1, 1, 20, 8) for _ in range(3))
    out = scaled_dot_product_attention(query * 1e-20, key * 1e-20, value * 1e-30)
    exact = reference.attention(query.double() * 1e-20, key.double() * 1e-20, value.double() * 1e-30).out
    assert_accurate("out", out / 1e-30, exact / 1e-30)
    check_call([query * 40, key, value])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_do_not_drift(dtype: torch.dtype, isa: str) -> None:
    check_call([torch.randn(1, 1, length, 16).to(dtype) for length in (8, 6000, 6000)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_values_are_reproduced(dtype: torch.dtype, kernel: str) -> None:
    """A mean of equal numbers is that number."""
    query, key = torch.randn(1, 2, 20, 8).to(dtype), torch.randn(1, 2, 150, 8).to(dtype)
    out = scaled_dot_product_attention(query, key, torch.full((1, 2, 150, 4), 0.75, dtype=dtype))
    assert_accurate("out", out, torch.full((1, 2, 20, 4), 0.75, dtype=torch.float64))


def test_windows_wider_than_anything() -> None:
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    plain = scaled_dot_product_attention(query, key, value)
    for window in [(2**62, 2**62), (100, 100), [9, 9], (8, 8)]:
        assert torch.equal(scaled_dot_product_attention(query, key, value, window_size=window), plain)
    assert torch.equal(
        scaled_dot_product_attention(query, key, value, is_causal=True, query_offset=2**39), plain
    )
    assert not scaled_dot_product_attention(query, key, value, is_causal=True, query_offset=-(2**39)).any()
