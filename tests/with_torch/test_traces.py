"""Traces: transforms of torch.func in torch.export, and layers in torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import export
from torch.func import grad, jvp, vjp, vmap

from selfattn_ext import (
    MultiheadAttention,
    MultiHeadSelfAttention,
    SelfAttention,
    attention_scores,
    flex_attention,
    masked_softmax,
    scaled_dot_product_attention,
    varlen_attention,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Function = Callable[[Tensor], Any]


def plain(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


def with_options(x: Tensor) -> Any:
    return scaled_dot_product_attention(
        x, x, x, x[..., :1].transpose(-1, -2), alibi_slopes=x[..., 0, 0], sinks=x[..., 0, 1], softcap=3.0,
        return_weights=True, return_lse=True,
    )  # fmt: skip


def packed(x: Tensor) -> Tensor:
    rows, starts = x[0].transpose(0, 1), torch.tensor([0, 2, 5])
    return varlen_attention(rows, rows, rows, starts, starts, 3, 3)


def halves(x: Tensor) -> Tensor:
    return masked_softmax(attention_scores(x, x), is_causal=True) @ x


def with_a_function(x: Tensor) -> Tensor:
    return flex_attention(x, x, x, lambda s, b, h, q, kv: s * (q - kv))


class Model(torch.nn.Module):
    def __init__(self, function: Function):
        super().__init__()
        self.before = torch.nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        results = self.function(x * self.before)
        return results if isinstance(results, tuple) else (results,)


VMAPS: dict[str, Function] = {
    "plain": vmap(plain),
    "options": vmap(with_options),
    "nested": vmap(vmap(lambda x: plain(x.unsqueeze(0)))),
    "some inputs": lambda x: vmap(lambda q: scaled_dot_product_attention(q, x[0], x[1]))(x),
    "packed": vmap(packed),
    "halves": vmap(halves),
}


def outcome(module: Any, x: Tensor) -> list[Tensor]:
    results = module(x)
    total = sum(result.sin().sum() for result in results)
    assert isinstance(total, Tensor)
    return [*results, *torch.autograd.grad(total, list(module.parameters()))]


@pytest.mark.parametrize(("number", "name"), enumerate(VMAPS))
def test_exported_vmap_trains(number: int, name: str) -> None:
    """Every second one is exported strictly."""
    torch._dynamo.reset()
    module, x = Model(VMAPS[name]), torch.randn(3, 2, 4, 5, 8)
    with torch.no_grad():
        program = export(module, (x,), strict=number % 2 == 1).module()
    torch.testing.assert_close(outcome(program, x), outcome(module, x))


@pytest.mark.parametrize("function", [plain, halves, with_a_function])
def test_exported_derivatives_are_refused(function: Function) -> None:
    """They are refused, as exported programs of derivatives return fake tensors."""

    def loss(x: Tensor) -> Tensor:
        return function(x).sin().sum()

    x = torch.randn(1, 2, 4, 5, 8)
    for derivative in (
        lambda x: grad(loss)(x[0]),
        vmap(grad(loss)),
        lambda x: vjp(function, x[0])[1](x[0])[0],
        lambda x: jvp(function, (x[0],), (x[0],))[1],
    ):
        with pytest.raises(RuntimeError, match="cannot trace derivatives of attention"):
            export(Model(derivative), (x,))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = SelfAttention(16)
        self.many = MultiHeadSelfAttention(16, 4)
        self.drop_in = MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.one(x, visible)[0]
        x = self.many(x, visible, is_causal=True)
        out, weights = self.drop_in(x, x, x, attn_mask=visible.logical_not(), average_attn_weights=False)
        return plain(out) + weights.sum()


def test_symbolic_traces_hold_layers_and_functions_as_torchs() -> None:
    module = Layers()
    traced = torch.fx.symbolic_trace(module)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["one", "many", "drop_in"]
    x, visible = torch.randn(2, 5, 16), torch.ones(5, 5).tril().bool()
    torch.testing.assert_close(traced(x, visible), module(x, visible))


def test_a_symbolic_trace_of_a_layer_itself() -> None:
    layer, x = SelfAttention(16), torch.randn(2, 5, 16)
    traced = torch.fx.symbolic_trace(layer, {"mask": None, "is_causal": False})
    torch.testing.assert_close(traced(x, None), layer(x))
