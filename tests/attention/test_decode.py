"""Decoding: up to four queries per head, with keys and values read once per group of heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import turns
from cases import DTYPES, LAYOUTS, Case, check
from comparisons import assert_same

from selfattn_ext import attention_weights, scaled_dot_product_attention

#: More than a chunk of keys, and not a multiple of any block.
LONG = 1093

DECODE = Case(batch=1, heads=2, kv_heads=2, queries=1, keys=70, head_dim=16, value_dim=16)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask per row": {"mask": "float"},
    "mask per key": {"mask": "bool keys"},
    "bool mask": {"mask": "bool"},
    "causal": {"is_causal": True, "query_offset": 40},
    "window": {"window": (300, 5), "query_offset": 1000},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": 2, "query_offset": 700},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 31, 64, 80, 128, 200])
def test_head_dims(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    check(replace(DECODE, head_dim=head_dim, value_dim=head_dim, dtype=dtype))
    # The two dims differ, and rows of values end with every number of vectors.
    value_dim = 200 - head_dim + 3
    check(replace(DECODE, queries=2, head_dim=head_dim, value_dim=value_dim, dtype=dtype, layout="offset"))


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_groups(group: int, queries: int, isa: str) -> None:
    for dtype in DTYPES:
        check(replace(DECODE, heads=2 * group, queries=queries, head_dim=24, value_dim=40, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(replace(DECODE, batch=2, heads=6, queries=3, keys=LONG, head_dim=33, layout=layout, dtype=dtype))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
def test_options(first: str, second: str, isa: str) -> None:
    options = OPTIONS[first] | OPTIONS[second]
    dtype = DTYPES[(len(first) + len(second)) % len(DTYPES)]
    case = Case(batch=1, heads=4, kv_heads=2, queries=3, head_dim=20, value_dim=12, dtype=dtype, weights=True)
    check(replace(case, keys=LONG, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_threads(options: str, dtype: torch.dtype, one_thread: None) -> None:
    case = replace(DECODE, heads=6, queries=2, keys=4 * LONG, dtype=dtype, **OPTIONS[options])
    tensors = case.inputs()
    alone = case.run_with_gradients(tensors)
    torch.set_num_threads(2)
    assert_same(case.run_with_gradients(tensors), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [5, 20, 64])
def test_a_row_does_not_depend_on_its_company(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    """A row depends neither on heads that share its keys nor on other queries, the batch or the layout."""
    case = Case(2, 15, 1, 4, LONG, head_dim, head_dim + 30, dtype)
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    whole = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    for batch in range(2):
        for head in range(15):
            part = scaled_dot_product_attention(
                query[batch, head, 1:2][None, None], key[batch : batch + 1], value[batch : batch + 1]
            )
            assert torch.equal(part[0, 0, 0], whole[batch, head, 1]), f"batch {batch}, head {head}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", ["bool mask", "causal", "window"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_hidden_keys_leave_no_trace(junk: float, options: str, dtype: torch.dtype, isa: str) -> None:
    case = replace(DECODE, heads=6, queries=2, keys=LONG, head_dim=24, value_dim=40, dtype=dtype)
    case = replace(case, **OPTIONS[options])
    tensors = case.inputs()
    clean = case.run_with_gradients(tensors)
    # Only keys that no query of the group sees get junk; the next test is about keys that some queries see.
    weights = replace(case, weights=True, mask=case.mask).run(tensors)["weights"]
    hidden = (weights == 0).reshape(1, 2, 3, 2, LONG).all(dim=(2, 3))
    if options == "bool mask":
        tensors["attn_mask"] = tensors["attn_mask"].clone()
        tensors["attn_mask"][..., 5::9] = False
        clean = case.run_with_gradients(tensors)
        hidden = torch.zeros(1, 2, LONG, dtype=torch.bool)
        hidden[..., 5::9] = True
    assert hidden.any()
    for name in ("key", "value"):
        spoiled = tensors[name].detach().clone()
        spoiled[hidden] = junk
        tensors[name] = spoiled.requires_grad_()
    assert_same(case.run_with_gradients(tensors), clean)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_a_key_hidden_from_one_query_only(junk: float, isa: str) -> None:
    query, key, value = torch.randn(1, 8, 2, 40), torch.randn(1, 1, LONG, 40), torch.randn(1, 1, LONG, 40)
    mask = torch.ones(8, 2, LONG, dtype=torch.bool)
    mask[3, 1, 700] = mask[5, 0, 700] = False
    clean = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    value[0, 0, 700, 17] = junk
    spoiled = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    for head, row in ((3, 1), (5, 0)):
        assert torch.equal(spoiled[0, head, row], clean[0, head, row])
    assert not spoiled[0, 0, 0, 17].isfinite()
    assert torch.equal(spoiled[..., 18:], clean[..., 18:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "names", [*([name] for name in OPTIONS), ["softcap", "alibi", "mask per row"]], ids=str
)
def test_the_passes_agree_on_a_score_to_the_bit(names: list[str], dtype: torch.dtype, isa: str) -> None:
    """With one key, the softmax is exactly 1 only if the pass recomputes the forward's score to the bit."""
    options = {name: value for option in names for name, value in OPTIONS[option].items()}
    options |= {"query_offset": min(options.get("query_offset", 0), 5), "sinks": False, "dropout_p": 0.0}
    case = Case(
        batch=4, heads=12, kv_heads=4, queries=3, keys=1, head_dim=83, value_dim=5, dtype=dtype, **options
    )
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items() if name != "value"}
    tensors["query"] = 3 * tensors["query"]
    weights = attention_weights(**tensors, **case.numbers(), enable_gqa=True)
    assert ((weights == 1) | (weights == 0)).all()
    assert (weights == 1).any()


def test_infinite_queries_and_keys_are_those_of_the_formula(isa: str) -> None:
    """A ragged head dim must not turn an infinite score into NaN: -inf is a weight of 0."""
    query, key, value = torch.rand(1, 1, 1, 21) + 1, torch.rand(1, 1, 9, 21), torch.randn(1, 1, 9, 4)
    for column in (0, 7, 20):
        spoiled = key.clone()
        spoiled[0, 0, 4, column] = -torch.inf
        rest = [row for row in range(9) if row != 4]
        expected = scaled_dot_product_attention(query, key[:, :, rest], value[:, :, rest])
        torch.testing.assert_close(scaled_dot_product_attention(query, spoiled, value), expected)


def test_nothing_outside_the_rows_is_read(isa: str) -> None:
    """The memory between the rows is NaN, and a row is as short as a vector or shorter."""
    for head_dim in (3, 7, 9, 18):
        for dtype in DTYPES:
            room = torch.full((1, 2, 40, head_dim + 5), torch.nan, dtype=dtype)
            room[..., 2 : 2 + head_dim] = torch.randn(1, 2, 40, head_dim)
            rows = room[..., 2 : 2 + head_dim]
            query = rows[:, :, :3]
            result = scaled_dot_product_attention(query, rows, rows)
            packed = rows.clone(memory_format=torch.contiguous_format)
            assert torch.equal(result, scaled_dot_product_attention(packed[:, :, :3], packed, packed))
            assert result.isfinite().all()


@pytest.mark.parametrize("queries", [1, 3])
def test_rows_without_elements_that_all_lie_in_one_place(queries: int, isa: str) -> None:
    """A stride of 0 bytes must not be mistaken for a row of 0 bytes."""
    query, key = torch.randn(1, 4, queries, 8), torch.randn(1, 2, 300, 8)
    nothing = torch.empty(1, 2, 1, 0).expand(1, 2, 300, 0)
    out = scaled_dot_product_attention(query, key, nothing, enable_gqa=True)
    assert out.shape == (1, 4, queries, 0)
    # Scores of empty products are 0, so the output is the mean of the values.
    value = torch.randn(1, 2, 300, 4)
    out = scaled_dot_product_attention(query[..., :0], nothing, value, scale=1.0, enable_gqa=True)
    mean = value.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
    torch.testing.assert_close(out, mean)


#: (keys, head dim, value dim) of long runs of rows.
RUNS = ((LONG, 64, 192), (514, 128, 64), (515, 192, 96))
GROUPS = (2, 4, 8, 13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_rows_without_gaps_meet_queries_in_another_order(group: int, dtype: torch.dtype, isa: str) -> None:
    """Long runs of rows give the same bits with and without gaps between them. Every run meets each group
    and each dtype; test_any_group_dtype_and_run has all combinations of the three.
    """
    check_runs(group, dtype, [RUNS[(GROUPS.index(group) + DTYPES.index(dtype)) % len(RUNS)]])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_any_group_dtype_and_run(group: int, dtype: torch.dtype, isa: str) -> None:
    check_runs(group, dtype, turns.chosen(RUNS))


def check_runs(group: int, dtype: torch.dtype, runs: Sequence[tuple[int, int, int]]) -> None:
    for keys, head_dim, value_dim in runs:
        case = replace(
            DECODE, heads=2 * group, keys=keys, head_dim=head_dim, value_dim=value_dim, dtype=dtype
        )
        check(case)
        query = torch.randn(1, 2 * group, 1, head_dim, dtype=dtype)
        rows = [torch.randn(1, 2, keys, dim, dtype=dtype) for dim in (head_dim, value_dim)]
        gaps = [torch.empty(1, 2, keys, row.shape[-1] + 8, dtype=dtype)[..., :-8].copy_(row) for row in rows]
        expected = scaled_dot_product_attention(query, *gaps, enable_gqa=True)
        assert torch.equal(scaled_dot_product_attention(query, *rows, enable_gqa=True), expected)
