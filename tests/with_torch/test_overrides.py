"""Tensor subclasses, modes and other types that define __torch_function__."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from selfattn_ext import (
    attention_scores,
    attention_weights,
    masked_softmax,
    merge_attention,
    scaled_dot_product_attention,
    sparse_attention,
)

CALLS: list[tuple[Callable[..., Any], int, dict[str, Any]]] = [
    (scaled_dot_product_attention, 3, {}),
    (sparse_attention, 3, {"indices": torch.zeros(5, 2, dtype=torch.int32)}),
    (scaled_dot_product_attention, 3, {"attn_mask": torch.ones(5, 5)}),
    (attention_weights, 2, {}),
    (attention_scores, 2, {}),
    (masked_softmax, 1, {"mask": torch.ones(5, 8)}),
]


class Tagged(torch.Tensor):
    pass


class Seen(torch.Tensor):
    functions: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("function", "count", "options"), CALLS)
def test_subclasses_see_one_call_and_keep_their_type(
    function: Callable[..., Any], count: int, options: dict[str, Any], requires_grad: bool
) -> None:
    plain = torch.randn(2, 3, 5, 8, requires_grad=requires_grad)
    expected = function(*[plain] * count, **options)
    assert type(expected) is torch.Tensor
    for cls in (Tagged, Seen):
        given = plain.detach().as_subclass(cls).requires_grad_(requires_grad)
        Seen.functions.clear()
        result = function(*[given] * count, **options)
        assert Seen.functions == ([function.__name__] if cls is Seen else [])
        assert type(result) is cls
        assert result.requires_grad == requires_grad
        assert torch.equal(result.as_subclass(torch.Tensor), expected)


def test_parts_that_are_merged_see_one_call() -> None:
    """Stacked and in a list, if one of them has another type."""
    outs, lses = torch.randn(2, 5, 8), torch.randn(2, 5)
    expected = merge_attention(outs, lses)
    seen = lses.as_subclass(Seen)
    for given in ((outs, seen), (outs, [lses[0], lses[1].as_subclass(Seen)])):
        Seen.functions.clear()
        results = merge_attention(*given)
        assert Seen.functions == ["merge_attention"]
        for result, plain in zip(results, expected, strict=True):
            assert type(result) is Seen
            assert torch.equal(result.as_subclass(torch.Tensor), plain)


def test_one_subclass_among_the_arguments_is_enough() -> None:
    query = torch.randn(2, 3, 5, 8)
    mask, numbers = torch.randn(5, 5).as_subclass(Tagged), torch.rand(3).as_subclass(Tagged)
    for given in ({"attn_mask": mask}, {"sinks": numbers}, {"alibi_slopes": numbers}):
        assert type(scaled_dot_product_attention(query, query, query, **given)) is Tagged
    out, lse = scaled_dot_product_attention(query.as_subclass(Tagged), query, query, return_lse=True)
    assert type(out) is type(lse) is Tagged


def test_gradients_of_subclasses() -> None:
    plain = torch.randn(2, 3, 5, 8, requires_grad=True)
    tagged = plain.detach().as_subclass(Tagged).requires_grad_()
    for query in (plain, tagged):
        scaled_dot_product_attention(query, query, query, is_causal=True).square().sum().backward()
    assert torch.equal(plain.grad, tagged.grad.as_subclass(torch.Tensor))


def test_parameters_are_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 3, 5, 8))
    assert type(scaled_dot_product_attention(parameter, parameter, parameter)) is torch.Tensor


def test_a_causal_bias_is_an_argument_and_no_override() -> None:
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    bias = causal_lower_right(5, 7)
    out = scaled_dot_product_attention(query, key, key, bias)
    assert type(out) is torch.Tensor
    assert torch.equal(out, scaled_dot_product_attention(query, key, key, is_causal=True, query_offset=2))
    tagged = scaled_dot_product_attention(query.as_subclass(Tagged), key, key, bias)
    assert torch.equal(tagged.as_subclass(torch.Tensor), out)


def test_other_types_may_take_the_call() -> None:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, args[0], kwargs["softcap"]

    duck, key = Duck(), torch.randn(2, 3, 5, 8)
    answer = scaled_dot_product_attention(duck, key, key, softcap=2.0)  # type: ignore[arg-type]
    assert answer == (scaled_dot_product_attention, duck, 2.0)


def test_modes_see_the_call() -> None:
    names = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    query = torch.randn(2, 3, 5, 8)
    expected = scaled_dot_product_attention(query, query, query)
    with Mode():
        out = scaled_dot_product_attention(query, query, query)
    assert torch.equal(out, expected)
    assert names == ["scaled_dot_product_attention"]
    with torch.device("meta"):  # this is a mode of torch's, which places tensors that name no device
        assert torch.equal(scaled_dot_product_attention(query, query, query), expected)
        out = scaled_dot_product_attention(
            query, query, query, dropout_p=0.5, sinks=torch.ones(3, device=query.device)
        )
    assert out.device == query.device
