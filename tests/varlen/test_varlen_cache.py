"""varlen_attention on caches: different numbers of queries, keys in pages or slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, drawn
from kv_cache_cases import Step
from tolerances import assert_accurate
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from varlen_cases import index, packed, starts

from selfattn_ext import KVCache, attention_with_kvcache, reference, varlen_attention
from selfattn_ext.arguments import AttentionOptions, PackedCall
from selfattn_ext.varlen import cached_keys

pytestmark = pytest.mark.usefixtures("one_thread")

#: (queries, keys) of each sequence: single tokens, a prompt, empty ones, a chunk that follows older keys.
SEQUENCES = ((1, 9), (11, 11), (0, 5), (3, 20), (2, 0))
QUERIES, KEYS = [one for one, _ in SEQUENCES], [one for _, one in SEQUENCES]
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, CAPACITY = 4, 2, 8, 5, 24
LENGTHS = {"max_seqlen_q": 11, "max_seqlen_k": 20}


STEP = Step(tuple(KEYS), queries=11, new=0, capacity=CAPACITY, layout="blhd")


def packed_call(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Returns packed queries, keys and values, their offsets and the longest lengths."""
    given = replace(STEP, dtype=dtype).inputs()
    lengths = {"query": QUERIES, "key_cache": KEYS, "value_cache": KEYS}
    rows = [packed(STEP.plain(given[name]), counts) for name, counts in lengths.items()]
    return *rows, starts(QUERIES), starts(KEYS), *LENGTHS.values()


def arguments(form: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns the same call with a cache; ``form`` is "slots" or the size of pages."""
    in_slots = form == "slots"
    given = replace(STEP, dtype=dtype, page_size=0 if in_slots else int(form)).inputs()
    key, value = given["key_cache"], given["value_cache"]
    call = {
        "query": packed_call(dtype)[0],
        "key": key.flatten(0, 1) if in_slots else key,
        "value": value.flatten(0, 1) if in_slots else value,
        "cu_seqlens_q": starts(QUERIES, torch.int32),
        "cu_seqlens_k": starts([CAPACITY] * len(KEYS), torch.int32) if in_slots else None,
        **LENGTHS,
        "seqused_k": given["cache_seqlens"].int(),
        "enable_gqa": True,
    }
    return call | ({"max_seqlen_k": CAPACITY} if in_slots else {"block_table": given["block_table"]})


def at_the_end() -> Tensor:
    return torch.tensor(KEYS, device=gpu.DEVICE) - torch.tensor(QUERIES, device=gpu.DEVICE)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": at_the_end()},
    "window": {"window_size": (3, 1), "query_offset": 4},
    "rules": {"softcap": 1.5, "scale": 0.7, "sinks": drawn((HEADS,), torch.Generator().manual_seed(0))},
    "alibi": {"alibi_slopes": torch.arange(4.0, device=gpu.DEVICE), "query_offset": at_the_end()},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", ["slots", "7"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_formula(dtype: torch.dtype, form: str, name: str, kernel: str) -> None:
    """The results also have the bits of packed keys."""
    options = {
        key: one.to(gpu.DEVICE) if isinstance(one, Tensor) else one for key, one in OPTIONS[name].items()
    }
    given = arguments(form, dtype)
    query, key, value, *offsets = packed_call(dtype)
    out, weights, lse = varlen_attention(**given, **options, return_weights=True, return_lse=True)

    results = {"out": out, "weights": weights[..., :20], "lse": lse}
    in_float64 = reference.varlen_attention(query.double(), key.double(), value.double(), *offsets, **options)
    in_dtype = reference.varlen_attention(query, key, value, *offsets, **options)
    for part, result in results.items():
        judges = (getattr(in_float64, part), getattr(in_dtype, part))
        assert_accurate(part, result, *judges, dtype=dtype)
    assert not weights[..., 20:].any()
    alone = varlen_attention(query, key, value, *offsets, enable_gqa=True, **options)
    assert torch.equal(out, alone)


def test_lengths_may_come_from_offsets() -> None:
    """FlashAttention 2 takes lengths as offsets only."""
    given = arguments("7")
    expected = varlen_attention(**given)
    assert torch.equal(
        varlen_attention(**given | {"seqused_k": None, "cu_seqlens_k": starts(KEYS)}), expected
    )
    # If both are given, seqused_k counts.
    assert torch.equal(varlen_attention(**given | {"cu_seqlens_k": starts([CAPACITY] * 5)}), expected)
    wide = {name: given[name].long() for name in ("seqused_k", "block_table", "cu_seqlens_q")}
    assert torch.equal(varlen_attention(**given | wide), expected)


def test_masks_have_the_capacity() -> None:
    given = arguments("7")
    mask = torch.rand(5, HEADS, 11, 28, device=gpu.DEVICE) > 0.4
    out = varlen_attention(**given, attn_mask=mask)
    assert torch.equal(out, varlen_attention(*packed_call(), mask[..., :20], enable_gqa=True))


def test_the_pages_of_a_helper() -> None:
    """A KVCache's pages can be passed in both layouts, without a copy."""
    for layout in ("bhld", "blhd"):
        cache = KVCache(1, 3, KV_HEADS, HEAD_DIM, 32, page_size=4, layout=layout, device=gpu.DEVICE)
        cache.extend([4, 1, 7])
        query, new = torch.randn(12, HEADS, HEAD_DIM), torch.randn(12, KV_HEADS, HEAD_DIM)
        out = cache.attend(0, query, new, new)
        pages = cache.keys[0] if layout == "blhd" else cache.keys[0].transpose(1, 2)
        values = cache.values[0] if layout == "blhd" else cache.values[0].transpose(1, 2)
        used = torch.tensor(cache.lengths, device=gpu.DEVICE)
        again = varlen_attention(
            query, pages, values, cache.cu_seqlens, None, 7, 7, is_causal=True, enable_gqa=True,
            seqused_k=used, block_table=cache.block_table,
        )  # fmt: skip
        assert torch.equal(again, out)


def test_queries_of_one_number_are_those_of_attention_with_kvcache() -> None:
    given = replace(STEP, page_size=7, queries=2).inputs()
    query, key, value = (given[name] for name in ("query", "key_cache", "value_cache"))
    used, table = given["cache_seqlens"], given["block_table"]
    expected = attention_with_kvcache(
        query, key, value, None, None, used, table, is_causal=True, layout="blhd"
    )
    out = varlen_attention(
        query.flatten(0, 1), key, value, starts([2] * 5), None, 2, 20, is_causal=True, enable_gqa=True,
        query_offset=used - 2, seqused_k=used, block_table=table,
    )  # fmt: skip
    assert torch.equal(out, expected.flatten(0, 1))


#: Queries, keys, heads, kv heads, the size of pages, and whether heads lie inside pages: some sequences need
#: more memory for rows, others for pages or heads.
UNLIKE = {
    "many rows, many pages": ((4, 1), (64, 40000), 8, 1, 2, False),
    "many rows, many heads": ((4, 1, 3, 1, 1, 1), (128,) * 6, 24, 3, 128, True),
    "a few queries of each number": ((1, 2, 3, 4, 1, 2), (70, 3, 128, 5, 33, 64), 4, 4, 16, False),
}


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unlike_sequences_in_company(dtype: torch.dtype, name: str, isa: str) -> None:
    """Sequences share a thread's memory: it must suffice for each, and none may see another's numbers."""
    queries, keys, heads, kv_heads, page_size, inside = UNLIKE[name]
    generator = torch.Generator().manual_seed(2)
    query = drawn((sum(queries), heads, 16), generator).to(gpu.DEVICE, dtype).split(list(queries))
    columns = [-(-count // page_size) for count in keys]
    shape = (sum(columns), page_size, kv_heads) if inside else (sum(columns), kv_heads, page_size)
    key, value = (drawn((*shape, 16), generator).to(gpu.DEVICE, dtype) for _ in range(2))
    if not inside:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    pages = torch.randperm(sum(columns), generator=generator).to(torch.int32).split(columns)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).to(gpu.DEVICE)

    def call(chosen: list[int]) -> Tensor:
        return varlen_attention(
            torch.cat([query[b] for b in chosen]),
            key,
            value,
            starts([queries[b] for b in chosen]),
            None,
            max(queries[b] for b in chosen),
            max(keys[b] for b in chosen),
            seqused_k=torch.tensor([keys[b] for b in chosen], device=gpu.DEVICE),
            block_table=table[chosen],
            enable_gqa=True,
        )

    together = call(list(range(len(queries)))).split(list(queries))
    for b, rows in enumerate(together):
        assert torch.equal(rows, call([b])), b


def test_dropout_is_that_of_packed_keys() -> None:
    torch.manual_seed(3)
    out = varlen_attention(**arguments("7"), dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(out, varlen_attention(*packed_call(), None, 0.4, enable_gqa=True))


@pytest.mark.parametrize("form", ["slots", "7"])
def test_one_graph(form: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(varlen_attention, backend=counter, fullgraph=True)
    given = arguments(form)
    for used in (KEYS, [1, 2, 3, 4, 0]):
        given["seqused_k"] = torch.tensor(used, device=gpu.DEVICE)
        assert torch.equal(compiled(**given, is_causal=True), varlen_attention(**given, is_causal=True))
    assert counter.frame_count == 1


#: (form, changed arguments, error, its text)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("7", {"seqused_k": index(9, 11, 5, 29, 0)}, ValueError, "seqused_k must lie .* 28, got 29 for 3"),
    ("7", {"seqused_k": index(9, 11, 5, -1, 0)}, ValueError, "seqused_k must lie .* got -1 for 3"),
    ("7", {"seqused_k": index(9, 11, 5)}, ValueError, r"seqused_k .* each of the 5 sequences.*\(3,\)"),
    ("7", {"seqused_k": torch.ones(5)}, TypeError, "seqused_k must be an int32 or int64"),
    ("7", {"seqused_k": 9}, TypeError, "seqused_k must be an int32 or int64 tensor, got int"),
    ("7", {"seqused_k": None}, TypeError, "cu_seqlens_k must be an int32 or int64"),
    ("7", {"seqused_k": None, "cu_seqlens_k": index(0, 9, 8, 9, 9, 9)}, ValueError, r"diff\(\) .* got -1"),
    ("7", {"seqused_k": None, "cu_seqlens_k": index(0, 9)}, ValueError, r"diff\(\) must have a length for"),
    ("7", {"cu_seqlens_q": index()}, ValueError, "cu_seqlens_q must have one element more"),
    ("7", {"query": torch.randn(17)}, ValueError, r"query must be \(total, H, E\)"),
    ("7", {"block_table": torch.full((5, 4), 99).int()}, ValueError, "is 99, but there are 23 pages"),
    ("7", {"block_table": torch.zeros(4, 4).int()}, ValueError, "a row for each of the 5"),
    ("7", {"block_table": torch.zeros(5, 4)}, TypeError, "block_table must be int32 or int64"),
    ("7", {"block_table": None}, ValueError, "key must have 3 dimensions"),
    ("7", {"cu_seqlens_q": index(0, 1, 12, 12, 15, 99)}, ValueError, "cu_seqlens_q must end within query"),
    ("7", {"max_seqlen_q": 10}, ValueError, "max_seqlen_q must be at least .* 11"),
    ("7", {"max_seqlen_k": 19}, ValueError, "max_seqlen_k must be at least .* 20 of number 3, got 19"),
    ("7", {"max_seqlen_k": -1}, ValueError, "max_seqlen_k must lie between 0"),
    (
        "7", {"seqused_k": None, "cu_seqlens_k": starts(KEYS, torch.int32), "max_seqlen_k": 0},
        ValueError, "max_seqlen_k must be at least .* 20 of number 3, got 0",
    ),
    ("slots", {"max_seqlen_k": 23}, ValueError, "max_seqlen_k must be at least .* 24"),
    ("7", {"key": torch.randn(9, KV_HEADS, HEAD_DIM)}, ValueError, r"key \(pages, page_size, Hk, E\)"),
    ("7", {"key": torch.randn(23, 7, KV_HEADS, 9)}, ValueError, "same last dimension"),
    ("7", {"value": torch.randn(23, 6, KV_HEADS, 5)}, ValueError, "agree in pages, page_size and heads"),
    ("7", {"key": torch.randn(23, 7, HEAD_DIM, KV_HEADS).mT}, ValueError, "key in pages must be dense"),
    ("7", {"enable_gqa": False}, ValueError, "enable_gqa=True"),
    ("7", {"query": torch.randn(17, 3, HEAD_DIM)}, ValueError, "must divide those of query"),
    ("7", {"query": torch.randn(17, HEADS, HEAD_DIM).double()}, TypeError, "float64"),
    ("7", {"attn_mask": [torch.ones(1, 9)] * 5}, TypeError, "attn_mask must be one tensor"),
    ("7", {"attn_mask": torch.ones(11, 20)}, ValueError, r"\(5, 4, 11, 28\)"),
    ("7", {"sinks": torch.ones(4, requires_grad=True)}, ValueError, "no gradients with seqused_k or block_t"),
    ("7", {"query": torch.randn(17, 4, 8, requires_grad=True)}, ValueError, "no gradients with seqused_k or"),
    ("slots", {"seqused_k": index(9, 11, 25, 20, 0)}, ValueError, "24 rows .* for sequence 2, got 25"),
    ("slots", {"seqused_k": index(9, 11, 5, 20)}, ValueError, "seqused_k must have a length for each"),
    ("slots", {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be an int32 or int64"),
    ("slots", {"cu_seqlens_k": index(0, 24, 48, 72, 96, 121)}, ValueError, "cu_seqlens_k must end within"),
    ("slots", {"key": torch.randn(120, 7, KV_HEADS, HEAD_DIM)}, ValueError, "key must have 3 dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "changes", "error", "text"), REFUSED, ids=[case[3] for case in REFUSED])
def test_refusals(form: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        varlen_attention(**arguments(form) | changes)


def test_without_gradients_parameters_are_fine() -> None:
    given = arguments("7")
    given["query"].requires_grad_()
    with torch.no_grad():
        assert not varlen_attention(**given).requires_grad


@pytest.mark.parametrize(
    ("form", "name", "values"),
    [
        ("7", "seqused_k", index(9, 11, 5, 29, 0)),
        ("7", "block_table", torch.full((5, 4), 99, dtype=torch.int32)),
        ("7", "cu_seqlens_q", index(0, 1, 12, 12, 15, 99)),
        ("slots", "cu_seqlens_k", index(0, 24, 48, 72, 96, 121)),
        ("slots", "query_offset", index(0, 0, 0, 0, 2**60)),
    ],
    ids=str,
)
def test_what_a_gpu_would_not_refuse(form: str, name: str, values: Tensor) -> None:
    """For a GPU, the values are checked in Python instead."""
    given: dict[str, Any] = {"block_table": None, **arguments(form), name: values}
    options = AttentionOptions(query_offset=given.pop("query_offset", 0))
    call = PackedCall(**{field: given.get(field) for field in PackedCall._fields} | {"options": options})
    keywords = {"seqlens_k": given["seqused_k"], "max_seqlen_q": 11, "max_seqlen_k": CAPACITY}
    keys = given["key"]
    if form == "7":
        keys, keywords["block_table"] = keys.transpose(1, 2), given["block_table"]
    else:
        keywords["cu_seqlens_k"] = given["cu_seqlens_k"]
    with pytest.raises(ValueError, match=name if name != "seqused_k" else "cache_seqlens"):
        cached_keys._check_values_on_cuda(call, keys, keywords)
