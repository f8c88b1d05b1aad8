"""transformers' masks as rules: equal elements, and no tensor unless it is needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tolerances import assert_accurate
from torch import Tensor, nn
from transformers import masking_utils
from transformers_models import DECODERS, VERSION, Trio, built, mask_arguments, padding, tokens

from selfattn_ext.integrations import transformers as integration
from selfattn_ext.integrations.positional_mask import PositionalMask, VisibleMask


def padded(length: int, side: str) -> Tensor | None:
    """Returns a padding mask (B, length) for mask functions; "all" hides nothing, "short" ends too early."""
    if side == "none":
        return None
    length -= 2 * (side == "short")
    mask = torch.ones(2, length, dtype=torch.bool)
    if side in ("left", "right"):
        mask[0, slice(3) if side == "left" else slice(length - 2, None)] = False
    return mask


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(4),
    "window of one": lambda: masking_utils.sliding_window_causal_mask_function(1),
    "one sequence": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.zeros(2, 40, dtype=torch.long)),
    ),
}
if VERSION >= (5, 0):
    FUNCTIONS["everybody"] = lambda: masking_utils.bidirectional_mask_function
    FUNCTIONS["window to both sides"] = lambda: masking_utils.sliding_window_bidirectional_mask_function(3)

#: (queries, offset, keys, key offset) of prompts, their chunks and steps, also in static and sliding caches.
PLACES = {
    "prompt": (9, 0, 9, 0),
    "chunk": (4, 5, 9, 0),
    "step": (1, 8, 9, 0),
    "static prompt": (9, 0, 16, 0),
    "static chunk": (4, 5, 16, 0),
    "static step": (1, 8, 16, 0),
    "rolled chunk": (4, 9, 7, 6),
    "rolled step": (1, 12, 4, 9),
}


@pytest.mark.parametrize("side", ["none", "all", "short", "left", "right"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_elements_are_those_of_transformers(function: str, place: str, side: str) -> None:
    queries, offset, keys, key_offset = PLACES[place]
    arguments = mask_arguments(
        queries,
        offset,
        keys,
        key_offset,
        mask_function=FUNCTIONS[function](),
        attention_mask=padded(offset + queries, side),
    )
    mask = integration.mask_function(**arguments)
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, PositionalMask)
    assert mask.shape == expected.shape
    assert torch.equal(mask.dense(), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # A layer that computes its own attention adds the mask.
        added = integration.mask_function(**arguments, dtype=dtype) + torch.zeros((), dtype=dtype)
        assert added.dtype == dtype
        assert torch.equal(added, masking_utils.eager_mask(**arguments, dtype=dtype))
    if side in ("none", "all") and function in ("causal", "window", "one sequence"):
        assert mask.visible_keys is None
    skipping = integration.mask_function(**{**arguments, "allow_is_bidirectional_skip": True})
    assert (skipping is None) == (mask.options() == {} and mask.visible_keys is None)
    assert skipping is not None or bool(expected.all())
    if queries == 1 and expected.all() and side in ("none", "all"):
        assert mask.options() == {}


def test_what_is_no_rule_is_a_tensor() -> None:
    def odd(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key % 2 == 0)

    packed = masking_utils.packed_sequence_mask_function(torch.arange(9).expand(2, 9) // 4)
    for function in (
        masking_utils.and_masks(masking_utils.causal_mask_function, odd),
        masking_utils.and_masks(masking_utils.causal_mask_function, packed),
        masking_utils.or_masks(masking_utils.causal_mask_function, odd),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    ):
        arguments = mask_arguments(9, 0, 9, mask_function=function, allow_is_causal_skip=False)
        mask = integration.mask_function(**arguments)
        assert isinstance(mask, VisibleMask)
        assert torch.equal(mask.dense(), masking_utils.sdpa_mask(**arguments))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            mask = integration.mask_function(**arguments, dtype=dtype)
            assert mask.dtype == dtype
            assert torch.equal(mask[..., :5], masking_utils.eager_mask(**arguments, dtype=dtype)[..., :5])


def test_a_step_that_may_be_compiled_gets_a_tensor() -> None:
    arguments = mask_arguments(1, 8, 16, allow_is_causal_skip=False)
    assert type(integration.mask_function(**arguments)) is Tensor


def test_a_mask_computes_as_its_elements() -> None:
    mask = integration.mask_function(**mask_arguments(4, 5, 9, attention_mask=padded(9, "left")))
    dense = mask.additive().clone()
    assert type(dense) is Tensor
    for function in (
        lambda m: m[..., :7],
        lambda m: torch.ones(2, 3, 4, 9) + m,
        lambda m: torch.where(m < 0, 0.0, -1.0),
        lambda m: m.to(torch.float64),
        lambda m: torch.cat([m, m], -1),
        lambda m: m.expand(2, 3, 4, 9),
        lambda m: torch.zeros(4, 9).masked_fill(m[0, 0] == 0, 1.0),
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.clone(),
    ):
        assert type(function(mask)) is Tensor
        assert torch.equal(function(mask), function(dense))
    assert copy.deepcopy(mask) is mask
    assert "PositionalMask((2, 1, 4, 9)" in repr(mask)
    with pytest.raises(RuntimeError, match="cannot write to a PositionalMask"):
        mask += dense


MODELS = ["llama gqa", "mistral", "gemma2", "gemma3", "gpt-oss"]


@pytest.fixture(scope="module", params=MODELS)
def trio(request: pytest.FixtureRequest) -> Trio:
    return Trio(built(DECODERS[request.param]()))


def test_no_mask_is_made_of_a_prompt(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a mask of (L, S) elements")

    monkeypatch.setattr(PositionalMask, "dense", refuse)
    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    ids = tokens()
    for side in ("none", "left", "right"):
        cache = transformers.DynamicCache(config=trio.ours.config)
        with torch.no_grad():
            for part in (slice(6), slice(6, 10), slice(10, 11)):
                mask = None if side == "none" else padding(ids, side)[:, : part.stop]
                trio.ours(ids[:, part], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_prompt_in_chunks(trio: Trio, side: str, cache: str) -> None:
    ids = tokens(length=14)
    mask = padding(ids, side)

    def run(model: nn.Module) -> dict[str, Tensor]:
        config = model.config
        past = (
            transformers.DynamicCache(config=config)
            if cache == "dynamic"
            else transformers.StaticCache(config=config, max_cache_len=20)
        )
        found = []
        with torch.no_grad():
            for start, stop in ((0, 3), (3, 8), (8, 9), (9, 14)):
                result = model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    past_key_values=past,
                    position_ids=torch.arange(start, stop).expand(2, -1),
                    **({} if VERSION >= (5, 0) else {"cache_position": torch.arange(start, stop)}),
                )
                found.append(result.logits)
        return {"logits": torch.cat(found, 1)[mask.bool()]}

    trio.check(run, least_calls=8)


# GPT-OSS does not pass positions to its masks.
@pytest.mark.parametrize("trio", MODELS[:4], indirect=True)
def test_packed_sequences(trio: Trio) -> None:
    ids = tokens(batch=1, length=13)
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": model(ids, position_ids=positions, use_cache=False).logits}

    both = trio.check(run)["logits"]
    # The second sequence has the results that it has alone.
    with torch.no_grad():
        exact, peer = (model(ids[:, 6:], use_cache=False).logits for model in (trio.exact, trio.peer))
    size = max(float(exact.abs().max()), 1.0)
    assert_accurate("second", both[:, 6:], exact, peer, size, trio.dtype)


def test_a_mask_of_float32_with_bfloat16() -> None:
    lower = Trio(built(DECODERS["llama gqa"]()), torch.bfloat16)
    ids = tokens()
    mask = torch.randn(2, 1, 11, 11).masked_fill(torch.ones(11, 11).triu(1).bool(), -1e9)

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": model(ids, attention_mask=mask, use_cache=False).logits}

    lower.check(run)
