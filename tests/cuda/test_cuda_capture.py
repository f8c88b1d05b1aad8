"""CUDA graphs need Python code that never looks at the values of a tensor. No values exist while a graph
records. Tensors of FakeTensorMode have none either, and raise an error when they are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from selfattn_ext import (
    attention_scores,
    attention_weights,
    capture,
    formula_steps,
    masked_softmax,
    masks,
    nn,
)
from selfattn_ext import scaled_dot_product_attention as attention

#: Arguments of attention, as functions of a maker of tensors.
OPTIONS: dict[str, Callable[[Callable[..., Tensor]], dict[str, Any]]] = {
    "plain": lambda make: {},
    "causal": lambda make: {"is_causal": True},
    "window": lambda make: {"window_size": (3, 1), "query_offset": 2},
    "bool mask": lambda make: {"attn_mask": make(9, 7) > 0},
    "float mask": lambda make: {"attn_mask": make(1, 4, 9, 1), "return_lse": True},
    "dropout": lambda make: {"dropout_p": 0.3, "return_weights": True},
    "all": lambda make: {
        "attn_mask": make(9, 7),
        "dropout_p": 0.3,
        "softcap": 2.0,
        "alibi_slopes": make(4),
        "sinks": make(2, 4),
        "is_causal": True,
        "return_weights": True,
        "return_lse": True,
    },
}
options = pytest.mark.parametrize("make_options", OPTIONS.values(), ids=OPTIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype).requires_grad_()


def total(results: Any) -> Tensor:
    results = results if isinstance(results, tuple) else (results,)
    return sum((result.float().sum() for result in results), torch.zeros(()))


def arguments(
    make_options: Callable[..., dict[str, Any]], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """query, key and value, and the options."""
    query, key = leaf(2, 4, 9, 8, dtype=dtype), leaf(2, 2, 7, 8, dtype=dtype)
    return [query, key, leaf(2, 2, 7, 6, dtype=dtype)], {"enable_gqa": True, **make_options(leaf)}


def leaves(tensors: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
    given = [value for value in keywords.values() if isinstance(value, Tensor) and value.requires_grad]
    return [*tensors, *given]


@options
@dtypes
@pytest.mark.parametrize("order", [1, 2])
def test_a_training_step_looks_at_nothing(
    order: int, make_options: Callable[..., dict[str, Any]], dtype: torch.dtype
) -> None:
    """In second order the loss is of the gradients, as that of a gradient penalty."""
    with FakeTensorMode():
        tensors, keywords = arguments(make_options, dtype)
        inputs = leaves(tensors, keywords)
        loss = total(attention(*tensors, **keywords))
        if order == 2:
            loss = total(torch.autograd.grad(loss, inputs, create_graph=True))
        loss.backward()
        for tensor in inputs:
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)


def test_the_pieces_look_at_nothing() -> None:
    with FakeTensorMode():
        query, mask = leaf(2, 3, 5, 8), leaf(5, 5)
        scores = attention_scores(query, query)
        weights = masked_softmax(scores, mask, is_causal=True)
        more = attention_weights(query, query, mask)
        (total((weights, more))).backward()
        assert query.grad is not None
        assert mask.grad is not None


@pytest.mark.parametrize(
    "mask", [None, torch.ones(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.int64)], ids=str
)
def test_modules_look_at_nothing(mask: Tensor | None) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = leaf(2, 5, 8)
        layers: list[Any] = [
            nn.MultiHeadSelfAttention(8, 2),
            nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1, rotary=True),
        ]
        total(layers[0](x, mask)).backward()
        hidden = None if mask is None else mask == 0
        total(layers[1](x, x, x, attn_mask=hidden, need_weights=False)[0]).backward()
        assert all(
            parameter.grad is not None
            for layer in layers
            for name, parameter in layer.named_parameters()
            if "bias" not in name
        )


@options
def test_what_is_taken_for_granted_changes_no_gradient(
    make_options: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    keywords = make_options(make)
    tensors = [make(2, 4, 9, 8), make(2, 4, 7, 8), make(2, 4, 7, 6)]
    inputs = leaves(tensors, keywords)

    def third() -> tuple[Tensor, ...]:
        """It goes by the formula, which asks whether hidden numbers could do harm, unless a graph records."""
        torch.manual_seed(5)
        grads = torch.autograd.grad(total(attention(*tensors, **keywords)), inputs, create_graph=True)
        more = torch.autograd.grad(sum((g * g).sum() for g in grads), inputs, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in more), inputs)

    looked = third()
    monkeypatch.setattr(formula_steps, "is_capturing", lambda tensor: True)
    for found, expected in zip(third(), looked, strict=True):
        torch.testing.assert_close(found, expected)


def test_float_masks_of_modules_are_looked_at_unless_a_graph_records(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.MultiHeadSelfAttention(8, 2), torch.randn(2, 5, 8)
    additive = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    with pytest.raises(ValueError, match="0 \\(hidden\\) and 1"):
        module(x, additive)
    monkeypatch.setattr(nn.self_attention, "is_capturing", lambda tensor: True)
    visible = torch.ones(5, 5).tril()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module(x, visible)
    torch.testing.assert_close(module(x, visible), module(x, visible > 0))


def test_when_a_graph_records(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        here, there = torch.empty(1), torch.empty(1, device="cuda")
    for state in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda state=state: state)
        assert not capture.is_capturing(here)
        assert capture.is_capturing(there) == state


def test_slopes_are_made_where_they_are_wanted() -> None:
    with FakeTensorMode():
        rule = masks.Alibi.for_heads(4, query_offset=3)
        assert rule.options()["alibi_slopes"].device.type == "cpu"
        given = rule.options(device="cuda")
        assert given["alibi_slopes"].device.type == "cuda"
        assert given["query_offset"] == 3
