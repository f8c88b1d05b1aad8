"""Gradients of few queries, at most four or eight, computed as text is decoded and not in strips.

The last queries of a strip are computed likewise, if they would leave most of a vector empty: one to four of
17 to 20, one of 33 and 49.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import DTYPES, Case, check, normal
from comparisons import assert_same, results_of

from selfattn_ext import scaled_dot_product_attention, varlen_attention

#: Numbers of keys around a block of 128 and around a chunk of 512, whose sums a second pass adds up.
KEYS = (0, 1, 2, 7, 127, 128, 129, 511, 512, 513, 1029)
#: Dims of keys and values: parts of a vector, whole vectors, and rows with a part at their end.
DIMS = ((1, 8), (7, 15), (16, 17), (48, 24), (64, 31), (80, 130), (24, 40))
#: Options that change scores.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "bool"},
    {"mask": "float"},
    {"mask": "bool keys", "is_causal": True, "query_offset": 70},
    {"mask": "float keys", "dropout_p": 0.3},
    {"window": (60, 20), "query_offset": 140},
    {"softcap": 2.0, "alibi": 2},
    {"softcap": 1.5, "mask": "bool", "dropout_p": 0.2},
    {"alibi": 1, "sinks": 1, "is_causal": True, "query_offset": 130},
    {"sinks": 2, "mask": "float32", "window": (-1, 5), "query_offset": 3},
    {"lse": True, "weights": True, "mask": "bool"},
    {"weights": True, "alibi": 1, "mask": "float rows", "dropout_p": 0.1},
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 4, 5, 8, 9, 17, 20, 33, 49])
def test_sizes(isa: str, queries: int, dtype: torch.dtype) -> None:
    for turn, keys in enumerate(KEYS, queries):
        dims = DIMS[turn % len(DIMS)]
        heads, kv_heads = ((1, 1), (2, 2), (3, 1), (8, 2), (9, 1))[turn % 5]
        check(Case(2, heads, kv_heads, queries, keys, *dims, dtype))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(isa: str, options: dict[str, Any]) -> None:
    for turn, (queries, dtype) in enumerate(itertools.product((1, 4, 17), DTYPES)):
        layout = ("contiguous", "transposed", "expanded", "offset")[turn % 4]
        kv_heads, keys = (4, 2, 1)[turn % 3], (150, 530)[turn % 2]
        check(Case(2, 4, kv_heads, queries, keys, 24, 16, dtype, layout=layout, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("queries", [3, 18])
def test_hidden_junk_changes_nothing(isa: str, queries: int, junk: float, dtype: torch.dtype) -> None:
    """The junk is in keys and values that nobody sees, or in a gradient whose row sees no key."""
    hidden = queries - 2  # sees none of the first keys, too
    others = [row for row in range(queries) if row != hidden]
    incoming = normal(1, 2, queries, 20, dtype=dtype, seed=4)
    tensors = [
        normal(1, heads, rows, 20, dtype=dtype, seed=rows)
        for heads, rows in ((2, queries), (1, 140), (1, 140))
    ]
    shown = torch.ones(queries, 140, dtype=torch.bool)
    shown[:, 130:] = False
    shown[hidden, :70] = False

    def results(tensors: list[torch.Tensor], incoming: torch.Tensor) -> dict[str, torch.Tensor]:
        return results_of(scaled_dot_product_attention, tensors, incoming, attn_mask=shown, enable_gqa=True)

    plain = results(tensors, incoming)
    for which in (1, 2):
        dirty = [tensor.clone() for tensor in tensors]
        dirty[which][..., 130:, 3] = junk
        assert_same(results(dirty, incoming), plain, f"input {which}")
    dirty_gradient = incoming.clone()
    dirty_gradient[:, :, hidden, 5] = junk
    found = results(tensors, dirty_gradient)
    for name in ("grad of key", "grad of value"):
        assert_same(found[name][..., :70, :], plain[name][..., :70, :], name)
        assert not bool(found[name][..., 70:130, :].isfinite().all())
    assert_same(found["grad of query"][..., others, :], plain["grad of query"][..., others, :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [4, 19])
def test_an_only_key_leaves_no_gradient_of_scores(isa: str, queries: int, dtype: torch.dtype) -> None:
    """There dP and delta are the same sum, whose difference must be 0, however large it is."""
    for value_dim in (8, 24, 33):
        tensors = [1e3 * normal(1, 2, rows, 16, dtype=dtype, seed=rows) for rows in (queries, 1)]
        tensors.append(1e3 * normal(1, 2, 1, value_dim, dtype=dtype, seed=9))
        found = results_of(
            scaled_dot_product_attention, tensors, 10 * normal(1, 2, queries, value_dim, dtype=dtype, seed=5)
        )
        assert not bool(found["grad of query"].any() | found["grad of key"].any())


def test_same_bits_for_any_number_of_threads(isa: str) -> None:
    tensors = [normal(2, heads, rows, 24, seed=rows) for heads, rows in ((4, 2), (2, 1100), (2, 1100))]
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(
            results_of(scaled_dot_product_attention, tensors, normal(2, 4, 2, 24, seed=1), enable_gqa=True)
        )
    torch.set_num_threads(before)
    assert_same(found[1:], [found[0], found[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_of_few_and_many_queries(isa: str, dtype: torch.dtype) -> None:
    """Elements get the bits that they get alone."""
    lengths = [(1, 600), (30, 40), (4, 4), (0, 9), (17, 70), (2, 1), (33, 3), (5, 130), (3, 0)]
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    tensors = [normal(rows, 2, 24, dtype=dtype, seed=rows) for rows in (queries, keys, keys + 1)]
    tensors[2] = tensors[2][1:]
    incoming = normal(queries, 2, 24, dtype=dtype, seed=3)
    starts = [
        torch.tensor([0, *itertools.accumulate(pair[i] for pair in lengths)], dtype=torch.int32)
        for i in (0, 1)
    ]
    longest = [max(pair[i] for pair in lengths) for i in (0, 1)]
    found = results_of(lambda *leaves: varlen_attention(*leaves, *starts, *longest), tensors, incoming)
    for begin_q, end_q, begin_k, end_k in zip(
        starts[0][:-1], starts[0][1:], starts[1][:-1], starts[1][1:], strict=True
    ):
        rows = (slice(begin_q, end_q), slice(begin_k, end_k), slice(begin_k, end_k))
        alone = results_of(
            scaled_dot_product_attention,
            [tensor[row].transpose(0, 1)[None] for tensor, row in zip(tensors, rows, strict=True)],
            incoming[rows[0]].transpose(0, 1)[None],
        )
        for name, row in zip(
            ("out", "grad of query", "grad of key", "grad of value"), (rows[0], *rows), strict=True
        ):
            assert_same(found[name][row], alone[name][0].transpose(0, 1), name)
