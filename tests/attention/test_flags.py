"""Types of flags and numbers: no public function takes a bool for a number or a number for a bool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from selfattn_ext import (
    KVCache,
    attention_scores,
    attention_weights,
    attention_with_kvcache,
    backends,
    masked_softmax,
    nn,
    scaled_dot_product_attention,
    varlen_attention,
)

QUERY = torch.randn(1, 2, 3, 4)
PACKED, STARTS = torch.randn(3, 2, 4), torch.tensor([0, 3])


def attention(query: Tensor, **options: Any) -> Any:
    return scaled_dot_product_attention(query, QUERY, QUERY, **options)


def varlen(**options: Any) -> Any:
    longest = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    return varlen_attention(PACKED, PACKED, PACKED, STARTS, STARTS, **{**longest, **options})


def step(**options: Any) -> Any:
    caches = (torch.zeros(1, 2, 8, 4) for _ in range(2))
    return attention_with_kvcache(QUERY, *caches, QUERY, QUERY, **{"cache_seqlens": 0, **options})


def attend(**options: Any) -> Any:
    cache = KVCache(1, 1, 2, 4, 8)
    cache.extend(3)
    return cache.attend(0, QUERY, QUERY, QUERY, **options)


def layer(**options: Any) -> Any:
    return nn.MultiHeadSelfAttention(4, 2)(torch.randn(1, 3, 4), **options)


def drop_in(**options: Any) -> Any:
    return nn.MultiheadAttention(4, 2)(*[torch.randn(3, 4)] * 3, **options)


FLAGS = "is_causal enable_gqa return_weights return_lse"
NUMBERS = "dropout_p scale softcap"
#: name -> (function, its flags, its numbers, its ints).
FUNCTIONS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "attention": (lambda **options: attention(QUERY, **options), FLAGS, NUMBERS, "query_offset window_size"),
    "training": (
        lambda **options: attention(QUERY.clone().requires_grad_(), **options),
        FLAGS, NUMBERS, "query_offset window_size",
    ),
    "three dimensions": (lambda **options: attention(QUERY[0], **options), FLAGS, NUMBERS, "query_offset"),
    "weights": (
        lambda **options: attention_weights(QUERY, QUERY, **options),
        "is_causal enable_gqa return_lse", NUMBERS, "query_offset window_size",
    ),
    "explain": (
        lambda **options: backends.explain(QUERY, QUERY, QUERY, **options), FLAGS, NUMBERS, "query_offset",
    ),
    "scores": (lambda **options: attention_scores(QUERY, QUERY, **options), "enable_gqa", "scale", ""),
    "softmax": (lambda **options: masked_softmax(QUERY, **options), "is_causal", "scale", "query_offset"),
    "varlen": (varlen, FLAGS, NUMBERS, "query_offset window_size max_seqlen_q max_seqlen_k"),
    "varlen on caches": (
        lambda **options: varlen(seqused_k=torch.tensor([2]), **options),
        FLAGS, NUMBERS, "query_offset window_size max_seqlen_q max_seqlen_k",
    ),
    "step": (step, FLAGS, NUMBERS, "query_offset window_size cache_seqlens"),
    "attend": (attend, "is_causal return_weights return_lse", NUMBERS, "window_size"),
    "rotary": (
        lambda **options: nn.apply_rotary(QUERY, torch.arange(3), **options), "interleaved", "base", "",
    ),
    "rotary embedding": (
        lambda **options: nn.rotary_embedding(QUERY, **options), "interleaved", "base", "",
    ),
    "layer": (layer, "is_causal return_weights", "", ""),
    "drop-in layer": (drop_in, "is_causal", "", ""),
}  # fmt: skip

TRUTHS = (True, False, np.bool_(True), torch.tensor(True))
#: Values that are not numbers; None is left out where it stands for a default.
NO_NUMBERS = (*TRUTHS, "1", None)
HUGE = (10**400, -(10**5000))


def refused(function: Callable[..., Any], name: str, values: tuple[Any, ...], error: type[Exception]) -> None:
    for value in values:
        with pytest.raises(error) as caught:
            function(**{name: (value, 1) if name == "window_size" else value})
        message = str(caught.value)
        assert name in message, (value, message)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        shown = "tensor of shape" if isinstance(value, Tensor) else type(value).__name__
        assert shown in message or name == "window_size" or error is ValueError, (value, message)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flags_are_bools(name: str) -> None:
    function, flags, _, _ = FUNCTIONS[name]
    for flag in flags.split():
        function(**{flag: False})
        refused(function, flag, ("False", 1, 0, None, np.bool_(True), torch.tensor(True), QUERY), TypeError)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_no_bools(name: str) -> None:
    function, _, numbers, ints = FUNCTIONS[name]
    for number in numbers.split():
        optional = number == "scale" and function is not FUNCTIONS["softmax"][0]
        refused(function, number, NO_NUMBERS[:-1] if optional else NO_NUMBERS, TypeError)
        refused(function, number, HUGE, ValueError)
    for number in ints.split():
        optional = function is step and number != "window_size"
        refused(function, number, NO_NUMBERS[:-1] if optional else NO_NUMBERS, TypeError)
        refused(function, number, HUGE, ValueError)


def test_sizes_of_layers_are_no_bools() -> None:
    for make in (nn.SelfAttention, lambda size: nn.MultiHeadSelfAttention(8, size)):
        with pytest.raises(ValueError, match="must be a positive integer, got True"):
            make(True)
    with pytest.raises(TypeError, match="rotary must be a bool"):
        nn.MultiheadAttention(8, 2, rotary="no")
    with pytest.raises(TypeError, match="layers must be an int, got bool True"):
        KVCache(True, 1, 1, 1, 1)


def test_numbers_of_other_libraries_are_numbers() -> None:
    expected = attention(QUERY, scale=0.5, softcap=2.0)
    for kind in (np.float32, np.float64, torch.tensor):
        assert torch.equal(
            attention(QUERY, scale=kind(0.5), softcap=kind(2.0), dropout_p=kind(0.0)), expected
        )
    for kind in (int, np.int64, torch.tensor):
        assert torch.equal(
            attention(QUERY, scale=0.5, softcap=kind(2), query_offset=kind(0), dropout_p=kind(0)), expected
        )


def asked_of_shapes(query: Tensor, factor: float) -> Any:
    length = query.shape[2]
    return scaled_dot_product_attention(
        query, query, query, is_causal=length > 2, return_weights=length > 1, scale=factor * length,
        softcap=factor, query_offset=length - 3, window_size=(length, -1),
    )  # fmt: skip


def test_symbols_of_a_compiler() -> None:
    """While a compiler traces a comparison of sizes, its result is a symbol, not a bool."""
    torch._dynamo.reset()
    compiled = torch.compile(asked_of_shapes, backend="eager", fullgraph=True, dynamic=True)
    for length in (5, 4, 6):
        query = torch.randn(1, 2, length, 4)
        for found, expected in zip(
            compiled(query, 0.1 * length), asked_of_shapes(query, 0.1 * length), strict=True
        ):
            torch.testing.assert_close(found, expected)
    traced = make_fx(lambda query: asked_of_shapes(query, 0.5), tracing_mode="symbolic")(QUERY)
    torch.testing.assert_close(traced(QUERY), asked_of_shapes(QUERY, 0.5))
