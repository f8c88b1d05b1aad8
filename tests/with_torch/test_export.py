"""torch.export: one operator per call, dynamic dimensions, saved and loaded, with gradients."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import selfattn_ext
from selfattn_ext import attention_scores, masked_softmax, ops, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = 4
BATCH, LENGTH, KEYS = Dim("batch", max=64), Dim("length", min=2, max=512), Dim("keys", min=2, max=512)


class Calls(torch.nn.Module):
    """Calls both paths of the public function, and the two halves, with a position that shapes determine."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        offset = key.size(2) - query.size(2)
        plain = scaled_dot_product_attention(query, key, value, enable_gqa=True)
        optional = scaled_dot_product_attention(
            query, key, value, mask, 0.3, True, 0.4, True, window_size=(9, 0), softcap=3.0, sinks=self.sinks,
            query_offset=offset, return_weights=True, return_lse=True,
        )  # fmt: skip
        scores = attention_scores(query, key, enable_gqa=True)
        return plain, *optional, masked_softmax(scores, mask, is_causal=True, query_offset=offset)


def inputs(batch: int, length: int, keys: int) -> list[torch.Tensor]:
    return [
        torch.randn(batch, HEADS, length, 8),
        torch.randn(batch, 2, keys, 8),
        torch.randn(batch, 2, keys, 6),
        torch.randn(length, keys),
    ]


def outcome(function: Any, tensors: list[torch.Tensor], parameters: Any) -> list[torch.Tensor]:
    """Computes results and gradients."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.manual_seed(5)
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(result.sin().sum() for result in results)
    return [*results, *torch.autograd.grad(total, [*tensors, *parameters])]


def operators(program: ExportedProgram) -> list[str]:
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return [str(target) for target in targets if getattr(target, "namespace", "") == ops.NAMESPACE]


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.cpu_only("torch.export.load fails under torch.set_default_device of another device")
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_calls_hold_for_all_shapes_and_have_gradients(strict: bool) -> None:
    module = Calls()
    dims: Any = ({0: BATCH, 2: LENGTH}, {0: BATCH, 2: KEYS}, {0: BATCH, 2: KEYS}, {0: LENGTH, 1: KEYS})
    program = export(module, tuple(inputs(2, 5, 7)), dynamic_shapes=dims, strict=strict)
    names = ["attention_with_gradient"] * 2 + [
        "attention_scores_with_gradient",
        "masked_softmax_with_gradient",
    ]
    assert operators(program) == [f"{ops.NAMESPACE}.{name}.default" for name in names]
    loaded = saved_and_loaded(program).module()
    for shape in ((2, 5, 7), (1, 20, 20), (3, 2, 33)):
        tensors = inputs(*shape)
        expected = outcome(module, tensors, module.parameters())
        torch.testing.assert_close(outcome(loaded, tensors, loaded.parameters()), expected)

    lowered = program.run_decompositions()
    assert not [name for name in operators(lowered) if "with_gradient" in name]
    torch.manual_seed(5)
    results = lowered.module()(*tensors)
    torch.testing.assert_close(list(results), [result.detach() for result in expected[: len(results)]])


def test_decompositions_may_keep_the_operators_that_train() -> None:
    module, tensors = Calls(), inputs(2, 5, 7)
    program = export(module, tuple(tensors))
    table = torch.export.default_decompositions()
    for operator in list(table):
        if operator.namespace == ops.NAMESPACE:
            del table[operator]
    kept = program.run_decompositions(table)
    assert operators(kept) == operators(program)
    trained = kept.module()
    torch.testing.assert_close(
        outcome(trained, tensors, trained.parameters()), outcome(module, tensors, module.parameters())
    )


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = selfattn_ext.SelfAttention(16)
        self.many = selfattn_ext.MultiHeadSelfAttention(16, HEADS)
        self.drop_in = selfattn_ext.MultiheadAttention(
            16, HEADS, batch_first=True, num_kv_heads=2, rotary=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.many(self.one(x, is_causal=True)[0], is_causal=True)
        return self.drop_in(x, x, x, is_causal=True)[0]


def test_exported_layers_train() -> None:
    module, x = Layers(), torch.randn(3, 11, 16)
    program = export(module, (torch.randn(2, 5, 16),), dynamic_shapes=({0: BATCH, 1: LENGTH},)).module()
    expected = outcome(module, [x], module.parameters())
    for each in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(outcome(each, [x], program.parameters()), expected)
