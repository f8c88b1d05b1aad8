"""KVCache: its tensors, counting, copies, graphs and refusals; test_kv_cache_random.py has its results."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gpu
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from selfattn_ext import KVCache, attention_with_kvcache, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2
FORMS: list[dict[str, Any]] = [{}, {"layout": "blhd"}, {"page_size": 3}, {"page_size": 4, "layout": "blhd"}]


def cache_of(sequences: int = 3, capacity: int = 12, **options: Any) -> KVCache:
    return KVCache(LAYERS, sequences, KV_HEADS, DIM, capacity, **options)


#: The packed tokens of a step in which each of three sequences has one.
PACKED = {"query": torch.randn(3, HEADS, DIM)} | dict.fromkeys(
    ("key", "value"), torch.randn(3, KV_HEADS, DIM)
)


def tokens(cache: KVCache) -> list[Tensor]:
    """Draws packed query, key and value of the step that has begun."""
    rows = len(cache.packed_positions)
    return [torch.randn(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attended(cache: KVCache, given: list[Tensor]) -> Tensor:
    """Takes a step's tokens through every layer; returns the results of all."""
    return torch.stack([cache.attend(layer, *given) for layer in range(LAYERS)])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_its_tensors_are_those_of_the_function(form: dict[str, Any]) -> None:
    cache = cache_of(**form)
    cache.extend([4, 1, 7])
    attended(cache, tokens(cache))
    cache.extend(1)
    lengths = cache.lengths
    given = [tensor.unsqueeze(2 if cache.layout == "bhld" else 1) for tensor in tokens(cache)]
    expected = copy.deepcopy(cache).attend(0, *given)
    query, *news = given
    out = attention_with_kvcache(
        query,
        cache.keys[0],
        cache.values[0],
        *news,
        cache.cache_seqlens,
        cache.block_table,
        layout=cache.layout,
    )
    assert torch.equal(out, expected)
    assert lengths == [5, 2, 8]
    assert cache.cache_seqlens.tolist() == [4, 1, 7]
    assert cache.positions.tolist() == [[4], [1], [7]]


def test_positions_and_lengths() -> None:
    cache = cache_of(page_size=4)
    cache.extend([4, 0, 6])
    assert cache.packed_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert cache.cu_seqlens.tolist() == [0, 4, 4, 10]
    assert cache.cache_seqlens.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="packed_positions"):
        _ = cache.positions
    cache.extend(2, [2, 1])
    assert cache.positions.tolist() == [[6, 7], [0, 1]]
    assert cache.cache_seqlens.tolist() == [6, 0]
    assert cache.lengths == [4, 2, 8]
    cache.extend(0)
    assert cache.positions.shape == (3, 0)


def test_pools_and_sequences_that_are_full_change_nothing() -> None:
    cache = cache_of(page_size=4, pages=5)
    cache.extend([4, 5, 0])
    kept = cache.lengths, cache.free_pages, cache.cu_seqlens.tolist()
    with pytest.raises(ValueError, match=r"pool of 5 pages is exhausted: .* takes 3 more of 4 .* 2 are free"):
        cache.extend([1, 3, 5])
    with pytest.raises(ValueError, match="sequence 1 of the cache is full: it has 5 tokens, 8 more"):
        cache.extend([0, 8, 0])
    assert kept == (cache.lengths, cache.free_pages, cache.cu_seqlens.tolist())
    contiguous = cache_of(2)
    assert [contiguous.allocate(), contiguous.allocate()] == [0, 1]
    with pytest.raises(ValueError, match="all 2 sequences of the cache are in use"):
        contiguous.allocate()
    contiguous.free(1)
    assert contiguous.free_pages == 1


def test_a_step_begins_with_extend() -> None:
    cache = cache_of()
    for shape in ((3, 2, 1, 8), (3, 2, 8)):
        with pytest.raises(ValueError, match=r"no tokens, and key has some: extend\(\) begins a step"):
            cache.append(0, torch.randn(shape), torch.randn(shape))


ENDS: dict[str, tuple[Any, str]] = {
    "free": (lambda cache: cache.free(1), "its sequence 1 has been freed or cut off"),
    "cut off": (lambda cache: cache.truncate(4, [0]), "its sequence 0 has been freed or cut off"),
    "reset": (KVCache.reset, "no tokens"),
    "taken again": (lambda cache: (cache.free(1), cache.allocate()), "its sequence 1 has been freed"),
    "another step": (lambda cache: (cache.free(1), cache.extend(9, [2])), "the step has"),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ENDS)
def test_a_step_ends_with_its_sequences(name: str, form: dict[str, Any]) -> None:
    """Otherwise layers would write to pages that are free or belong to another sequence."""
    end, text = ENDS[name]
    cache, (key, value) = cache_of(**form), torch.randn(2, 10, KV_HEADS, DIM)
    cache.extend(5, [0, 1])
    query = torch.randn(10, HEADS, DIM)
    expected = cache.attend(0, query, key, value)
    assert torch.equal(cache.attend(0, query, key, value), expected)  # repeating a step changes nothing
    end(cache)
    kept = [tensor.fill_(7).clone() for tensor in (*cache.keys, *cache.values)]
    for layer in range(LAYERS):
        with pytest.raises(ValueError, match=text):
            cache.attend(layer, query, key, value)
        with pytest.raises(ValueError, match=text):
            cache.append(layer, key, value)
    assert all(map(torch.equal, (*cache.keys, *cache.values), kept))
    cache.free(2)
    cache.truncate(0)
    cache.extend(5, [0, 1])
    assert torch.equal(cache.attend(1, query, key, value), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_does_not_end_a_step(form: dict[str, Any]) -> None:
    cache, (key, value) = cache_of(**form), torch.randn(2, 10, KV_HEADS, DIM)
    query = torch.randn(10, HEADS, DIM)
    cache.extend(3, [2])
    cache.extend(5, [0, 1])
    expected = cache.attend(0, query, key, value)
    cache.free(2)
    cache.truncate(5)
    with pytest.raises(ValueError, match="full"):
        cache.extend(9)
    assert torch.equal(cache.attend(1, query, key, value), expected)


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"query": torch.randn(3, 4, 2, 8)}, ValueError, "3 sequences with 1 tokens each"),
        (
            {"query": torch.randn(4, 4, 8), "key": torch.randn(4, 2, 8), "value": torch.randn(4, 2, 8)},
            ValueError,
            "the step has 3 tokens, but packed query 4",
        ),
        ({**PACKED, "value": torch.randn(2, 2, 8)}, ValueError, "the step has 3 tokens, but packed value 2"),
        ({**PACKED, "attn_mask": torch.ones(2, 12)}, ValueError, r"\(2, 12\) .* \(3, 4, 1, 12\)"),
        ({**PACKED, "alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes of shape \(3,\)"),
        ({**PACKED, "sinks": [1.0] * 4}, TypeError, "sinks must be a torch.Tensor, got list"),
        ({"attn_mask": causal_lower_right(1, 12)}, TypeError, "attn_mask is a CausalBias"),
        ({"query": torch.randn(3, 4, 8)}, ValueError, "query, key, value must all have 4 dimensions"),
        ({"query": None}, TypeError, "query must be a torch.Tensor"),
        (
            {"query": torch.randn(3, 4, 1, 8).to("meta")},
            ValueError,
            f"query is on meta and the cache on {gpu.DEVICE}",
        ),
        ({"key": torch.randn(3, 2, 1, 8).double()}, TypeError, "key is torch.float64"),
        ({"key": torch.randn(3, 2, 1, 7)}, ValueError, "key must have the head dim 8 of the cache"),
        ({"value": torch.randn(3, 1, 1, 8)}, ValueError, "value must have the 2 heads of the cache"),
        ({"value": torch.randn(2, 2, 1, 8)}, ValueError, "value has a batch of 2 with 1 in the layout"),
        ({"query": torch.randn(3, 3, 1, 8)}, ValueError, "do not divide"),
        ({"value": None}, TypeError, "value must be a torch.Tensor"),
        ({"layer": 2}, ValueError, "layer must be below 2, got 2"),
        ({"sinks": torch.randn(5)}, ValueError, "sinks of shape"),
        ({"is_causal": torch.ones(3)}, TypeError, "is_causal must be a bool"),
        ({"window_size": (1,)}, TypeError, "window_size"),
        ({"query": torch.randn(3, 4, 1, 8, requires_grad=True)}, ValueError, "no derivatives"),
        ({"sinks": torch.randn(4, requires_grad=True)}, ValueError, "no derivatives"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else str(value)[:40],
)
def test_refusals_of_a_step(
    changes: dict[str, Any], error: type[Exception], text: str, form: dict[str, Any]
) -> None:
    cache = cache_of(**form)
    cache.extend()
    swapped = cache.layout == "blhd"
    given: dict[str, Any] = {"query": torch.randn(3, 4, 1, 8)}
    given["key"], given["value"] = torch.randn(2, 3, 2, 1, 8)
    given = {
        name: value.transpose(1, 2) if swapped and isinstance(value, Tensor) and value.dim() == 4 else value
        for name, value in {"layer": 0, **given, **changes}.items()
    }
    caches = [*cache.keys, *cache.values]
    for tensor in caches:
        tensor.fill_(7)
    with pytest.raises(error, match=text):
        cache.attend(**given)
    if not changes.keys() - {"layer", "key", "value"}:
        with pytest.raises(error, match=text):
            cache.append(*(given[name] for name in ("layer", "key", "value")))
    assert all((tensor == 7).all() for tensor in caches)


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "capacity must lie between 1", lambda: cache_of(capacity=0)),
        (ValueError, "page_size must lie between 1", lambda: cache_of(page_size=0)),
        (ValueError, "pages needs a page_size", lambda: cache_of(pages=3)),
        (ValueError, "layout must be", lambda: cache_of(layout="lbhd")),
        (ValueError, "^sequence: the cache holds sequences 0 to 2, got 3", lambda: cache_of().free(3)),
        (ValueError, r"^sequences\[1\]: the cache holds .* got -1", lambda: cache_of().extend(1, [0, -1])),
        (ValueError, "^sequences must .* once, got", lambda: cache_of().extend(1, [1, 1])),
        (ValueError, "an int or 3 numbers, got 2", lambda: cache_of().extend([1, 1])),
        (ValueError, "counts must lie between 0", lambda: cache_of().extend(-1)),
        (TypeError, "counts must be an int, got float 1.0", lambda: cache_of().extend(1.0)),
        (TypeError, r"counts\[1\] must be an int, got float 1.0", lambda: cache_of().extend([1, 1.0, 1])),
        (ValueError, r"counts\[2\] must lie between 0", lambda: cache_of().extend([1, 1, -1])),
        (TypeError, r"sequences\[0\] must be an int, got str 'a'", lambda: cache_of().extend(1, ["a"])),
        (TypeError, "sequence must be an int, got str 'a'", lambda: cache_of().free("a")),
        (TypeError, "counts must be an int, got NoneType", lambda: cache_of().extend(None)),
        (TypeError, "sequences must be numbers of sequences, got int 2", lambda: cache_of().extend(1, 2)),
        (TypeError, "dtype must be float64, float32,", lambda: cache_of(dtype=torch.int32)),
    ],
)
def test_refusals(error: type[Exception], text: str, make: Any) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_cache_says_what_it_is_and_holds() -> None:
    cache = KVCache(2, 3, 4, 64, 1024, device="cpu")
    cache.extend([5, 0, 7])
    made = "layers=2, sequences=3, kv_heads=4, head_dim=64, capacity=1024"
    assert repr(cache) == f"KVCache({made}, dtype=torch.float32, device='cpu') with lengths [5, 0, 7]"
    paged = KVCache(
        1, 9, 2, 8, 40, value_dim=4, page_size=16, pages=5, layout="blhd", dtype=torch.float16, device="cpu"
    )
    paged.extend([1, 17], [0, 1])
    assert repr(paged) == (
        "KVCache(layers=1, sequences=9, kv_heads=2, head_dim=8, capacity=40, value_dim=4, page_size=16, "
        "pages=5, layout='blhd', dtype=torch.float16, device='cpu') "
        "with lengths [1, 17, 0, 0, 0, 0, ...], 2 pages free"
    )


def test_numbers_of_other_libraries_are_numbers() -> None:
    cache = KVCache(*np.array([LAYERS, 3, KV_HEADS, DIM, 12]), page_size=torch.tensor(4), pages=np.int64(5))
    assert type(cache.capacity) is type(cache.page_size) is type(cache.free_pages) is int
    cache.extend(np.int64(1))
    cache.extend(torch.tensor([1, 2]), np.array([2, 0]))
    assert cache.lengths == [3, 1, 2]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_go_on_by_themselves(copied: Any, form: dict[str, Any]) -> None:
    cache = cache_of(**form)
    cache.extend([4, 1, 7])
    attended(cache, tokens(cache))
    other = copied(cache)
    cache.extend(1)
    given = tokens(cache)
    expected = attended(cache, given)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    other.extend(1)
    assert torch.equal(attended(other, given), expected)
    # The tensors that the copy shows are those that it writes to.
    for tensor in (*other.keys, *other.values):
        tensor.fill_(torch.nan)
    other.extend(1)
    assert attended(other, given).isnan().all()
    assert cache.lengths == [5, 2, 8]


def test_autocast_takes_the_dtype_of_the_cache() -> None:
    cache = cache_of(dtype=torch.bfloat16)
    written = []
    for enabled in (True, False):
        cache.reset()
        cache.extend()
        with torch.autocast(gpu.DEVICE, torch.float16, enabled=enabled):
            given = PACKED if enabled else {name: tensor.bfloat16() for name, tensor in PACKED.items()}
            cache.append(0, given["key"], given["value"])
            written += [cache.keys[0][:, :, 0].clone(), cache.attend(1, **given)]
    assert torch.equal(written[0], written[2])
    assert torch.equal(written[1], written[3])


def test_autograd_learns_that_the_cache_has_changed() -> None:
    tokens = {name: PACKED[name] for name in ("key", "value")}
    for write in (lambda cache: cache.append(0, **tokens), lambda cache: cache.attend(0, **PACKED)):
        cache = cache_of()
        cache.extend()
        query = torch.randn(3, HEADS, 1, DIM, requires_grad=True)
        out = scaled_dot_product_attention(query, cache.keys[0], cache.values[0], enable_gqa=True)
        write(cache)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_shapes_without_data(form: dict[str, Any]) -> None:
    with FakeTensorMode():
        cache = cache_of(**form)
        cache.extend([4, 0, 2])
        query, key = torch.randn(6, HEADS, DIM), torch.randn(6, KV_HEADS, DIM)
        assert cache.attend(0, query, key, key).shape == query.shape


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_compiled_steps(form: dict[str, Any]) -> None:
    """One graph serves all tokens, because the growing lengths are tensors that layers read."""
    counter = CompileCounterWithBackend("aot_eager")
    cache, eager = cache_of(**form), cache_of(**form)
    compiled = torch.compile(attended, backend=counter, fullgraph=True)
    for count in (5, 1, 1, 1, 1):
        cache.extend(count)
        eager.extend(count)
        given = tokens(cache)
        function = attended if count > 1 else compiled
        assert torch.equal(function(cache, given), attended(eager, given))
    assert counter.frame_count == 1


def test_inference_mode_may_begin_and_end_anywhere() -> None:
    with torch.inference_mode():
        cache = cache_of(page_size=4)
    plain = cache_of(page_size=4)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            cache.extend(2)
            plain.extend(2)
            given = tokens(cache)
            out = attended(cache, given)
        assert torch.equal(out, attended(plain, [tensor.clone() for tensor in given]))
