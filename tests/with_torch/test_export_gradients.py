"""Training of exported programs: every public function, strict or not, in each grad mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import turns
from torch import Tensor
from torch.export import Dim, ExportedProgram, export
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils._pytree import tree_leaves

import selfattn_ext
from selfattn_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, LENGTH, WIDTH = 2, 7, 8

#: The functions have type Any here, as tests pass tensors and options in one mapping.
flex_attention: Any = selfattn_ext.flex_attention
varlen_attention: Any = selfattn_ext.varlen_attention
sdpa: Any = selfattn_ext.scaled_dot_product_attention

Function = Callable[[Tensor, Tensor], Any]


def packed(x: Tensor, table: Tensor, **options: Any) -> Any:
    rows, starts = x.transpose(1, 2).flatten(0, 1), torch.tensor([0, 4, 9, 14])
    return varlen_attention(rows, rows, rows, starts, starts, 9, 9, **options)


def distances(table: Tensor) -> Any:
    """Returns a score function that reads a captured table and its sum."""
    return lambda s, b, h, q, kv: s * table.tanh()[0] + table[q - kv + 8] * (h + 1)


def blocks(x: Tensor) -> Any:
    size = x.size(2)
    return create_block_mask(lambda b, h, q, kv: q >= kv - 1, None, None, size, size, x.device, BLOCK_SIZE=4)


FUNCTIONS: dict[str, Function] = {
    "attention": lambda x, t: sdpa(x, x, x, is_causal=True),
    "options": lambda x, t: sdpa(
        x, x, x, t[:7].expand(7, 7), 0.2, sinks=t[:2], alibi_slopes=t[2:4], return_weights=True,
        return_lse=True,
    ),
    "weights": lambda x, t: selfattn_ext.attention_weights(x, x * t[0]),
    "scores": lambda x, t: selfattn_ext.attention_scores(x, x * t[0]),
    "softmax": lambda x, t: selfattn_ext.masked_softmax(x, t[:8]),
    "packed": lambda x, t: packed(x, t, sinks=t[:2], return_lse=True),
    "packed with a function": lambda x, t: packed(
        x, t, is_causal=True, sinks=t[:2], score_mod=distances(t), return_lse=True, dropout_p=0.2
    ),
    "packed with a mask": lambda x, t: packed(x, t, mask_mod=lambda b, h, q, kv: q + b >= kv) * t[0],
    "a function": lambda x, t: flex_attention(x, x, x, distances(t)),
    "a function with options": lambda x, t: flex_attention(
        x, x, x, distances(t), attn_mask=t[:7].expand(7, 7), return_weights=True, return_lse=True
    ),
    "a function with blocks": lambda x, t: flex_attention(x, x, x, distances(t), blocks(x)),
    "auxiliary results": lambda x, t: flex_attention(
        x, x, x, distances(t), return_aux=AuxRequest(lse=True, max_scores=True)
    ),
}  # fmt: skip


class Model(torch.nn.Module):
    """A model with parameters before the attention, and a table that functions capture."""

    def __init__(self, functions: dict[str, Function]):
        super().__init__()
        self.before = torch.nn.Linear(WIDTH, WIDTH)
        self.table = torch.nn.Parameter(torch.randn(20))
        self.functions = functions

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        x = self.before(x)
        results = {name: function(x, self.table) for name, function in self.functions.items()}
        return {name: [each for each in tree_leaves(of) if each is not None] for name, of in results.items()}


def gradients(module: Any, parameters: Any, x: Tensor) -> dict[str, list[Tensor]]:
    """Computes, for each function, the results and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    found = {}
    for name, results in module(x).items():
        total = sum(result.sin().sum() for result in results if result.requires_grad)
        assert isinstance(total, Tensor), name
        inputs = [x, *parameters]
        found[name] = list(torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True))
    return found


def exported(module: torch.nn.Module, *given: Any, no_grad: bool = True, **how: Any) -> ExportedProgram:
    with torch.no_grad() if no_grad else nullcontext():
        return export(module, given, **how)


@pytest.mark.parametrize(
    ("strict", "no_grad"),
    [
        (True, False),
        (False, True),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in turns.chosen([(True, True), (False, False)])
        ),
    ],
)
def test_exported_programs_train(strict: bool, no_grad: bool) -> None:
    """Exported programs can be trained even if nothing required a gradient during the export."""
    module = Model(FUNCTIONS)
    x = torch.randn(2, HEADS, LENGTH, WIDTH)
    expected = gradients(module, list(module.parameters()), x)
    module.requires_grad_(not no_grad)
    program = exported(module, x, strict=strict, no_grad=no_grad).module().requires_grad_()
    found = gradients(program, list(program.parameters()), x)
    for name in FUNCTIONS:
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_exported_functions_hold_for_all_lengths_and_have_second_derivatives() -> None:
    module = Model({"one": lambda x, t: flex_attention(x, x, x, distances(t), is_causal=True)}).double()
    x = torch.randn(2, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    dims: Any = ({0: Dim("batch", max=8), 2: Dim("length", min=2, max=40)},)
    program = exported(module, x, dynamic_shapes=dims).module().requires_grad_()
    for shape in ((2, HEADS, 5, WIDTH), (3, HEADS, 9, WIDTH)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        outcomes = []
        for each in (program, module):
            inputs = [x, *each.parameters()]
            (out,) = each(x)["one"]
            first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs)
            outcomes.append([out, *first, *second])
        torch.testing.assert_close(*outcomes)


_IN_ANOTHER_PROCESS = """
import torch, selfattn_ext
program = torch.export.load("program.pt2").module()
results = program(torch.load("x.pt"))["a function with options"]
sum(result.sin().sum() for result in results).backward()
torch.save([*results, *(parameter.grad for parameter in program.parameters())], "found.pt")
"""


def test_another_process_trains_what_was_saved(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """The other process has never compiled the function, and has none of the files that store it."""
    module = Model({name: FUNCTIONS[name] for name in ["a function with options"]})
    x = torch.randn(2, HEADS, LENGTH, WIDTH)
    torch.export.save(exported(module, x), tmp_path / "program.pt2")
    torch.save(x, tmp_path / "x.pt")
    run_python(_IN_ANOTHER_PROCESS, SELFATTN_FUNCTION_CACHE=str(tmp_path / "functions"))
    results = module(x)["a function with options"]
    total = sum(result.sin().sum() for result in results)
    assert isinstance(total, Tensor)
    expected = [*results, *torch.autograd.grad(total, list(module.parameters()))]
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), [each.detach() for each in expected])


def test_a_text_that_is_no_function_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    for text in ("", "{}", '{"tensors": [], "objects": [["Node", {"up": 1}]]}'):
        with pytest.raises(ValueError, match="score_function must be a function as this version"):
            getattr(torch.ops, ops.NAMESPACE).flex_attention_with_gradient(x, x, x, 1.0, score_function=text)
