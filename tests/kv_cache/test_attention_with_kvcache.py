"""attention_with_kvcache: results, writes to caches of every form, and refusals."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DTYPES
from kv_cache_cases import Step, check
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from selfattn_ext import attention_with_kvcache, scaled_dot_product_attention
from selfattn_ext.kv_cache import cache_checks

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = Step()


def numbers(step: Step) -> dict[str, dict[str, Any]]:
    """Returns options by name."""
    batch, heads, capacity = len(step.lengths), step.heads, step.capacity
    if step.page_size:
        capacity = -(-capacity // step.page_size) * step.page_size
    mask = torch.rand(batch, heads, step.queries, capacity) > 0.3
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window_size": (4, 0)},
        "sinks": {"sinks": torch.randn(heads)},
        "softcap": {"softcap": 1.5, "scale": 0.7},
        "alibi": {"alibi_slopes": torch.rand(batch, heads)},
        "bool mask": {"attn_mask": mask},
        "float mask": {"attn_mask": torch.randn(batch, 1, 1, capacity)},
        "offsets": {"query_offset": torch.arange(batch) - 1, "is_causal": True},
        "offset": {"query_offset": 2, "window_size": (3, 1)},
    }


@pytest.mark.parametrize(
    ("layout", "page_size"), [("bhld", 0), ("blhd", 0), ("bhld", 1), ("blhd", 7), ("bhld", 16)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps(layout: str, page_size: int, dtype: torch.dtype, kernel: str) -> None:
    step = replace(STEP, layout=layout, page_size=page_size, dtype=dtype)
    check(step, is_causal=True)
    # The prompt crosses pages, and has more queries than the few-query products take.
    check(replace(step, lengths=(0, 5, 2), queries=9, new=9, seed=1), is_causal=True)


@pytest.mark.parametrize("page_size", [0, 1, 7])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("name", numbers(STEP))
def test_options(name: str, queries: int, page_size: int) -> None:
    step = replace(STEP, queries=queries, new=queries, page_size=page_size, seed=3)
    check(step, **numbers(step)[name])


@pytest.mark.parametrize(
    "change",
    [
        {"new": 0, "queries": 3},
        {"new": 4, "queries": 2},
        {"heads": 6, "kv_heads": 1},
        {"heads": 2, "kv_heads": 2},
        {"lengths": (19, 19, 0)},
        {"lengths": (0, 0, 0), "new": 0},
        {"lengths": (7,), "capacity": 8},
        {"lengths": (600, 33), "capacity": 1100, "head_dim": 40, "heads": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [0, 7])
def test_shapes(change: dict[str, Any], page_size: int, isa: str) -> None:
    check(replace(STEP, page_size=page_size, **change), is_causal=True)


LENGTHS = {"int": 5, "int32": torch.tensor([5, 5, 5], dtype=torch.int32), "one": torch.tensor(5)}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_lengths_of_every_kind(length: int | Tensor) -> None:
    step = replace(STEP, lengths=(5, 5, 5), queries=2, new=2)
    expected = check(step, is_causal=True)
    out = attention_with_kvcache(**{**step.inputs(), "cache_seqlens": length}, is_causal=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("page_size", [0, 5])
def test_without_lengths_the_whole_cache_counts(page_size: int) -> None:
    step = replace(STEP, lengths=(20, 20), queries=3, new=0, page_size=page_size)
    expected = check(step, is_causal=True)
    out = attention_with_kvcache(**{**step.inputs(), "cache_seqlens": None}, is_causal=True)
    assert torch.equal(out, expected)


def test_the_layout_is_found_where_only_one_fits() -> None:
    for layout, queries in itertools.product(("bhld", "blhd"), (1, 3)):
        step = replace(STEP, layout=layout, queries=queries, new=queries)
        expected = check(step, is_causal=True)
        found = attention_with_kvcache(**step.inputs(), is_causal=True)
        assert torch.equal(step.plain(found), expected)


def test_dropout_is_that_of_attention() -> None:
    step = replace(STEP, lengths=(19, 19), queries=3, new=0, value_dim=8)
    given = step.inputs()
    torch.manual_seed(5)
    out = attention_with_kvcache(**given, dropout_p=0.4)
    torch.manual_seed(5)
    keys, values = given["key_cache"][:, :, :19], given["value_cache"][:, :, :19]
    expected = scaled_dot_product_attention(given["query"], keys, values, None, 0.4, enable_gqa=True)
    torch.testing.assert_close(out, expected)


def test_autocast_takes_the_dtype_of_the_cache() -> None:
    step = replace(STEP, dtype=torch.bfloat16)
    expected = check(step)
    given = step.inputs()
    for name in ("query", "key", "value"):
        given[name] = given[name].float()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert torch.equal(attention_with_kvcache(**given), expected)
        with pytest.raises(TypeError, match=r"query must be float64, .* got torch.int32"):
            attention_with_kvcache(**given | {"query": given["query"].int()})


def test_tensors_without_data_are_refused() -> None:
    given = {name: tensor.to("meta") for name, tensor in STEP.inputs().items()}
    with pytest.raises(ValueError, match="query is on the meta device"):
        attention_with_kvcache(**given)


PAGED = replace(STEP, page_size=4)
ALIKE = replace(PAGED, lengths=(3, 0, 3))
#: (step, changed arguments, error, its text)
REFUSED: list[tuple[Step, dict[str, Any], type[Exception], str]] = [
    (STEP, {"cache_seqlens": torch.tensor([3, 20, 1])}, ValueError, r"sequence 1 .* is full.* 20 keys"),
    (STEP, {"cache_seqlens": 20}, ValueError, "sequence 0 of the cache is full"),
    (STEP, {"cache_seqlens": torch.tensor([3, 0, -1])}, ValueError, "between 0 and the capacity 20, got -1"),
    (STEP, {"cache_seqlens": torch.tensor([3, 0])}, ValueError, r"each of the 3 sequences.*\(2,\)"),
    (STEP, {"cache_seqlens": torch.tensor([3.0, 0, 0])}, TypeError, "must be an int, or an int32 or"),
    (STEP, {"cache_seqlens": [3, 0, 0]}, TypeError, "int32 or int64 tensor .* 3 sequences, got list"),
    (STEP, {"cache_seqlens": None}, ValueError, "cache_seqlens must be given where key"),
    (STEP, {"value": None}, ValueError, "key and value must be given together"),
    (STEP, {"key": torch.randn(3, 2, 1, 8).double()}, TypeError, "key is torch.float64 and query"),
    (STEP, {"key": torch.randn(3, 1, 1, 8)}, ValueError, r"key must be \(3, 2, 1, 8\) in the layout 'bhld'"),
    (STEP, {"value": torch.randn(3, 2, 2, 5)}, ValueError, r"value must be \(3, 2, 1, 5\)"),
    (STEP, {"query": torch.randn(3, 3, 1, 8)}, ValueError, "2 heads, which do not divide the 3 of query"),
    (STEP, {"query": torch.randn(3, 4, 1, 7)}, ValueError, "the same head dim"),
    (STEP, {"query": torch.randn(4, 1, 8)}, ValueError, "query must have 4 dimensions"),
    (STEP, {"query": torch.randn(2, 4, 1, 8)}, ValueError, "the batch of query"),
    (STEP, {"query": torch.randn(3, 4, 1, 8, requires_grad=True)}, ValueError, "no derivatives"),
    (STEP, {"sinks": torch.randn(4, requires_grad=True)}, ValueError, "no derivatives"),
    (STEP, {"sinks": torch.randn(3)}, ValueError, "sinks of shape"),
    (STEP, {"attn_mask": torch.ones(3, 4, 1, 4).bool()}, ValueError, r"attn_mask of shape \(3, 4, 1, 4\)"),
    (STEP, {"attn_mask": torch.ones(1, 20).int()}, TypeError, "attn_mask must be bool"),
    (STEP, {"softcap": -1.0}, ValueError, "softcap"),
    (STEP, {"window_size": (-2, 0)}, ValueError, "window_size"),
    (STEP, {"scale": torch.inf}, ValueError, "scale must be finite"),
    (STEP, {"is_causal": torch.tensor([True, False])}, TypeError, "is_causal must be a bool, the same for"),
    (STEP, {"dropout_p": 2.0}, ValueError, "dropout_p"),
    (STEP, {"layout": "lbhd"}, ValueError, "layout must be"),
    (STEP, {"query_offset": torch.zeros(2).long()}, ValueError, "query_offset must be an int, or .* 3 seq"),
    (STEP, {"query_offset": torch.tensor([0, 0, 2**41])}, ValueError, r"query_offset\[2\] must lie .* got"),
    (STEP, {"cache_seqlens": torch.tensor([0, 0, 2**63 - 1])}, ValueError, "cache_seqlens must lie between"),
    (STEP, {"key_cache": torch.zeros(3, 2, 8, 20).mT}, ValueError, "key_cache must be dense"),
    (STEP, {"value_cache": torch.zeros(1, 2, 20, 5).expand(3, -1, -1, -1)}, ValueError, "same memory"),
    (PAGED, {"cache_seqlens": torch.tensor([3, 20, 1])}, ValueError, "sequence 1 of the cache is full"),
    (PAGED, {"block_table": torch.zeros(3, 5)}, TypeError, "block_table must be int32 or int64"),
    (PAGED, {"block_table": torch.zeros(2, 5).int()}, ValueError, "a row for each of the 3"),
    (PAGED, {"block_table": torch.full((3, 5), 99).int()}, ValueError, "is 99, but there are 18 pages"),
    (PAGED, {"block_table": torch.full((3, 5), -1).int()}, ValueError, r"\[0, 0\] is -1"),
    (ALIKE, {"block_table": torch.tensor([[0], [1], [0]]).int()}, ValueError, "sequences 0 and 2"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "changes", "error", "text"), REFUSED, ids=[case[3] for case in REFUSED])
def test_refusals_leave_the_cache_alone(
    step: Step, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = {**step.inputs(), **changes}
    kept = {name: given[name].clone() for name in ("key_cache", "value_cache")}
    with pytest.raises(error, match=text):
        attention_with_kvcache(**given)
    for name, tensor in kept.items():
        assert torch.equal(given[name].view(torch.int32), tensor.view(torch.int32)), name


def test_what_a_gpu_would_not_refuse() -> None:
    """For a GPU, positions are checked in Python instead; on the CPU the operator checks them."""
    far = torch.tensor([0, 0, 2**41])
    with pytest.raises(ValueError, match=r"query_offset\[2\] must lie between .* got 2199"):
        cache_checks.values(torch.zeros(3, 2, 20, 8), None, {}, far)
    for given, name in (
        (far, "query_offset[2]"),
        (2**41, "query_offset"),
        (torch.tensor(2**41), "query_offset"),
    ):
        with pytest.raises(ValueError, match=rf"{re.escape(name)} must lie between .* got 2199"):
            attention_with_kvcache(**STEP.inputs(), query_offset=given)


#: Strides of a cache (3, 2, 20, 8) that overlap in rows, heads, sequences, or only across two dimensions, and
#: strides that are as close as possible without overlap.
OVERLAPPING = [(320, 160, 7, 1), (320, 159, 8, 1), (319, 160, 8, 1), (159, 320, 8, 1), (160, 160, 8, 1)]
APART = [(320, 160, 8, 1), (160, 480, 8, 1), (16, 8, 48, 1), (321, 160, 8, 1), (400, 161, 8, 1)]


def strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Copies a tensor into a view with those strides; where it overlaps, the number written last stays."""
    room = tensor.new_zeros(1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)))
    return room.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("strides", OVERLAPPING, ids=str)
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_caches_that_overlap_themselves_are_refused(layout: str, name: str, strides: tuple[int, ...]) -> None:
    step = replace(STEP, value_dim=8, capacity=20 if layout == "bhld" else 2)
    step = replace(step, kv_heads=2 if layout == "bhld" else 20, heads=40, layout=layout, lengths=(1, 0, 1))
    given = step.inputs()
    assert given[name].shape == (3, 2, 20, 8)
    given[name] = strided(given[name].nan_to_num(), strides)
    kept = {cache: given[cache].clone() for cache in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match=f"{name} is written to, but parts of it are the same memory"):
        attention_with_kvcache(**given, layout=layout)
    assert all(torch.equal(given[cache].nan_to_num(), kept[cache].nan_to_num()) for cache in kept)
    # A call that only reads takes such caches.
    assert attention_with_kvcache(**given | {"key": None, "value": None}, layout=layout).isfinite().all()


@pytest.mark.parametrize("strides", APART, ids=str)
def test_caches_of_any_strides_that_do_not_overlap(strides: tuple[int, ...]) -> None:
    step = replace(STEP, value_dim=8)
    given = step.inputs()
    for name in ("key_cache", "value_cache"):
        given[name] = strided(given[name], strides)
    check(step, given, is_causal=True)


def test_negative_views() -> None:
    """A tensor that is only read may be a negative view; such a cache is refused before any write."""
    given = STEP.inputs()
    expected = attention_with_kvcache(**STEP.inputs())
    for name in ("query", "key", "value"):
        given[name] = torch._neg_view(-given[name])
    assert torch.equal(attention_with_kvcache(**given), expected)

    for name in ("key_cache", "value_cache"):
        given = STEP.inputs()
        given[name] = torch._neg_view(-given[name])
        kept = {cache: given[cache].clone() for cache in ("key_cache", "value_cache")}
        with pytest.raises(ValueError, match=f"{name} is written to, but a negative view"):
            attention_with_kvcache(**given)
        assert all(torch.equal(given[cache].nan_to_num(), kept[cache].nan_to_num()) for cache in kept)
        given |= {"key": None, "value": None}
        seen = attention_with_kvcache(**given)
        assert torch.equal(seen, attention_with_kvcache(**given | {name: given[name].resolve_neg()}))


def test_page_numbers_may_be_int64_of_any_strides() -> None:
    step = replace(STEP, page_size=4)
    expected = attention_with_kvcache(**step.inputs())
    given = step.inputs()
    given["block_table"] = torch.stack([given["block_table"].long()] * 2, 2)[..., 0]
    assert torch.equal(attention_with_kvcache(**given), expected)
    given["block_table"] = torch.full_like(given["block_table"], 2**32)
    with pytest.raises(ValueError, match="block_table"):
        attention_with_kvcache(**given)


def test_pages_behind_the_last_key_are_not_looked_at() -> None:
    step = replace(PAGED, lengths=(3, 0, 11))
    given = step.inputs()
    used = torch.arange(5) * 4 < torch.tensor(step.lengths)[:, None] + 1
    given["block_table"] = given["block_table"].masked_fill(~used, -7)
    check(step, given)


def test_sequences_may_read_the_same_pages() -> None:
    """A common beginning is stored in the cache only once."""
    step = replace(PAGED, lengths=(8, 9, 11))
    given = step.inputs()
    given["block_table"][:, :2] = given["block_table"][0, :2]
    check(step, given, is_causal=True)


def test_transforms_and_tangents_are_refused() -> None:
    given = STEP.inputs()
    rest = {name: value for name, value in given.items() if name != "query"}
    with pytest.raises(ValueError, match=r"no derivatives.*torch\.func"):
        torch.func.vmap(lambda query: attention_with_kvcache(query, **rest))(given["query"][None])
    with torch.autograd.forward_ad.dual_level():
        query = torch.autograd.forward_ad.make_dual(given["query"], given["query"])
        with pytest.raises(ValueError, match=r"no derivatives.*tangent"):
            attention_with_kvcache(query, **rest)


def test_without_gradients_parameters_are_fine() -> None:
    given = STEP.inputs()
    given["query"].requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not attention_with_kvcache(**given).requires_grad


@pytest.mark.parametrize(("layout", "page_size"), [("bhld", 4), ("blhd", 0)])
def test_compiled_steps(layout: str, page_size: int) -> None:
    """One graph serves all tokens, with the bits of eager calls."""
    counter = CompileCounterWithBackend("aot_eager")
    step = replace(STEP, layout=layout, page_size=page_size)
    options = {"is_causal": True, "window_size": (5, 0), "layout": layout}

    def decode(given: dict[str, Tensor]) -> Tensor:
        return attention_with_kvcache(**given, **options)

    in_graph = torch.compile(decode, backend=counter, fullgraph=True)
    compiled, eager = step.inputs(), step.inputs()
    for token in range(4):
        news = replace(step, seed=token + 10).inputs()
        outs = []
        for given, function in ((compiled, in_graph), (eager, decode)):
            given |= {name: news[name] for name in ("query", "key", "value")}
            outs.append(function(given))
            given["cache_seqlens"] += 1
        assert torch.equal(*outs)
        for name in ("key_cache", "value_cache"):
            assert torch.equal(compiled[name].nan_to_num(), eager[name].nan_to_num())
    assert counter.frame_count == 1


def test_a_length_that_is_an_int_takes_two_graphs() -> None:
    """The first graph is for one length, the second for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    decode = torch.compile(attention_with_kvcache, backend=counter, fullgraph=True)
    given = replace(STEP, lengths=(3, 3, 3)).inputs()
    for length in range(3, 8):
        news = replace(STEP, seed=length).inputs()
        given |= {name: news[name] for name in ("query", "key", "value")} | {"cache_seqlens": length}
        out = decode(**given, is_causal=True, window_size=(2, 0))
        assert torch.equal(out, attention_with_kvcache(**given, is_causal=True, window_size=(2, 0)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("page_size", [0, 7])
def test_a_long_prompt_is_written_by_threads(page_size: int) -> None:
    step = replace(STEP, lengths=(5, 0), new=700, queries=700, capacity=710, page_size=page_size, head_dim=64)
    given = step.inputs()
    sequences = [step.sequence(given, b) for b in range(2)]
    torch.set_num_threads(2)
    attention_with_kvcache(**given, is_causal=True)
    for b, expected in enumerate(sequences):
        after = replace(step, lengths=(705, 700), new=0).sequence(given, b)
        assert all(torch.equal(*pair) for pair in zip(after, expected, strict=True))
