"""Selected keys of caches, in slots and in pages: the formula with the mask that the selection means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES
from comparisons import assert_same, exact_and_peer
from kv_cache_cases import Step
from tolerances import assert_accurate
from torch import Tensor
from varlen_cases import packed, starts

import selfattn_ext
from selfattn_ext import KVCache, attention_with_kvcache, masks, varlen_attention

#: How keys are selected: (keys of a block, heads that have lists of their own).
KINDS = {"keys": (1, 4), "keys of kv heads": (1, 2), "blocks of 5": (5, 1), "blocks of 16": (16, 2)}
#: Sequences that are empty before the step, or have one key, or a prime number of keys.
STEP = Step(lengths=(37, 0, 1, 53, 16), queries=1, head_dim=24, value_dim=17, capacity=70)
FORMS: dict[str, dict[str, Any]] = {
    "slots": {},
    "pages": {"page_size": 7},
    "transposed pages": {"page_size": 16, "layout": "blhd"},
    "long pages": {"page_size": 64, "dtype": torch.bfloat16},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "rules": {"window_size": (20, 0), "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.0, 0.05]), "query_offset": 3},
}


def chosen(step: Step, kind: str, selected: int = 6, seed: int = 0) -> Tensor:
    """Returns numbers (B, heads, L, K) of keys after the step: in any order, repeated, some of them -1."""
    size, heads = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    shape = (heads, step.queries, selected)
    blocks = [-(-(length + step.new) // size) for length in step.lengths]
    rows = [torch.randint(-1, count, shape, generator=generator, device="cpu") for count in blocks]
    return torch.stack(rows).to(step.device)


def selection(kind: str, numbers: Tensor) -> dict[str, Any]:
    size, heads = KINDS[kind]
    numbers = numbers.squeeze(-3) if heads == 1 else numbers
    return {"indices": numbers.int()} if size == 1 else {"block_indices": numbers, "block_size": size}


def check(step: Step, kind: str, given: dict[str, Any], numbers: Tensor, found: Any, options: Any) -> None:
    """Asserts that out and lse of a step are right."""
    for b in range(len(step.lengths)):
        keys, values = step.sequence(given, b)
        count = keys.shape[1]
        size = (1, KINDS[kind][0])
        seen = masks.selected_pairs(numbers[b : b + 1], step.queries, count, step.heads, size)[0]
        keywords = {"query_offset": count - step.queries, **options, "visible": seen}
        exact, peer = exact_and_peer([step.plain(given["query"])[b], keys, values], keywords)
        for name, result in (("out", step.plain(found[0])), ("lse", found[1])):
            judges = (exact[name], peer[name])
            assert_accurate(f"{name} of sequence {b}", result[b], *judges, dtype=step.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", [1, 41])
def test_the_formula(queries: int, form: str, isa: str) -> None:
    """Pages are in random order, and hold NaN where no sequence has a key."""
    # Every way to select comes with all options, but in different forms.
    first = list(FORMS).index(form) + queries // 41 * 2
    for kind, name in zip(KINDS, ([*OPTIONS] * 3)[first:], strict=False):
        step = replace(STEP, queries=queries, new=queries, capacity=100, **FORMS[form])
        given, numbers = step.inputs(), chosen(step, kind)
        before = {key: one.clone() if isinstance(one, Tensor) else one for key, one in given.items()}
        options = {**OPTIONS[name], **selection(kind, numbers)}
        found = attention_with_kvcache(**given, **options, layout=step.layout, return_lse=True)
        check(step, kind, before, numbers, found, OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_have_the_bits_of_slots(kind: str, dtype: torch.dtype, one_thread: None) -> None:
    """With any number of threads, too, and also if the pages' order is another."""
    step = replace(STEP, queries=29, new=0, lengths=(97, 40, 100, 61, 99), capacity=100, dtype=dtype)
    numbers = chosen(step, kind, 11)

    def run(step: Step) -> Tensor:
        result: Tensor = attention_with_kvcache(**step.inputs(), **selection(kind, numbers), is_causal=True)
        return result

    expected = run(step)
    for page_size in (1, 7, 64):
        assert_same(run(replace(step, page_size=page_size)), expected)
    torch.set_num_threads(3)
    assert_same(run(replace(step, page_size=7)), expected)
    assert_same(run(step), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["slots", "pages", "packed", "packed pages"])
def test_steps_of_a_cache(form: str, kind: str) -> None:
    """A step of the helper is a call of the function, and so is one of packed tokens."""
    size, heads = KINDS[kind]
    pages = 8 if form.endswith("pages") else None
    cache = KVCache(1, 3, kv_heads=2, head_dim=16, capacity=40, page_size=pages)
    lengths = [0, 0, 0]
    for counts in ([17, 1, 30], [2, 2, 2], [1, 1, 1]):
        if not form.startswith("packed"):
            counts = counts[:1] * 3
        lengths = [before + count for before, count in zip(lengths, counts, strict=True)]
        cache.extend(counts)
        rows = [torch.randint(-1, -(-length // size), (heads, 40, 4)) for length in lengths]
        numbers = torch.cat([row[:, :count] for row, count in zip(rows, counts, strict=True)], 1)
        query = torch.randn(sum(counts), 4, 16)
        key, value = torch.randn(2, sum(counts), 2, 16).unbind()
        if form.startswith("packed"):
            out = cache.attend(0, query, key, value, **selection(kind, numbers))
        else:
            numbers = numbers.unflatten(1, (3, -1)).transpose(0, 1)
            tokens = [each.unflatten(0, (3, -1)).transpose(1, 2) for each in (query, key, value)]
            out = cache.attend(0, *tokens, **selection(kind, numbers)).transpose(1, 2).flatten(0, 1)
        table = {} if cache.block_table is None else {"block_table": cache.block_table}
        for b, (start, count) in enumerate(zip(cache.cu_seqlens.tolist(), counts, strict=False)):
            own = {name: one[b : b + 1] for name, one in table.items()}
            caches = [each[0] if table else each[0][b : b + 1] for each in (cache.keys, cache.values)]
            alone = attention_with_kvcache(
                query[start : start + count].transpose(0, 1)[None],
                *caches,
                cache_seqlens=lengths[b],
                **own,
                **selection(kind, rows[b][None, :, :count]),
                is_causal=True,
            )
            assert_same(out[start : start + count], alone[0].transpose(0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_queries(kind: str) -> None:
    """varlen_attention on a cache, in slots or in pages, has the bits of packed keys."""
    step = replace(STEP, queries=11, new=0, layout="blhd")
    counts, lengths = [1, 0, 1, 11, 4], list(step.lengths)
    numbers = chosen(step, kind)
    given = step.inputs()
    common: dict[str, Any] = {
        "cu_seqlens_q": starts(counts),
        "max_seqlen_q": 11,
        "enable_gqa": True,
        "is_causal": True,
    }
    common["query_offset"] = torch.tensor(lengths) - torch.tensor(counts)
    rows = torch.cat([each[:, :count] for each, count in zip(numbers, counts, strict=True)], 1)
    common |= selection(kind, rows)
    query = packed(step.plain(given["query"]), counts)
    key, value = (packed(step.plain(given[f"{name}_cache"]), lengths) for name in ("key", "value"))
    expected = varlen_attention(query, key, value, cu_seqlens_k=starts(lengths), max_seqlen_k=53, **common)
    slots = [given[f"{name}_cache"].flatten(0, 1) for name in ("key", "value")]
    used = {"seqused_k": torch.tensor(lengths)}
    begin = starts([step.capacity] * 5)
    found = varlen_attention(query, *slots, cu_seqlens_k=begin, max_seqlen_k=70, **used, **common)
    assert_same(found, expected)
    paged = replace(step, page_size=7).inputs()
    caches, table = (paged["key_cache"], paged["value_cache"]), {"block_table": paged["block_table"]}
    options = {**common, **used, **table, "cu_seqlens_k": None, "max_seqlen_k": 53}
    assert_same(varlen_attention(query, *caches, **options), expected)
    out, weights = varlen_attention(query, *caches, **options, return_weights=True)  # by the mask
    torch.testing.assert_close(out, expected)
    assert weights.shape == (5, 4, 11, 70)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_what_becomes_a_mask(layout: str) -> None:
    step = replace(STEP, queries=3, new=0, lengths=(37, 5, 9, 53, 16), page_size=7, layout=layout)
    given, numbers = step.inputs(), chosen(step, "blocks of 5")
    options = {**selection("blocks of 5", numbers), "is_causal": True, "layout": layout}
    expected = attention_with_kvcache(**given, **options, return_lse=True)
    out, weights, lse = attention_with_kvcache(**given, **options, return_weights=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    seen = masks.selected_pairs(numbers, 3, 70, 4, (1, 5))
    assert not weights.masked_select(~seen.expand(weights.shape)).any()
    request = selfattn_ext.AuxRequest(lse=True)
    torch.testing.assert_close(attention_with_kvcache(**given, **options, return_aux=request)[1].lse, lse)
    out = attention_with_kvcache(**given, **options, mask_mod=lambda b, h, q, k: k <= q)
    torch.testing.assert_close(out, expected[0])
    with selfattn_ext.backends.use("loops" if gpu.DEVICE == "cpu" else "sm80"):
        torch.testing.assert_close(attention_with_kvcache(**given, **options), expected[0])
    mask = torch.randn(4, 1, 70)
    masked = attention_with_kvcache(**given, **options, attn_mask=mask)
    again = attention_with_kvcache(**given, **options, attn_mask=mask, return_weights=True)[0]
    torch.testing.assert_close(masked, again)


def test_compiled() -> None:
    step = replace(STEP, page_size=7)

    def run(given: dict[str, Any], numbers: Tensor) -> Tensor:
        out: Tensor = attention_with_kvcache(**given, block_indices=numbers, block_size=5, is_causal=True)
        return out

    numbers = chosen(step, "blocks of 5")
    expected = run(step.inputs(), numbers)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(step.inputs(), numbers)
    assert_same(compiled, expected)


# The sequences have 3, 1 and 8 keys after the step.
SMALL = Step(lengths=(2, 0, 7), queries=2, new=1, capacity=8)
ROWS = torch.zeros(3, 2, 1, dtype=torch.int64)
REFUSALS = [
    ({"indices": ROWS.bool()}, "indices must be int32 or int64"),
    ({"indices": ROWS[:2]}, r"indices must have the shape \(3 or 1, 4, 2 or 1, 2, any\).* \(2, 1, 2, 1\)"),
    ({"indices": ROWS.expand(3, 3, 2, 1)}, "indices must have the shape"),
    ({"indices": ROWS + 1}, "indices must lie between 0 and 0, the last of the keys, .* one is 1"),
    ({"indices": ROWS - 2}, "indices must lie between 0 and .* one is -2"),
    ({"indices": ROWS + 8}, "indices must lie between 0 and .* one is 8"),
    ({"block_indices": ROWS + 1, "block_size": 2}, "0 and 0, the last of the blocks of 2 keys"),
    ({"block_indices": ROWS}, "block_size must be given with block_indices"),
    ({"block_size": 4}, "one of indices and block_indices must be given"),
]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"return_weights": True}], ids=["lists", "mask"])
@pytest.mark.parametrize("page_size", [0, 3])
@pytest.mark.parametrize(("given", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(given: dict[str, Any], message: str, page_size: int, more: dict[str, Any]) -> None:
    """The cache is then as it was."""
    step = replace(SMALL, page_size=page_size, capacity=9)
    arguments = step.inputs()
    before = arguments["key_cache"].clone()
    with pytest.raises((ValueError, TypeError), match=message):
        attention_with_kvcache(**arguments, **given, **more)
    assert_same(arguments["key_cache"], before)


def test_refusals_of_the_helper() -> None:
    cache = KVCache(1, 2, kv_heads=2, head_dim=8, capacity=16)
    cache.extend([3, 1])
    query, (key, value) = torch.randn(4, 4, 8), torch.randn(2, 4, 2, 8).unbind()
    with pytest.raises(ValueError, match=r"indices must lie between 0 and 0, the last of the keys.*is 2"):
        cache.attend(0, query, key, value, indices=torch.full((4, 1), 2))
    with pytest.raises(ValueError, match=r"indices of packed queries must be \(heads, total, K\)"):
        cache.attend(0, query, key, value, indices=torch.zeros(1, 1, 4, 1, dtype=torch.int64))
    cache.attend(0, query, key, value, indices=torch.tensor([[2], [0], [1], [0]]))
