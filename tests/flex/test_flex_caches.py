"""Score functions in attention_with_kvcache, KVCache and varlen_attention on keys in a cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import gpu
import pytest
import torch
from functions import (
    Functions,
    assert_same_dropout,
    assert_same_on_threads,
    flex_attention,
    mask_of,
    without_compiler,
)
from kv_cache_cases import Step
from test_flex_functions import DTYPES
from test_flex_sequences import HEADS, formula, learned, moved
from test_flex_sequences import OPTIONS as OF_SEQUENCES
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import selfattn_ext
from selfattn_ext import KVCache, backends
from selfattn_ext.flex import kernel_calls

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

#: The type leaves out the signatures, because tests unpack tensors and options into one call.
attention_with_kvcache: Any = selfattn_ext.attention_with_kvcache
varlen_attention: Any = selfattn_ext.varlen_attention

#: The lengths of the sequences before the step.
LENGTHS = (3, 0, 70, 131)


def of_positions(dtype: torch.dtype) -> Functions:
    """These read tensors by sequence number, by the query's position and by distance, and hide scores."""
    prefix = torch.arange(len(LENGTHS)) * 20
    factors, table = learned(len(LENGTHS), 200, dtype=dtype), learned(HEADS, 400, dtype=dtype)
    return Functions(
        lambda s, b, h, q, kv: s * torch.sigmoid(factors[b, q]) + table[h, q - kv + 200],
        lambda b, h, q, kv: (kv < prefix[b]) | ((q >= kv) & (q - kv < 50)),
    )


def of_scores(dtype: torch.dtype) -> Functions:
    return Functions(lambda s, b, h, q, kv: 3 * torch.tanh(s / 3) - (q - kv).abs() * 0.02 * (h + 1))


def nobody(dtype: torch.dtype) -> Functions:
    """Position 3 and all positions after 130 see no key."""
    return Functions(None, lambda b, h, q, kv: (q >= kv) & (q != 3) & (q < 131))


ALL = {make.__name__: make for make in (of_positions, of_scores, nobody)}


def check(name: str, offset: Any = None, options: dict[str, Any] | None = None, **fields: Any) -> None:
    """Compares a step with the formula; query 0 is at ``offset`` of each sequence, or queries come last."""
    step = Step(lengths=LENGTHS, heads=HEADS, head_dim=16, value_dim=24, capacity=140, **fields)
    functions, given, options = ALL[name](step.dtype), step.inputs(), options or {}
    sequences = [step.sequence(given, b) for b in range(len(LENGTHS))]
    with torch.no_grad():
        out, weights, lse = attention_with_kvcache(
            **given, **options, query_offset=offset, layout=step.layout, score_mod=functions.score_mod,
            mask_mod=functions.mask_mod, return_weights=True, return_lse=True,
        )  # fmt: skip
    for b, (keys, values) in enumerate(sequences):
        count = keys.size(1)
        first = count - step.queries if offset is None else int(torch.as_tensor(offset).expand(4)[b])
        tensors = [step.plain(given["query"])[b : b + 1], keys.unsqueeze(0), values.unsqueeze(0)]
        part = moved(functions, b, first)
        judges = [
            formula(*(tensor.to(dtype) for tensor in tensors), part, query_offset=first, **options)
            for dtype in (torch.float64, step.dtype)
        ]
        for which, result in (("out", step.plain(out)), ("weights", weights[..., :count]), ("lse", lse)):
            exact, peer = (getattr(judge, which)[0].detach() for judge in judges)
            assert_accurate(f"{which} of {b}", result[b], exact, peer, dtype=step.dtype)
        assert not weights[b, :, :, count:].any(), b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("name", ALL)
def test_steps(name: str, page_size: int, dtype: torch.dtype) -> None:
    for queries in (1, 5):
        check(name, page_size=page_size, dtype=dtype, queries=queries, new=queries)
    check(name, page_size=page_size, dtype=dtype, queries=3, new=0)


@pytest.mark.parametrize("isa", backends.cpu_isas())
def test_instruction_sets(isa: str) -> None:
    with backends.use_cpu_isa(isa):
        for dtype, queries in itertools.product((torch.float32, torch.bfloat16), (1, 9)):
            check("of_positions", dtype=dtype, queries=queries, new=queries, page_size=16)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_heads_and_layouts(kv_heads: int, layout: str) -> None:
    check("of_positions", kv_heads=kv_heads, layout=layout, queries=2, new=2)


@pytest.mark.parametrize(
    "offset", [7, torch.tensor([3, 0, 61, 90]), torch.tensor([1, 2, 3, 4]).int()], ids=str
)
def test_positions(offset: Any) -> None:
    check("of_positions", offset, queries=4, new=4)
    check("nobody", offset, {"is_causal": True}, queries=4, new=4, page_size=16)


#: The queries are the last of their sequence.
OPTIONS = OF_SEQUENCES | {"causal": {"is_causal": True}, "window": {"window_size": (19, 0)}}


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_pairs_of_options(pair: tuple[str, str]) -> None:
    options = OPTIONS[pair[0]] | OPTIONS[pair[1]]
    check("of_positions", options=options, queries=5, new=5, page_size=16)


def whole(batch: int = 2, rows: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(batch, HEADS, rows, 16).to(dtype) for _ in range(3)]


def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * (1 + 0.1 * h) - (q - kv) * 0.05 * (b + 1)


def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((q - kv < 9) | (kv < 2))


def of_whole(tensors: list[Tensor]) -> Tensor:
    rows = tensors[0].size(2)
    mask = mask_of(Functions(None, mask_mod), (2, HEADS, rows, rows), 128)
    out: Tensor = flex_attention(*tensors, score_mod, mask)
    return out


@pytest.mark.parametrize("paged", [False, True])
def test_steps_are_rows_of_the_whole_sequence(paged: bool) -> None:
    """The same functions serve a model's prompt and its steps, to the bit under batch_invariant."""
    tensors = whole()
    caches = [torch.full((20, HEADS, 8, 16) if paged else (2, HEADS, 80, 16), torch.nan) for _ in range(2)]
    table = torch.randperm(20).view(2, 10).int() if paged else None
    outs, before = [], 0
    with selfattn_ext.batch_invariant():
        for count in (12, 1, 1, 7, 19):
            query, *new = (tensor[:, :, before : before + count] for tensor in tensors)
            lengths = before if count == 7 else torch.tensor([before, before])
            outs.append(
                attention_with_kvcache(
                    query, *caches, *new, lengths, table, score_mod=score_mod, mask_mod=mask_mod
                )
            )
            before += count
        assert torch.equal(torch.cat(outs, 2), of_whole(tensors))


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_the_helper_for_caches(page_size: int | None, layout: str) -> None:
    """Sequences of different lengths take steps of equally many tokens, and packed steps of unequal ones."""
    tensors = whole(rows=30)
    cache = KVCache(1, 2, HEADS, 16, 40, page_size=page_size, layout=layout)
    functions: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod, "is_causal": False}
    outs: list[list[Tensor]] = [[], []]

    def rows(b: int, count: int) -> list[Tensor]:
        at = sum(out.size(1) for out in outs[b])
        return [tensor[b, :, at : at + count] for tensor in tensors]

    for counts in ((7, 7), (10, 3), (1, 1), (5, 0), (7, 19)):
        cache.extend(list(counts))
        if counts[0] == counts[1]:
            given = [torch.stack(each) for each in zip(*(rows(b, counts[0]) for b in range(2)), strict=True)]
            given = [tensor.transpose(1, 2) if layout == "blhd" else tensor for tensor in given]
            out = cache.attend(0, *given, **functions)
            parts = list((out.transpose(1, 2) if layout == "blhd" else out).unbind())
        else:
            given = [torch.cat(each, 1) for each in zip(*(rows(b, counts[b]) for b in range(2)), strict=True)]
            out = cache.attend(0, *(tensor.transpose(0, 1) for tensor in given), **functions)
            parts = [part.transpose(0, 1) for part in out.split(counts)]
        for b in range(2):
            outs[b].append(parts[b])
    out = torch.stack([torch.cat(each, 1) for each in outs])
    torch.testing.assert_close(out, of_whole(tensors))


def test_packed_queries_on_a_cache() -> None:
    """With a block_table and seqused_k, query indices count from 0 in each sequence and are not positions."""
    lengths, queries = [70, 0, 131, 5], [3, 2, 40, 0]
    step = Step(
        lengths=tuple(lengths), heads=HEADS, head_dim=16, value_dim=24, capacity=140, page_size=16, new=0
    )
    given = step.inputs()
    sequences = [step.sequence(given, b) for b in range(4)]
    starts = torch.tensor([0, *itertools.accumulate(queries)])
    query = torch.randn(sum(queries), HEADS, 16)
    functions = of_positions(torch.float32)
    pages = [given[f"{name}_cache"].transpose(1, 2) for name in ("key", "value")]
    both = {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod, "enable_gqa": True}
    with torch.no_grad():
        in_pages = varlen_attention(
            query, *pages, starts, None, 40, 144, seqused_k=torch.tensor(lengths), is_causal=True,
            block_table=given["block_table"], query_offset=torch.tensor([60, 0, 91, 5]), **both,
        )  # fmt: skip
        keys, values = (
            torch.cat([torch.nn.functional.pad(each.transpose(0, 1), (0, 0, 0, 0, 0, 4)) for each in of_all])
            for of_all in zip(*sequences, strict=True)
        )
        slots = torch.tensor([0, *itertools.accumulate(length + 4 for length in lengths)])
        in_slots = varlen_attention(
            query, keys, values, starts, slots, 40, 140, seqused_k=torch.tensor(lengths),
            query_offset=torch.tensor([60, 0, 91, 5]), is_causal=True, **both,
        )  # fmt: skip
    assert torch.equal(in_pages, in_slots)
    for b, offset in enumerate([60, 0, 91, 5]):
        tensors = [query[starts[b] : starts[b + 1]].transpose(0, 1), *sequences[b]]
        exact, peer = (
            formula(
                *(tensor.unsqueeze(0).to(dtype) for tensor in tensors), moved(functions, b, 0),
                is_causal=True, query_offset=offset,
            ).out[0].detach()
            for dtype in (torch.float64, torch.float32)
        )  # fmt: skip
        assert_accurate(f"{b}", in_pages[starts[b] : starts[b + 1]].transpose(0, 1), exact, peer)


def test_any_number_of_threads_gives_the_same_bits(one_thread: None) -> None:
    functions = of_positions(torch.float32)
    steps = [
        Step(lengths=LENGTHS, heads=HEADS, head_dim=16, capacity=180, queries=n, new=n, page_size=8)
        for n in (1, 40)
    ]

    def compute() -> list[Tensor]:
        both = {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
        with torch.no_grad():
            return [attention_with_kvcache(**step.inputs(), **both) for step in steps]

    assert_same_on_threads(compute)


def test_dropout() -> None:
    tensors = whole()
    out, weights = assert_same_dropout(functools.partial(attention_with_kvcache, *tensors))
    torch.testing.assert_close(out, weights @ tensors[2])


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_the_same_without_a_compiler(layout: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="no compiler today.*takes longer") as warned:
        check("of_positions", queries=4, new=4, page_size=page_size, layout=layout, options=OPTIONS["sinks"])
    assert warned[0].filename == __file__
    check("of_positions", queries=4, new=0, page_size=page_size, layout=layout)
    test_packed_queries_on_a_cache()
    test_dropout()


class TestRefusals:
    def test_functions(self) -> None:
        tensors = whole()
        mask = create_block_mask(mask_mod, None, None, 40, 40, device=gpu.DEVICE)
        with pytest.raises(TypeError, match="mask_mod must be a function, but it is a BlockMask"):
            attention_with_kvcache(*tensors, mask_mod=mask)
        with pytest.raises(TypeError, match="score_mod must be a function, but it is float"):
            attention_with_kvcache(*tensors, score_mod=1.5)
        with pytest.raises(ValueError, match=r"torch.where.*test_flex_caches.py, line \d+: .*if q > kv"):
            attention_with_kvcache(*tensors, score_mod=lambda s, b, h, q, kv: s if q > kv else s * 2)
        with pytest.raises(ValueError, match="the caches must have the batch of query"):
            attention_with_kvcache(tensors[0][:1], *tensors[1:], score_mod=score_mod)

    @pytest.mark.parametrize("compile", [True, False])
    def test_what_would_learn(self, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        table = torch.randn(HEADS, 8, requires_grad=True)
        warns: Any = contextlib.nullcontext()
        if not compile:
            monkeypatch.setattr(kernel_calls, "_warned", set())
            warns = pytest.warns(UserWarning, match="takes longer")

        def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return s * (table[h, 0] if compile else table[h].sum())

        with pytest.raises(ValueError, match=r"no derivatives.*requires grad"), warns:
            attention_with_kvcache(*whole(), score_mod=function)
        with torch.no_grad():
            attention_with_kvcache(*whole(), score_mod=function)

    def test_indices_beside_a_tensor(self) -> None:
        table = torch.randn(9)
        with pytest.raises(IndexError, match="outside"):
            attention_with_kvcache(*whole(), score_mod=lambda s, b, h, q, kv: s + table[q])
