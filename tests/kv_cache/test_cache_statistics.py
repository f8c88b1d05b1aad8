"""Statistics of a KVCache's steps, and of packed queries on caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import STATISTICS, statistics_of
from functions import without_compiler

from selfattn_ext import AuxRequest, KVCache, reference, varlen_attention


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_steps_of_a_cache(page_size: int | None, layout: str) -> None:
    """A prompt and two tokens; the cache's own keys are the judge's."""
    cache = KVCache(1, 2, 2, 8, 16, layout=layout, page_size=page_size)
    kept: list[Any] = []
    for new in (5, 1, 1):
        query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, new, 8), torch.randn(2, 2, new, 8)
        kept.append(key)
        given = (query, key, value) if layout == "bhld" else (x.transpose(1, 2) for x in (query, key, value))
        cache.extend(new)
        _, aux = cache.attend(0, *given, return_aux=AuxRequest(*STATISTICS[:-1], "kv_heads"))
        keys = torch.cat(kept, 2)
        exact = reference.score_statistics(
            query.double(), keys.double(), is_causal=True, query_offset=keys.size(2) - new
        )
        exact = exact._replace(key_weights=exact.key_weights.unflatten(1, (2, 2)).sum(2))
        for name, right in statistics_of(exact).items():
            found = getattr(aux, name)
            if name == "key_weights":
                assert not found[..., keys.size(2) :].any()
                found = found[..., : keys.size(2)]
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:selfattn_ext does not compile")
@pytest.mark.parametrize("form", ["slots", "pages", "functions", "uncompiled functions"])
def test_packed_queries_on_a_cache(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of different lengths, in slots with rows to spare or in pages."""
    queries, keys, page = (3, 0, 7), (9, 4, 16), 4
    starts = torch.tensor([0, 3, 3, 10])
    query = torch.randn(10, 4, 8)
    slots = torch.tensor([0, 12, 16, 36])
    key = torch.randn(36, 2, 8)
    options: dict[str, Any] = {"cu_seqlens_k": slots, "seqused_k": torch.tensor(keys)}
    given = key
    if form == "pages":
        table = torch.tensor([[2, 0, 5, 1], [3, 7, 4, 6], [8, 11, 9, 10]])
        given = torch.zeros(12, page, 2, 8)
        for b, pages in enumerate(table.tolist()):
            rows = key[slots[b] : slots[b] + keys[b]]
            for at, place in enumerate(pages):
                part = rows[at * page : (at + 1) * page]
                given[place, : len(part)] = part
        options |= {"cu_seqlens_k": None, "block_table": table}
    if "functions" in form:
        options["score_mod"] = lambda score, b, h, q, kv: score * 0.5
    if form == "uncompiled functions":
        without_compiler(monkeypatch)
    factor = 0.5 if "functions" in form else 1.0
    _, aux = varlen_attention(
        query, given, given, starts, max_seqlen_q=7, max_seqlen_k=20, enable_gqa=True, return_aux=STATISTICS,
        **options,
    )  # fmt: skip
    for b, (rows, count) in enumerate(zip(queries, keys, strict=True)):
        own = query[starts[b] : starts[b] + rows].transpose(0, 1).double()
        seen = key[slots[b] : slots[b] + count].transpose(0, 1).double()
        exact = reference.score_statistics(own, seen, scale=factor * 8**-0.5)
        for name, right in statistics_of(exact).items():
            found = getattr(aux, name)
            if name != "key_weights":
                found = found[:, starts[b] : starts[b] + rows]
            elif form == "pages":
                found = found[b, :, :count]
            else:
                found = found[:, slots[b] : slots[b] + count]
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5, msg=f"{name} {b}")
