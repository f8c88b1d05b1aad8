"""Score functions under torch.compile, in torch's flex_attention and in this package's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ran
import torch
from functions import ALL, assert_same, gradients, mask_of, tensors
from functions import flex_attention as own_flex_attention
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import selfattn_ext
from selfattn_ext import as_flex
from selfattn_ext.flex import kernel_calls

#: The type leaves out the signatures, because tests unpack tensors and options into one call.
varlen_attention: Any = selfattn_ext.varlen_attention
attention_with_kvcache: Any = selfattn_ext.attention_with_kvcache

SIZES = (2, 3, 40, 45)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "backend"),
    [("documents", "eager"), ("swin_table", "aot_eager"), ("of_queries_and_keys", "eager")],
)
def test_trains_like_eager(name: str, backend: str) -> None:
    functions, given = ALL[name](SIZES, torch.float32), tensors(SIZES)
    mask = mask_of(functions, SIZES, 16)
    leaves = [*given, *functions.learned]
    counter = CompileCounterWithBackend(backend)
    with as_flex():
        out = flex_attention(*given, functions.score_mod, mask)
        compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
        result = compiled(*given, functions.score_mod, mask)
    assert_same([result, *gradients(result, leaves)], [out, *gradients(out, leaves)])
    assert counter.frame_count == 1


def test_kernels_are_the_steps_of_the_graph() -> None:
    """AOTAutograd sees operators that have shapes, not Python functions."""
    functions, given = ALL["conjunction"](SIZES, torch.float32), tensors(SIZES)
    mask = mask_of(functions, SIZES, 16)
    leaves, graphs = [*given, *functions.learned], []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    with as_flex():
        out = flex_attention(*given, functions.score_mod, mask)
        compiled = torch.compile(flex_attention, backend=aot_autograd(fw_compiler=note), fullgraph=True)
        result = compiled(*given, functions.score_mod, mask)
    assert_same([result, *gradients(result, leaves)], [out, *gradients(out, leaves)])
    forward, backward = graphs
    assert "selfattn.attention_forward.default" in forward
    assert "selfattn.block_map.default" in forward
    assert "selfattn.attention_backward.default" in backward
    assert "selfattn.attention_captured_gradients.default" in backward
    assert not any("flex" in step or "vmap" in step for step in forward + backward)


def test_results_beside_the_output() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*given: Tensor) -> Any:
        return flex_attention(*given, return_aux=AuxRequest(lse=True, max_scores=True))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def with_lse(*given: Tensor) -> Any:
        return flex_attention(*given, return_lse=True)

    given = tensors(SIZES, torch.bfloat16)
    with as_flex():
        out, aux = flex_attention(*given, return_aux=AuxRequest(lse=True, max_scores=True))
        result, also = compiled(*given)
        assert_same([result, also.lse, also.max_scores], [out, aux.lse, aux.max_scores])
        assert_same(list(with_lse(*given)), [out, aux.lse])
    assert_same(gradients(also.lse, given[:2]), gradients(aux.lse, given[:2]))


class Block(nn.Module):
    """Attention with a learned bias, in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.slopes = nn.Parameter(torch.randn(4))
        self.end = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        slopes = self.slopes.exp()
        out = flex_attention(query, key, value, lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs())
        result: Tensor = self.end(out.transpose(1, 2).reshape(x.shape))
        return result


def step(model: Callable[..., Tensor], parameters: Iterator[nn.Parameter], x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(parameters))]


def test_a_compiled_model() -> None:
    """A model compiled before the block has its own compiled form inside, and keeps its own outside."""
    model, x = Block(), torch.randn(2, 24, 32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        outside = compiled(x)
        assert ran.ours(lambda: compiled(x)) == (0, 0)
        with as_flex():
            inside = compiled(x)
            assert ran.operators(lambda: compiled(x))["selfattn::attention_forward"] == 1
        assert torch.equal(compiled(x), outside)
        assert ran.ours(lambda: compiled(x)) == (0, 0)
        with as_flex():
            assert torch.equal(compiled(x), inside)
        assert counter.frame_count == 2
    torch.testing.assert_close(inside, outside)
    with as_flex():
        assert_same(step(compiled, model.parameters(), x), step(model, model.parameters(), x))
    assert counter.frame_count == 3


def test_a_function_compiled_inside_is_torchs_own_outside() -> None:
    given = [tensor.detach() for tensor in tensors(SIZES)]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter)
    for _ in range(2):
        with as_flex():
            compiled(*given)
            assert ran.operators(lambda: compiled(*given))["selfattn::attention_forward"] == 1
        compiled(*given)
        assert ran.ours(lambda: compiled(*given)) == (0, 0)
    assert counter.frame_count == 2


def test_checkpointing_recomputes() -> None:
    model, x = Block(), torch.randn(2, 24, 32)

    def checkpointed(x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return result

    with as_flex():
        right = step(model, model.parameters(), x)
        assert_same(step(checkpointed, model.parameters(), x), right)
        compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
        assert_same(step(compiled, model.parameters(), x), right)


def test_lengths_and_numbers_that_change() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def compiled(query: Tensor, key: Tensor, value: Tensor, width: int) -> Any:
        return flex_attention(query, key, value, lambda s, b, h, q, kv: s - (q - kv) // width)

    for length, width in ((40, 3), (41, 5), (77, 8)):
        given = tensors((2, 3, length, 45))
        with as_flex():
            result = compiled(*given, width)
            out = flex_attention(*given, lambda s, b, h, q, kv, width=width: s - (q - kv) // width)
        assert_same([result, *gradients(result, given)], [out, *gradients(out, given)])
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("mode", "backend"), [(torch.no_grad, "aot_eager"), (torch.inference_mode, "eager")], ids=str
)
def test_without_gradients(mode: Any, backend: str) -> None:
    functions = ALL["relative_bias"](SIZES, torch.float32)
    with mode(), as_flex():
        given = tensors(SIZES)
        out = flex_attention(*given, functions.score_mod)
        result = torch.compile(flex_attention, backend=backend, fullgraph=True)(*given, functions.score_mod)
    assert torch.equal(out, result)


def test_autocast() -> None:
    given = tensors(SIZES)

    def cast(*given: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flex_attention(*given)

    with as_flex():
        out, result = cast(*given), torch.compile(cast, backend="aot_eager", fullgraph=True)(*given)
    assert out.dtype == torch.bfloat16
    assert_same([result, *gradients(result, given)], [out, *gradients(out, given)])


def test_functions_that_cannot_be_compiled() -> None:
    """torch computes them, in graphs too, and their gradients, which its own function refuses on the CPU."""
    table = torch.randn(3, requires_grad=True)
    given = tensors(SIZES)
    mask = mask_of(ALL["documents"](SIZES, torch.float32), SIZES, 16)

    def compute(*given: Tensor) -> Any:
        return flex_attention(
            *given, lambda s, b, h, q, kv: s * torch.polygamma(1, table[h].abs() + 1), mask,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip

    kernel_calls._warned.clear()
    with as_flex(), pytest.warns(UserWarning, match="does not compile this function: it uses aten.polygamma"):
        result, also = torch.compile(compute, backend="aot_eager", fullgraph=True)(*given)
    with as_flex():
        out, aux = compute(*given)
    leaves = [*given, table]
    torch.testing.assert_close(
        [result, also.lse, also.max_scores, *gradients(result, leaves)],
        [out, aux.lse, aux.max_scores, *gradients(out, leaves)],
    )


def test_mistakes_are_named() -> None:
    given = tensors(SIZES)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu")
    with as_flex():
        with pytest.raises(Exception, match=r"block_mask was created for \(Q_LEN, KV_LEN\) = \(64, 64\)"):
            compiled(*given, block_mask=mask)
        with pytest.raises(Exception, match="query has 3 heads and key has 1"):
            compiled(given[0], given[1][:, :1], given[2][:, :1])


def test_packed_documents() -> None:
    """torchtune packs like this: each step makes a new mask of document numbers for a compiled function."""
    compiled = torch.compile(flex_attention, dynamic=False, backend="aot_eager")
    given = [torch.randn(2, 4, 96, 16, requires_grad=True) for _ in range(3)]
    with as_flex():
        for lengths in (((40, 30, 26), (96, 0, 0)), ((1, 50, 45), (60, 20, 16))):
            ids = torch.stack(
                [torch.repeat_interleave(torch.arange(3), torch.tensor(each)) for each in lengths]
            )

            def document_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, ids: Tensor = ids) -> Tensor:
                return (q >= kv) & (ids[b, q] == ids[b, kv])

            mask = create_block_mask(document_causal, 2, None, 96, 96, device="cpu")
            out = compiled(*given, block_mask=mask)
            seen = (ids[:, None, :, None] == ids[:, None, None]) & torch.ones(96, 96).tril().bool()
            right = nn.functional.scaled_dot_product_attention(*given, attn_mask=seen)
            torch.testing.assert_close([out, *gradients(out, given)], [right, *gradients(right, given)])


def assert_same_in_one_graph(compute: Any, leaves: list[Tensor], *arguments: Any) -> None:
    """Asserts that one graph gives the bits of the eager call and of its gradients."""
    found = []
    for each in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        results = each(*arguments)
        total = sum(result.nan_to_num(neginf=0.0).sin().sum() for result in results if result.requires_grad)
        assert isinstance(total, Tensor)
        found.append([*results, *torch.autograd.grad(total, leaves)])
    assert_same(*found)


def test_flex_attention_with_options() -> None:
    query, key, value = (torch.randn(2, 4, 20, 8, requires_grad=True) for _ in range(3))
    table, bias = torch.randn(2, 20, requires_grad=True), torch.randn(20, 20, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv - 3, None, None, 20, 20, device="cpu", BLOCK_SIZE=16)

    def compute(*given: Tensor) -> list[Tensor]:
        out, weights, aux = own_flex_attention(
            *given, lambda s, b, h, q, kv: s * table.exp()[b, q], mask, attn_mask=bias, window_size=(9, 9),
            dropout_p=0.2, return_weights=True, return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        return [out, weights, aux.lse, aux.max_scores]

    assert_same_in_one_graph(compute, [query, key, value, table, bias], query, key, value)


def test_packed_sequences() -> None:
    query, key, value = (torch.randn(14, 4, 8, requires_grad=True) for _ in range(3))
    table, slopes = torch.randn(3, 40, requires_grad=True), torch.rand(4, requires_grad=True)

    def compute(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Any:
        return varlen_attention(
            query * 2, key, value, starts, starts, 9, 9, is_causal=True, alibi_slopes=slopes,
            score_mod=lambda s, b, h, q, kv: s + table.tanh()[b, q - kv + 20],
            mask_mod=lambda b, h, q, kv: (kv < b + 1) | (q - kv < 4), return_lse=True,
        )  # fmt: skip

    leaves = [query, key, value, table, slopes]
    assert_same_in_one_graph(compute, leaves, query, key, value, torch.tensor([0, 5, 5, 14]))


@pytest.mark.parametrize("cached", ["slots", "pages"])
def test_caches_stay_outside_of_graphs(cached: str) -> None:
    """The step breaks the graph: the results and the cache are those of the eager call."""
    caches = [torch.randn(6, 4, 8, 8) if cached == "pages" else torch.randn(2, 4, 24, 8) for _ in range(2)]
    table = torch.arange(6).view(2, 3).int() if cached == "pages" else None
    query, key, value = (torch.randn(2, 4, 1, 8) for _ in range(3))

    def compute(query: Tensor, *caches: Tensor) -> Any:
        return attention_with_kvcache(
            query.sin(), *caches, key, value, torch.tensor([3, 9]), table,
            score_mod=lambda s, b, h, q, kv: s * (q + 1) / (kv + 1), mask_mod=lambda b, h, q, kv: q - kv < 5,
        ).cos()  # fmt: skip

    copies = [cache.clone() for cache in caches]
    eager = compute(query, *caches)
    compiled = torch.compile(compute, backend="eager")(query, *copies)
    assert_same([compiled, *copies], [eager, *caches])


def test_packed_functions_that_cannot_be_compiled() -> None:
    """Where options are given, too, a graph refuses them, and the error says what to do."""
    query, key, value = (torch.randn(14, 4, 8) for _ in range(3))
    starts = torch.tensor([0, 5, 14])

    def compute(*given: Tensor) -> Any:
        return varlen_attention(
            *given, starts, starts, 9, 9, score_mod=lambda s, b, h, q, kv: torch.polygamma(1, s.abs() + 1)
        )

    kernel_calls._warned.clear()
    with pytest.raises(Exception, match="must stay out of the graphs"):
        torch.compile(compute, backend="eager", fullgraph=True)(query, key, value)
    with pytest.warns(UserWarning, match="it uses aten.polygamma"):
        assert compute(query, key, value).isfinite().all()
