"""Values and gradients near the largest number: the formula's means of them, on every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparisons import assert_results, assert_same, attend, check_call, exact_and_peer, results_of
from test_special_numbers import DTYPES, KEYS, LENGTHS, with_weights
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import attention_with_kvcache, reference, varlen_attention


def large_values(dtype: torch.dtype, keys: int) -> tuple[Tensor, Tensor]:
    """Returns values whose columns LARGE are near the largest number, with one sign or both, and the same
    values with these columns divided by their common factor.
    """
    small = torch.randn(2, 1, keys, 24).to(dtype)
    small[..., 0], small[..., 1], small[..., 17] = 1.0, -1.0, 1.0
    small[..., 1::2, 17] = -1.0
    large = small.clone()
    large[..., LARGE] *= torch.finfo(dtype).max / 2
    return large, small


LARGE = [0, 1, 17]
ORDINARY = [column for column in range(24) if column not in LARGE]


@pytest.mark.parametrize("keys", [5, 1100])
@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_means_of_large_values(dtype: torch.dtype, queries: int, keys: int, kernel: str) -> None:
    """The formula divides weights by their sum before it multiplies the values, so it has a mean even if
    the sum of the weighted values overflows. So must the kernels.
    """
    query, key = (torch.randn(2, heads, rows, 40).to(dtype) for heads, rows in ((2, queries), (1, keys)))
    large, small = large_values(dtype, keys)
    seen, numbers = torch.rand(2, 1, queries, keys) < 0.7, torch.rand(2)

    def options_for(dtype: torch.dtype) -> list[dict[str, Any]]:
        heads = numbers.to(torch.float64 if dtype == torch.float64 else torch.float32)
        return [
            {},
            {"is_causal": True, "query_offset": keys - queries, "sinks": heads},
            {"attn_mask": seen, "softcap": 2.0},
            {"window_size": (40, 3), "alibi_slopes": heads, "query_offset": 3},
            {"dropout_p": 0.2},
        ]

    for options, in_double in zip(options_for(dtype), options_for(torch.float64), strict=True):
        out, *others = with_weights([query, key, large], **options)
        out_of_small, *others_of_small = with_weights([query, key, small], **options)
        exact = with_weights([part.double() for part in (query, key, small)], **in_double)[0]
        if kernel == "fused-amx" and dtype == torch.float32:
            # A row of values with a large number has no pieces, so it is added as floats.
            assert_accurate("beside large numbers", out[..., ORDINARY], exact[..., ORDINARY])
        else:
            assert_same(out[..., ORDINARY], out_of_small[..., ORDINARY], f"beside large, {options.keys()}")
        assert_same(others, others_of_small)
        means = out[..., LARGE].double() / (torch.finfo(dtype).max / 2)
        assert_accurate(f"{options.keys()}", means, exact[..., LARGE], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_large_values_of_sequences(dtype: torch.dtype, kernel: str) -> None:
    """Packed and in the pages of a cache, a sequence has the same bits as alone."""
    queries, keys, page = (2, 30), (300, 7), 16
    points = [[torch.randn(1, 2, count, 40).to(dtype) for count in counts] for counts in (queries, keys)]
    values = [large_values(dtype, count)[0][:1].expand(-1, 2, -1, -1).contiguous() for count in keys]
    alone = [attend(*(part[i] for part in points), values[i])[0] for i in range(len(queries))]
    assert all(bool(out.isfinite().all()) for out in alone)
    starts = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (queries, keys)]
    rows = [torch.cat(parts, 2)[0].transpose(0, 1) for parts in (*points, values)]
    packed = varlen_attention(*rows, *starts, max(queries), max(keys))
    assert_same(packed, torch.cat(alone, 2)[0].transpose(0, 1))

    pages = [
        torch.nn.functional.pad(row[: keys[0]], (0, 0, 0, 0, 0, -keys[0] % page)).unflatten(0, (-1, page))
        for row in rows[1:]
    ]
    order = torch.randperm(len(pages[0]))
    shuffled = [torch.empty_like(part).index_copy_(0, order, part) for part in pages]
    table, length = order.int()[None], torch.tensor([keys[0]], dtype=torch.int32)
    out = attention_with_kvcache(
        points[0][0].transpose(1, 2), *shuffled, cache_seqlens=length, block_table=table
    )
    assert_same(out, alone[0].transpose(1, 2))


@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("what", ["value", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_large_numbers(dtype: torch.dtype, what: str, queries: int, kernel: str) -> None:
    """The gradients are finite where the formula's in the same dtype are, and as accurate."""
    query, key = (torch.randn(2, 1, rows, 40).to(dtype) for rows in (queries, KEYS))
    value = large_values(dtype, KEYS)[0]
    incoming = torch.randn(2, 1, queries, 24).to(dtype) / 64
    if what == "gradient":
        value, incoming = torch.randn(2, 1, KEYS, 24).to(dtype) / 64, large_values(dtype, queries)[0]

    def largest(_: str, exact: Tensor) -> Tensor:
        return exact.abs().max() + torch.finfo(dtype).tiny

    check_call([query, key, value], incoming, unit=largest, dtype=dtype)


@pytest.mark.parametrize("queries", [1, *LENGTHS])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_a_scale_near_the_largest_number(dtype: torch.dtype, queries: int, kernel: str) -> None:
    """Queries times the scale are infinite, but the scores are not, or a softcap bounds them."""
    wide = reference.accumulation_dtype(dtype)
    scale = 0.9 * float(torch.finfo(wide).max)
    query = (8 * torch.randn(2, 2, queries, 40)).to(dtype)
    key, value = (torch.randn(2, 2, KEYS, columns).to(dtype) for columns in (40, 24))
    incoming = torch.randn(2, 2, queries, 24).to(dtype)
    small = (key / 512).to(dtype)
    for keys, options in (
        (small, {}),
        (small, {"is_causal": True, "query_offset": 60, "alibi_slopes": torch.rand(2, dtype=wide)}),
        (key, {"softcap": 1.5}),
        (key, {"softcap": 1e-3, "attn_mask": torch.rand(queries, KEYS) < 0.5}),
    ):
        tensors = [query, keys, value]
        options["scale"] = scale
        found = results_of(attend, tensors, incoming, **options)
        # A row whose only weight is 1 has dO·V - dO·O = 0. CUDA sums the two in different orders, so that a
        # rounding error of theirs is left, which the scale multiplies: docs/limits.md, "Numbers".
        rounds = query.device.type == "cuda" and "softcap" not in options
        of_scores = float((incoming.double() @ value.double().mT).abs().max()) * scale if rounds else 1.0
        terms = {"grad of query": of_scores * float(keys.abs().max()) if rounds else 1.0,
                 "grad of key": of_scores * float(query.abs().max()) if rounds else 1.0}  # fmt: skip
        for name in list(found):
            if terms.get(name, 1.0) * torch.finfo(dtype).eps > torch.finfo(dtype).max:
                del found[name]  # float16 has no number of the size of that error
            else:
                assert found[name].isfinite().all(), (name, options.keys())
        assert_results(
            found, exact_and_peer(tensors, options, incoming), options.keys(), terms=terms, dtype=dtype
        )
