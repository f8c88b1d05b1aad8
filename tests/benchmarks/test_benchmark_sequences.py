"""The benchmarks' batches of several lengths: packed, padded, in caches with and without pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selfattn_ext.bench import kv_cache, peak, report, timer, varlen
from selfattn_ext.bench.accuracy import truth
from selfattn_ext.bench.cases import Case, as_json, inputs
from selfattn_ext.bench.contenders import OURS, TORCH, Contender, results, runner
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.measure import contenders_for, measure
from selfattn_ext.bench.varlen import VarlenCase

pytestmark = pytest.mark.usefixtures("nothing_is_collected")

PACKED = VarlenCase.of((40, 70, 3, 21), 4, 16)
CACHED = CacheCase.of((40, 90, 1, 32), 4, 16)
VARLEN = [
    PACKED,
    replace(PACKED, causal=True),
    replace(PACKED, kv_heads=2, backward=True),
    replace(PACKED, causal=True, backward=True),
    replace(PACKED, backward=True, graph_kept=True),
    replace(PACKED, dtype=torch.bfloat16, backward=True),
]
CACHES = [
    CACHED,
    replace(CACHED, layout="blhd", dtype=torch.bfloat16),
    replace(CACHED, kv_heads=2, layout="blhd"),
    replace(CACHED, page_size=16),
    replace(CACHED, page_size=7, layout="blhd", kv_heads=2),
]


def named(case: Case) -> str:
    return f"{case.dtype_name} {case.options()} {case.direction}"


def computed(contender: Contender, case: Case) -> list[torch.Tensor]:
    """Returns the padded output and the gradients of a contender that takes the case."""
    tensors = inputs(case)
    own = contender.form(case, tensors)
    return [contender.padded(case, found) for found in results(contender.prepare(case, own), case, own)]


@pytest.mark.parametrize("case", [*VARLEN, *CACHES], ids=named)
def test_contenders_compute_the_same_and_errors_are_small(case: Case) -> None:
    exact = truth(case, inputs(case))
    assert exact is not None
    bound = 2e-2 if case.dtype == torch.bfloat16 else 5e-6
    seen = set()
    for contender in contenders_for(case, []):
        try:
            found = computed(contender, case)
        except NotImplementedError:
            continue
        seen.add(contender.name)
        assert found[0].shape == case.shape
        assert exact.error(case, found) < bound, contender.name
        for index in range(len(found)):
            spoilt = list(found)
            spoilt[index] = found[index].roll(1, 2)  # shifted by a row, as if a sequence began wrongly
            if found[index].shape[2] > 1:
                assert exact.error(case, spoilt) > 0.05, (contender.name, index)
    assert OURS.name in seen
    assert "torch" in seen or (isinstance(case, CacheCase) and case.page_size)
    if isinstance(case, CacheCase):
        in_pages = {"pages of 16", "pages of 64", "pages of 256"}
        assert seen & in_pages == (set() if case.page_size else in_pages)
    else:
        assert "padded" in seen
        assert ("nested" in seen) == (not case.causal and case.kv_heads is None)


@pytest.mark.parametrize("case", [*VARLEN, *CACHES], ids=named)
def test_only_what_exists_is_counted(case: VarlenCase | CacheCase) -> None:
    pairs = bytes_read = 0
    for index, length in enumerate(case.lengths):
        element = case.element(index)
        tensors = inputs(element)
        assert (element.key_count, tensors.key.shape[2]) == (length, length)
        seen = element.visible()
        pairs += element.length * length if seen is None else int(seen.sum())
        bytes_read += sum(t.nbytes for t in (tensors.query, tensors.key, tensors.value))
    passes = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[case.direction]
    assert case.flops() == passes * 4 * pairs * case.heads * case.head_dim
    assert case.bytes_read() == bytes_read
    assert as_json(case)["lengths"] == case.lengths


@pytest.mark.parametrize("contender", varlen.CONTENDERS, ids=lambda contender: contender.name)
def test_the_timed_call_differentiates_the_contenders_own_tensors(contender: Contender) -> None:
    case = replace(PACKED, backward=True)
    own = contender.form(case, inputs(case))
    assert len(own.leaves()) == 3
    assert all(leaf.is_leaf for leaf in own.leaves())
    call = contender.prepare(case, own)
    expected = results(call, case, own)[1:]
    assert all(map(torch.equal, runner(call, case, own)(), expected))


def test_nested_tensors_are_for_small_cases() -> None:
    case = VarlenCase.of((2048, 2048), 4, 64, backward=True)
    with pytest.raises(NotImplementedError, match=r"more than 1e\+10 operations take minutes"):
        varlen.NESTED.prepare(case, varlen.NESTED.form(PACKED, inputs(PACKED)))


def test_torch_gets_no_caches_that_take_it_seconds() -> None:
    case = CacheCase.of((2**16,) * 4, 32, 128, kv_heads=2)
    (theirs,) = (contender for contender in kv_cache.CONTENDERS if contender.name == TORCH.name)
    with pytest.raises(NotImplementedError, match=r"more than 1e\+09 operations take seconds"):
        theirs.prepare(case, inputs(CACHED))


def test_rows_of_different_kinds_make_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "READ_BYTES", 2**20)
    moment = timer.Effort(seconds=0.0, min_rounds=1)
    dense = Case(1, 2, 8, 16)
    rows = measure([dense, PACKED, replace(CACHED, page_size=16)], [TORCH], [1], moment)
    assert [row.ratio("padded") is None for row in rows] == [True, False, True]
    text = report.text(rows)
    assert "torch: scaled_dot_product_attention takes no pages" in text
    assert "pages of 16: the case has pages already" in text
    assert "padded / ours: median" in text


def test_padding_has_no_gradient() -> None:
    case = replace(PACKED, backward=True)
    (padded,) = (contender for contender in varlen.CONTENDERS if contender.name == "padded")
    hidden = ~case.is_real()
    assert int(hidden.sum()) == case.batch * case.length - sum(case.lengths)
    for gradient in computed(padded, case)[1:]:
        assert not gradient.transpose(1, 2)[hidden].any()


@pytest.mark.parametrize("page_size", [1, 7, 16, 200])
def test_pages_hold_what_the_cache_does(page_size: int) -> None:
    case = replace(CACHED, page_size=page_size)
    cache = inputs(case).key
    table = kv_cache.block_table(case)
    pages = kv_cache.pages_of(case, cache, table)
    counts = [-(-length // page_size) for length in case.lengths]
    assert pages.shape == (sum(counts), case.heads, page_size, case.head_dim)
    used = [number for row, count in zip(table.tolist(), counts, strict=True) for number in row[:count]]
    assert sorted(used) == list(range(sum(counts)))
    for sequence, numbers, count, length in zip(cache, table, counts, case.lengths, strict=True):
        found = pages[numbers[:count].long()].transpose(0, 1).flatten(1, 2)
        assert torch.equal(found[:, :length], sequence[:, :length])


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_caches_and_pages_lie_in_memory_as_they_are_used(layout: kv_cache.Layout) -> None:
    case = replace(CACHED, kv_heads=2, layout=layout, page_size=16)
    key = inputs(case).key
    pages = kv_cache.pages_of(case, key, kv_cache.block_table(case))
    for tensor in (key, pages):
        used = tensor if layout == "bhld" else tensor.transpose(1, 2)
        assert used.is_contiguous()


def test_the_call_appends_the_last_row_of_each_sequence() -> None:
    cache = inputs(CACHED).key
    new = kv_cache.new_rows(CACHED, cache)
    for row, sequence, length in zip(new, cache, CACHED.lengths, strict=True):
        assert torch.equal(row[:, 0], sequence[:, length - 1])


def test_lengths_are_drawn_alike_everywhere() -> None:
    drawn = varlen.draw_lengths(64, 16, 1024)
    assert (len(drawn), min(drawn), max(drawn)) == (64, 16, 1024)
    assert (drawn[0], drawn[-1]) == (1024, 16)
    assert len(set(drawn)) > 50
    assert drawn == varlen.draw_lengths(64, 16, 1024) != varlen.draw_lengths(64, 16, 1024, seed=1)
