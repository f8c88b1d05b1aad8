"""as_sdpa() with torch.func, checkpointing, TorchScript, torch.compile and torch.export.

These take functions apart or run them later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import ran
import torch
import torch.nn.functional as F
from test_sdpa_mode import inputs, normal
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

import selfattn_ext
from selfattn_ext import as_sdpa, ops

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

sdpa = F.scaled_dot_product_attention


def test_torch_func() -> None:
    query, key, value = inputs(torch.float64)

    def loss(query: Tensor) -> Tensor:
        return sdpa(query, key[0], value[0], is_causal=True).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(query)
    curvature = torch.func.hessian(loss)(query[0, :1, :2])
    with as_sdpa():
        assert sum(ran.ours(lambda: torch.func.vmap(torch.func.grad(loss))(query))) > 0
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(query), expected)
        torch.testing.assert_close(torch.func.hessian(loss)(query[0, :1, :2]), curvature)


class Twice(torch.autograd.Function):
    """A function that torch.func calls by an operator of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return 2 * tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_other_functions_in_a_block() -> None:
    with as_sdpa():
        gradient = torch.func.grad(lambda tensor: Twice.apply(tensor).sum())(torch.ones(3))
        chosen = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(3),))
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert torch.equal(chosen, torch.full((3,), 2.0))


def test_second_derivatives() -> None:
    """torch's fused kernel has no second derivatives."""
    tensors = [normal(1, 1, 3, 4, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(3)]
    with pytest.raises(RuntimeError, match="is not implemented"):
        torch.autograd.gradgradcheck(sdpa, tensors)
    with as_sdpa():
        assert torch.autograd.gradgradcheck(sdpa, tensors, fast_mode=True)


def test_checkpointing() -> None:
    tensors = inputs(grad=True)

    def step() -> None:
        checkpoint(sdpa, *tensors, None, 0.0, use_reentrant=False).sum().backward()

    with as_sdpa():
        assert ran.ours(step) == (2, 1)

    def blocks() -> Any:
        return nullcontext(), as_sdpa()

    with as_sdpa():
        out = checkpoint(sdpa, *tensors, None, 0.0, use_reentrant=False, context_fn=blocks)
    assert ran.ours(lambda: out.sum().backward()) == (1, 1)
    with as_sdpa():
        out = checkpoint(sdpa, *tensors, None, 0.1, use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_torchscript() -> None:
    scripted = torch.jit.script(scripted_attention)
    with as_sdpa():
        assert ran.ours(lambda: scripted(*inputs())) == (1, 0)
    assert ran.ours(lambda: scripted(*inputs())) == (0, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_holds_torchs_operator() -> None:
    with as_sdpa():
        traced = torch.jit.trace(scripted_attention, inputs())
        assert ran.ours(lambda: traced(*inputs())) == (1, 0)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert ran.ours(lambda: traced(*inputs())) == (0, 0)


def scripted_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def test_compiled_outside_and_inside() -> None:
    """There is one graph inside and one outside the block, in any order; the function may have a block."""
    calls = {
        "in a block": torch.compile(
            lambda q, k, v: sdpa(q, k, v, None, 0.1), backend="aot_eager", fullgraph=True
        ),
        "itself": torch.compile(with_its_own_block, backend="aot_eager", fullgraph=True),
    }

    def step(name: str) -> Callable[[], None]:
        return lambda: calls[name](*inputs(grad=True)).sum().backward()

    assert ran.ours(step("in a block")) == (0, 0)
    for _ in range(2):
        with as_sdpa():
            step("in a block")()
            assert ran.ours(step("in a block")) == (1, 1)
        assert ran.ours(step("in a block")) == (0, 0)
    step("itself")()
    assert ran.ours(step("itself")) == (2, 2)


def with_its_own_block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with selfattn_ext.as_sdpa():
        out = sdpa(query, key, value, dropout_p=0.1)
        projections = (torch.ones(24, 8), torch.ones(24), None, None, False, 0.0, torch.ones(8, 8), None)
        return F.multi_head_attention_forward(
            out[0], out[0], key[0, :, :5], 8, 2, *projections, need_weights=False
        )[0]


def test_a_compiled_function_follows_the_precision() -> None:
    compiled = torch.compile(scripted_attention, backend="aot_eager")
    query, key, value = (normal(1, 2, 64, 64, seed=seed) for seed in range(3))
    before = torch.get_float32_matmul_precision()
    try:
        with as_sdpa():
            for asked in ("highest", "high", "medium", "high", "highest"):
                torch.set_float32_matmul_precision(asked)
                assert torch.equal(compiled(query, key, value), sdpa(query, key, value)), asked
    finally:
        torch.set_float32_matmul_precision(before)


def test_results_on_disk_are_told_apart() -> None:
    """torch looks up compiled results by the traced graph, which does not contain the block."""
    before = torch.compiler.config.cache_key_tag
    with as_sdpa():
        inside = torch.compiler.config.cache_key_tag
        with as_sdpa():
            assert torch.compiler.config.cache_key_tag == inside
        assert torch.compiler.config.cache_key_tag == inside
    assert torch.compiler.config.cache_key_tag == before != inside


class Model(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sdpa(query, key, value)


class WithItsOwnBlock(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with selfattn_ext.as_sdpa():
            return sdpa(query, key, value)


def operators(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the attention operators in a graph, torch's and this package's."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [name for name in names if "attention" in name]


OURS, TORCHS = f"{ops.NAMESPACE}.attention_", "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_exported_program_takes_the_kernels_where_it_runs(strict: bool) -> None:
    with as_sdpa():
        exported = torch.export.export(Model(), inputs(), strict=strict)
    assert operators(exported) == [TORCHS]
    program = exported.module()
    assert ran.ours(lambda: program(*inputs())) == (0, 0)
    with as_sdpa():
        assert ran.ours(lambda: program(*inputs())) == (1, 0)


def test_decompositions_replace_torchs_operator() -> None:
    """The operator is replaced by the one that computes: in a block by this package's, for inference."""
    exported = torch.export.export(Model(), inputs())
    assert operators(exported.run_decompositions()) == []
    with as_sdpa():
        lowered = exported.run_decompositions()
    assert operators(lowered) == [f"{OURS}forward.default"]
    torch.testing.assert_close(lowered.module()(*inputs()), sdpa(*inputs()))


def test_a_block_within_an_exported_function() -> None:
    """The block is kept only if Dynamo traces it, which torch.export uses only with strict=True."""
    strict, other = (torch.export.export(WithItsOwnBlock(), inputs(), strict=how) for how in (True, False))
    assert operators(strict) == [f"{OURS}with_gradient.default"]
    assert operators(other) == [TORCHS]
    # The counts are those of the operator with gradients and of those that it is composed of.
    assert ran.ours(lambda: strict.module()(*inputs(grad=True)).sum().backward()) == (2, 1)
