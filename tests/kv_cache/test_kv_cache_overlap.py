"""Caches that share memory with each other, and arguments that are views of the caches."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from kv_cache_cases import Step, check
from torch import Tensor

from selfattn_ext import KVCache, attention_with_kvcache, ops

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = Step(value_dim=8)
SAME_MEMORY = "key_cache and value_cache are the same memory in part"


def addresses(tensor: Tensor) -> list[int]:
    """Returns the place of each element in memory."""
    sums = itertools.product(
        *(range(0, n * s, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    return [tensor.storage_offset() + sum(terms) for terms in sums]


def drawn_view(memory: Tensor, shape: tuple[int, ...], generator: random.Random) -> Tensor:
    """Returns a view without overlap, with strides that slices, transposes and as_strided can have."""
    while True:
        strides = [0, 0, 0, 1]
        room = shape[3]
        for dim in generator.sample(range(3), 3):
            strides[dim] = room + generator.choice((0, 0, 0, 1, 2, shape[3], room))
            room = strides[dim] * (shape[dim] - 1) + room
        if room <= memory.numel():
            return memory.as_strided(shape, strides, generator.randint(0, memory.numel() - room))


def test_caches_that_share_elements_are_refused_and_no_others() -> None:
    """The sets of addresses tell which caches share elements."""
    generator, counts = random.Random(0), dict.fromkeys((True, False), 0)
    memory = torch.zeros(300)
    for _ in range(3000):
        sizes = [generator.randint(1, 3) for _ in range(3)]
        widths = [generator.randint(1, 4) for _ in range(2)]
        caches = [drawn_view(memory, (*sizes, width), generator) for width in widths]
        if generator.random() < 0.5:  # equal strides, as two views of one tensor have
            room = caches[0].storage_offset() + generator.randint(0, 40)
            reach = sum((n - 1) * s for n, s in zip((*sizes, widths[1]), caches[0].stride(), strict=True))
            caches[1] = memory.as_strided((*sizes, widths[1]), caches[0].stride(), min(room, 299 - reach))
            if len(set(addresses(caches[1]))) < caches[1].numel():
                continue
        tokens = [torch.ones(sizes[0], sizes[1], 1, width) for width in widths]
        shared = not set(addresses(caches[0])).isdisjoint(addresses(caches[1]))
        counts[shared] += 1
        lengths = torch.zeros(sizes[0], dtype=torch.int64)
        memory.zero_()
        if shared:
            with pytest.raises(ValueError, match=SAME_MEMORY):
                ops.append_to_cache(*caches, *tokens, lengths)
            assert not memory.any()
        else:
            ops.append_to_cache(*caches, *tokens, lengths)
            assert memory.sum() == sum(token.numel() for token in tokens)
    assert min(counts.values()) > 500, counts


def halves(kind: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns two views of one tensor, of that shape and without common elements."""
    if kind == "one behind the other":
        return torch.zeros(2, *shape).unbind(0)
    if kind == "features":
        return torch.zeros(*shape[:3], 2 * shape[3]).chunk(2, -1)
    if kind == "rows in turn":
        both = torch.zeros(*shape[:3], 2, shape[3])
        return both[..., 0, :], both[..., 1, :]
    if kind == "heads":
        both = torch.zeros(shape[0], 3 * shape[1], *shape[2:])
        return both[:, : shape[1]], both[:, -shape[1] :]
    assert kind == "packed projections"
    _, key, value = torch.zeros(shape[0], shape[2], 3, shape[1], shape[3]).unbind(2)
    return key.transpose(1, 2), value.transpose(1, 2)


KINDS = ("one behind the other", "features", "rows in turn", "heads", "packed projections")


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_caches_in_one_tensor(kind: str, page_size: int) -> None:
    step = replace(STEP, page_size=page_size, new=2, queries=2)
    given = step.inputs()
    caches = halves(kind, given["key_cache"].shape)
    for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
        given[name] = cache.copy_(given[name])
    check(step, given, is_causal=True)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_one_tensor_as_both_caches(layout: str) -> None:
    given = replace(STEP, layout=layout).inputs()
    given["value_cache"] = given["key_cache"]
    kept = given["key_cache"].nan_to_num()
    with pytest.raises(ValueError, match=SAME_MEMORY):
        attention_with_kvcache(**given, layout=layout)
    assert torch.equal(given["key_cache"].nan_to_num(), kept)
    # A call that only reads takes such caches.
    given |= {"key": None, "value": None, "value_cache": given["key_cache"]}
    assert attention_with_kvcache(**given, layout=layout).isfinite().all()
    cache = KVCache(1, 1, 2, 4, 8)
    cache.values[0] = cache.keys[0]
    cache.extend()
    with pytest.raises(ValueError, match=SAME_MEMORY):
        cache.attend(0, *torch.randn(3, 1, 2, 1, 4))


@pytest.mark.parametrize("change", ["none", "autocast", "strides", "both"])
@pytest.mark.parametrize("features", [slice(0, 5), slice(4, 9), slice(2, 3)], ids=str)
def test_values_that_are_features_of_the_keys(features: slice, change: str) -> None:
    """Some models compress keys and values to one vector, which is written once, in place. Casts and copies
    on the way keep the values features of the keys.
    """
    step = replace(STEP, heads=8, kv_heads=2, head_dim=9, new=3, value_dim=features.stop - features.start)
    given = replace(step, page_size=4 if change in ("none", "both") else 0).inputs()
    for name in ("query", "key_cache"):
        given[name] = given[name].bfloat16() if change in ("autocast", "both") else given[name]
    if change in ("strides", "both"):
        given["key"] = given["key"].mT.contiguous().mT
    apart = {name: tensor.clone() for name, tensor in given.items()}
    for one in (given, apart):
        one["value_cache"], one["value"] = one["key_cache"][..., features], one["key"][..., features]
    apart["value_cache"], apart["value"] = apart["value_cache"].clone(), apart["value"].clone()
    with torch.autocast(gpu.DEVICE, torch.bfloat16, enabled=change in ("autocast", "both")):
        out, expected = attention_with_kvcache(**given), attention_with_kvcache(**apart)
        # Other values would overwrite the keys.
        with pytest.raises(ValueError, match=SAME_MEMORY):
            attention_with_kvcache(**given | {"value": given["value"].clone()})
    assert torch.equal(out, expected)
    assert torch.equal(given["key_cache"].nan_to_num(), apart["key_cache"].nan_to_num())


#: name -> arguments that are views of the caches, whose rows 4 and 5 are about to be written.
VIEWS: dict[str, Any] = {
    "query in the row": lambda k, v: {"query": k[:, :, 4:5]},
    "query over the rows": lambda k, v: {"query": v[:, :, 2:8]},
    "expanded query": lambda k, v: {"query": k[:, :1, 4:5].expand(-1, 6, -1, -1)},
    "key in its place": lambda k, v: {"key": k[:, :, 4:6]},
    "key one row off": lambda k, v: {"key": k[:, :, 3:5], "value": v[:, :, 5:7]},
    "key and value exchanged": lambda k, v: {"key": v[:, :, 4:6], "value": k[:, :, 4:6]},
    "one for both": lambda k, v: {"key": k[:, :, 5:7], "value": k[:, :, 5:7]},
    "heads exchanged": lambda k, v: {"key": k[:, 1:, 4:6].expand(-1, 2, -1, -1)},
    "everything": lambda k, v: {"query": k[:, :, 5:6], "key": v[:, :, 4:6], "value": k[:, :, 3:5]},
    "mask": lambda k, v: {"attn_mask": k[:, :1, 4:5, 0:1].expand(-1, -1, -1, 12)},
    "mask over the rows": lambda k, v: {"attn_mask": v[:, :1, :, 0:1].mT},
    "sinks": lambda k, v: {"sinks": k[0, :, 4, 0]},
    "slopes": lambda k, v: {"alibi_slopes": v[:, :, 5, 1]},
}


@pytest.mark.parametrize("form", ["separate", "rows in turn", "packed projections", "copied on write"])
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_read_is_as_it_was(name: str, form: str) -> None:
    """A view of the caches gives the bits that its copy gives."""

    def call(copied: bool) -> list[Tensor]:
        torch.manual_seed(3)
        shape = (2, 2, 12, 4)
        caches = halves(form, shape) if form in KINDS else (torch.zeros(shape), torch.zeros(shape))
        for cache in caches:
            cache.normal_()
        if form == "copied on write":
            sources = caches
            caches = tuple(map(torch._lazy_clone, sources))
        tensors = [torch.randn(2, 2, rows, 4) for rows in (1, 2, 2)]
        given = dict(zip(("query", "key", "value"), tensors, strict=True)) | VIEWS[name](*caches)
        if copied:
            given = {name: tensor.clone() for name, tensor in given.items()}
        out = attention_with_kvcache(
            key_cache=caches[0],
            value_cache=caches[1],
            **given,
            cache_seqlens=4,
            layout="bhld",
            is_causal=True,
        )
        return [out, *caches]

    assert all(map(torch.equal, call(False), call(True)))


def test_lengths_in_the_memory_of_a_cache() -> None:
    """The operators read rows by the lengths that they checked, although the write changes the lengths."""
    memory = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    lengths = memory.view(torch.int64).view(-1)[4:5].fill_(2)
    key, value = torch.full((2, 1, 1, 1, 2), 1.0, dtype=torch.float64)
    ops.append_to_cache(memory, torch.zeros_like(memory), key, value, lengths)
    assert (memory[0, 0, 2] == 1.0).all()
    lengths = memory.view(torch.int64).view(-1)[8:9].fill_(5)
    out, *_ = ops.attention_with_cache(
        key, memory, torch.zeros_like(memory), key, value, 1.0, seqlens_k=lengths
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """A graph has no addresses, so the operator checks them when it runs."""
    torch._dynamo.reset()
    compiled = torch.compile(attention_with_kvcache, backend=backend, fullgraph=True)
    given = STEP.inputs()
    expected = attention_with_kvcache(**{name: tensor.clone() for name, tensor in given.items()})
    both = torch.stack((given["key_cache"], given["value_cache"]), 3)
    given |= {"key_cache": both[:, :, :, 0], "value_cache": both[:, :, :, 1]}
    assert torch.equal(compiled(**given), expected)
    if backend == "eager":
        with pytest.raises(ValueError, match=SAME_MEMORY):
            compiled(**given | {"value_cache": given["key_cache"]})
