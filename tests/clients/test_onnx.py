"""torch.onnx.export: ONNX Runtime computes what the kernels compute, and ONNX's Attention where it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, exact_inputs
from onnx.reference import ReferenceEvaluator
from onnx_sessions import Calls, exported, operators, run
from option_pairs import OPTIONS, as_case, covering
from pages import blocks
from tolerances import assert_accurate
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import create_block_mask

import selfattn_ext
from selfattn_ext import (
    attention_scores,
    attention_weights,
    attention_with_kvcache,
    flex_attention,
    masked_softmax,
    scaled_dot_product_attention,
    varlen_attention,
)
from selfattn_ext.arguments import Tensors
from selfattn_ext.autograd import onnx_graphs
from selfattn_ext.integrations.onnx import translations

#: Every pair of options. Memory layouts and long sequences are left out, as only kernels tell them apart, and
#: so are statistics, which are refused.
CASES = [
    as_case(index, row)
    for index, row in enumerate(
        covering(
            OPTIONS
            | {
                "length": [(1, 1), (7, 13), (13, 7), (33, 65)],
                "dims": [(16, 16), (5, 9)],
                "layout": ["contiguous"],
                "mask": [None, "bool", "bool keys", "float", "float square", "float rows", "float32"],
                "window": [(-1, -1), (4, -1), (9, 2)],
                "dropout_p": [0.0],
                "statistics": [False],
            }
        )
    )
]
#: The lowest opset of torch's exporter, and two that have an Attention operator.
OPSETS = (18, 23, 24)


def check(functions: Sequence[Callable[..., Any]], inputs: Sequence[Sequence[Tensor]], **options: Any) -> Any:
    """Exports functions into one graph, and compares its results with those of eager calls."""
    module = Calls(functions)
    with torch.no_grad():
        expected = module([list(tensors) for tensors in inputs])
        program = exported(module, [[list(tensors) for tensors in inputs]], **options)
    results = run(program, [tensor for tensors in inputs for tensor in tensors])
    for result, each in zip(results, expected, strict=True):
        torch.testing.assert_close(result, each, atol=2e-6, rtol=2e-5)
    return operators(program)


def of_case(case: Case, dtypes: dict[str, torch.dtype]) -> Callable[..., tuple[Tensor, ...]]:
    """A case as a function of its tensors, of which NumPy cannot hold those of bfloat16."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = {name: tensor.to(dtypes[name]) for name, tensor in zip(dtypes, tensors, strict=True)}
        return tuple(case.run(given).values())

    return call


def runs_anywhere(case: Case) -> bool:
    """Whether ONNX Runtime has it on the CPU: the formula computes bfloat16 in float32, not so Attention."""
    return case.dtype != torch.bfloat16 or bool(case.sinks or case.weights or case.lse or case.alibi)


def test_every_pair_of_options() -> None:
    cases = [case for case in CASES if runs_anywhere(case)]
    tensors = [{name: it.detach() for name, it in case.inputs().items()} for case in cases]
    functions = [
        of_case(case, {name: it.dtype for name, it in given.items()})
        for case, given in zip(cases, tensors, strict=True)
    ]
    inputs = [
        [it.float() if it.dtype == torch.bfloat16 else it for it in given.values()] for given in tensors
    ]
    program = exported(Calls(functions), [inputs], opset_version=23, custom_translation_table=translations())
    results = iter(run(program, [tensor for given in inputs for tensor in given]))
    for case, given in zip(cases, tensors, strict=True):
        exact, ours = case.formula(exact_inputs(given)), case.run(given)
        for name, expected in exact.items():
            result = next(results)
            dtype = torch.float32 if case.dtype == torch.bfloat16 else ours[name].dtype
            assert result.dtype == dtype, f"{case}: {name}"
            # torch's exporter rounds the scale of float64 to float32.
            dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
            assert_accurate(f"{case}: {name}", result, expected.detach(), ours[name].detach(), dtype=dtype)
    assert next(results, None) is None


Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
ONE_BY_ONE: dict[str, tuple[bool, dict[str, Any]]] = {
    "nothing": (True, {}),
    "scale": (True, {"scale": 0.3}),
    "causal": (True, {"is_causal": True}),
    "offset": (True, {"is_causal": True, "query_offset": 2}),
    "hidden rows": (True, {"is_causal": True, "query_offset": -2}),
    "window": (True, {"window_size": (2, 1)}),
    "bool mask": (True, {"attn_mask": torch.rand(5, 7) < 0.7}),
    "float mask": (True, {"attn_mask": torch.randn(2, 1, 5, 7), "is_causal": True}),
    "ALiBi": (True, {"alibi_slopes": torch.rand(4)}),
    "float64 mask": (False, {"attn_mask": torch.randn(5, 7).double()}),
    "softcap": (True, {"softcap": 2.0, "is_causal": True}),
    "softcap and all": (True, {"softcap": 2.0, "window_size": (2, 1), "alibi_slopes": torch.rand(4)}),
    "sinks": (False, {"sinks": torch.randn(4)}),
    "weights": (False, {"return_weights": True}),
    "lse": (False, {"return_lse": True}),
}


@pytest.mark.parametrize("opset", OPSETS)
def test_the_operator_of_each_option(opset: int) -> None:
    def call(options: dict[str, Any]) -> Callable[..., Any]:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    functions = [call(options) for _, options in ONE_BY_ONE.values()]
    found = check(functions, [[Q, K, V]] * len(functions), opset_version=opset)
    with_operator = sum(has for has, _ in ONE_BY_ONE.values())
    with_softcap = sum(name.startswith("softcap") for name in ONE_BY_ONE)
    assert found["Attention"] == (with_operator - with_softcap if opset >= 23 else 0)
    # Weights times values are a product of matrices, not one of (L, S, Ev) numbers. Equal products are one.
    assert found["MatMul"] >= len(functions) - found["Attention"] > 0
    if opset >= 23:
        table = translations()
        found = check(
            functions, [[Q, K, V]] * len(functions), opset_version=opset, custom_translation_table=table
        )
        assert found["Attention"] == with_operator


def test_a_table_for_an_opset_without_the_operator_is_refused() -> None:
    with torch.no_grad(), pytest.raises(Exception, match=r"ValueError.*: selfattn_ext\.integrations"):
        exported(
            Calls([lambda q, k, v: scaled_dot_product_attention(q, k, v, softcap=2.0, enable_gqa=True)]),
            [[[Q, K, V]]], opset_version=20, custom_translation_table=translations(),
        )  # fmt: skip


def test_bfloat16_in_the_operator() -> None:
    """ONNX's own evaluator computes it, as ONNX Runtime has no bfloat16 on the CPU."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
        seen = torch.arange(5).unsqueeze(-1) > torch.arange(7)
        return scaled_dot_product_attention(*tensors, seen, enable_gqa=True)

    program = exported(Calls([call]), [[[Q, K, V]]], opset_version=23)
    assert operators(program)["Attention"] == 1
    evaluator = ReferenceEvaluator(program.model_proto)
    (result,) = evaluator.run(None, {f"inputs_0_{i}": it.numpy() for i, it in enumerate((Q, K, V))})
    torch.testing.assert_close(torch.from_numpy(result), call(Q, K, V).float(), atol=0.02, rtol=0.02)


BATCH, LENGTH, KEYS = Dim("batch", max=64), Dim("length", max=512), Dim("keys", max=512)


@pytest.mark.parametrize("opset", [20, 23])
def test_one_graph_holds_for_all_shapes(opset: int) -> None:
    class Options(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seen: Tensor) -> Any:
            offset = key.size(2) - query.size(2)
            call = (query, key, value)
            return (
                scaled_dot_product_attention(*call, is_causal=True, enable_gqa=True),
                scaled_dot_product_attention(
                    *call, mask, is_causal=True, enable_gqa=True, query_offset=offset
                ),
                scaled_dot_product_attention(*call, seen, enable_gqa=True, window_size=(9, 0)),
                scaled_dot_product_attention(*call, seen, enable_gqa=True, softcap=3.0, query_offset=offset),
                attention_weights(query, key, mask, enable_gqa=True),
                masked_softmax(attention_scores(query, key, enable_gqa=True), seen, is_causal=True),
            )

    def inputs(batch: int, length: int, keys: int) -> list[Tensor]:
        seen = torch.rand(batch, 1, length, keys) < 0.5
        seen[:, :, 0] = False  # a query that sees no key
        tensors = [torch.randn(batch, 4, length, 8), *torch.randn(2, batch, 2, keys, 8)]
        return [*tensors, torch.randn(length, keys), seen]

    module = Options()
    of_keys = {0: BATCH, 2: KEYS}
    dims = ({0: BATCH, 2: LENGTH}, of_keys, of_keys, {0: LENGTH, 1: KEYS}, {0: BATCH, 2: LENGTH, 3: KEYS})
    program = exported(module, inputs(2, 5, 7), dynamic_shapes=dims, opset_version=opset)
    for shape in ((2, 5, 7), (1, 1, 1), (3, 20, 20), (1, 2, 33), (2, 33, 3)):
        tensors = inputs(*shape)
        expected = module(*tensors)
        assert not expected[2][:, :, 0].any()
        for result, each in zip(run(program, tensors), expected, strict=True):
            torch.testing.assert_close(result, each, atol=2e-6, rtol=2e-5)


def test_steps_on_a_cache() -> None:
    """The graph returns the caches that the step has written."""
    lengths, table = torch.tensor([3, 6]), torch.tensor([[2, 0, 5], [4, 1, 3]])

    def step(**options: Any) -> Callable[..., Any]:
        def call(
            query: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, *more: Tensor
        ) -> Any:
            keys, values = keys.clone(), values.clone()
            names = ("cache_seqlens", "block_table")
            given = dict(zip(names, more, strict=False))
            out = attention_with_kvcache(query, keys, values, key, value, **given, **options)
            return (*(out if isinstance(out, tuple) else (out,)), keys, values)

        return call

    def reads(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return attention_with_kvcache(query, keys, values, cache_seqlens=lengths)

    rows = [torch.randn(2, 4, 2, 8), *torch.randn(2, 2, 2, 12, 8), *torch.randn(2, 2, 2, 2, 8)]
    paged = [rows[0], *torch.randn(2, 6, 2, 4, 8), *rows[3:], lengths, table]
    functions = {
        step(is_causal=True): [*rows, lengths],
        step(window_size=(3, 0), alibi_slopes=torch.rand(4)): [*rows, lengths],
        step(softcap=2.0, sinks=torch.randn(4), return_lse=True): [*rows, lengths],
        step(is_causal=True, score_mod=lambda s, b, h, q, k: s + 0.1 * (q - k)): [*rows, lengths],
        step(is_causal=True, layout="bhld"): paged,
        reads: [*rows[:3], lengths],
    }
    found = check(list(functions), list(functions.values()), opset_version=23)
    assert found["Attention"] == 4


def test_packed_sequences() -> None:
    def call(**options: Any) -> Callable[..., Any]:
        return lambda q, k, v, of_q, of_k: varlen_attention(q, k, v, of_q, of_k, 6, 9, **options)

    starts, starts_k = torch.tensor([0, 4, 4, 10]), torch.tensor([0, 3, 8, 17])
    # The last two rows belong to no sequence.
    tensors = [torch.randn(12, 4, 8), torch.randn(18, 4, 8), torch.randn(18, 4, 8), starts, starts_k]
    functions = [
        call(),
        call(is_causal=True),
        call(window_size=(2, 1), query_offset=torch.tensor([1, 0, 3])),
        call(alibi_slopes=torch.rand(4), query_offset=1),
        call(sinks=torch.randn(4), softcap=2.0, return_lse=True),
    ]
    found = check(functions, [tensors] * len(functions), opset_version=23)
    assert found["Attention"] == 4


def test_functions_of_scores() -> None:
    table = torch.randn(4, 64)

    def relative(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score) + table[head, q_idx - kv_idx + 32]

    def document(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx // 8 == kv_idx // 8)

    blocks = create_block_mask(document, None, None, 24, 24, device="cpu", BLOCK_SIZE=4)
    tensors = list(torch.randn(3, 2, 4, 24, 8))
    functions = [
        lambda q, k, v: flex_attention(q, k, v, relative),
        lambda q, k, v: flex_attention(q, k, v, None, blocks),
        lambda q, k, v: flex_attention(q, k, v, relative, blocks, return_lse=True),
        lambda q, k, v: flex_attention(q, k, v, relative, blocks, softcap=2.0, return_weights=True),
    ]
    found = check(functions, [tensors] * len(functions), opset_version=23)
    assert found["Attention"] == 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = selfattn_ext.SelfAttention(16)
        self.many = selfattn_ext.MultiHeadSelfAttention(16, 4)
        self.drop_in = selfattn_ext.MultiheadAttention(
            16, 4, 0.1, batch_first=True, num_kv_heads=2, rotary=True
        )
        self.torchs = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.many(self.one(x, is_causal=True)[0], is_causal=True)
        x = self.drop_in(x, x, x, is_causal=True, need_weights=False)[0]
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return self.torchs(x) + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("opset", "first_exported"), [(20, False), (23, True)], ids=["module", "exported program"]
)
def test_layers_and_torchs_attention(opset: int, first_exported: bool) -> None:
    module, example = Layers().eval(), torch.randn(2, 5, 16)
    dims = ({0: BATCH, 1: LENGTH},)
    with torch.no_grad(), selfattn_ext.as_sdpa():
        if first_exported:
            source = torch.export.export(module, (example,), dynamic_shapes=dims)
            program = exported(source, (), opset_version=opset)
        else:
            program = exported(module, (example,), dynamic_shapes=dims, opset_version=opset)
        for x in (example, torch.randn(3, 11, 16)):
            torch.testing.assert_close(run(program, [x])[0], module(x), atol=1e-5, rtol=1e-4)
    # The first layer returns its weights.
    assert operators(program)["Attention"] == (4 if opset >= 23 else 0)


def packed(**options: Any) -> Callable[..., Any]:
    starts = torch.tensor([0, 2, 5])

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        rows = (tensor[0].transpose(0, 1)[:5, :2] for tensor in (query, key, value))
        return varlen_attention(*rows, starts, starts, 3, 3, **options)

    return call


REFUSED = {
    "dropout_p": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=True),
    "attn_mask of varlen_attention": packed(attn_mask=torch.ones(3, 3, dtype=torch.bool)),
    "attn_mask as a list": packed(attn_mask=[torch.ones(2, 2), torch.ones(3, 3)]),
    "return_weights of varlen_attention": packed(return_weights=True),
    "score_mod and mask_mod of varlen_attention": packed(score_mod=lambda s, b, h, q, k: s * 2),
    "alibi_slopes of each sequence": packed(alibi_slopes=torch.rand(2, 2)),
    "sinks of each sequence": packed(sinks=torch.rand(2, 2)),
    "seqused_k": packed(seqused_k=torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_named(name: str) -> None:
    with torch.no_grad(), pytest.raises(Exception, match=f"torch.onnx.export cannot export .*{name}"):
        exported(Calls([REFUSED[name]]), [[[Q, K, V]]])


def test_no_option_is_ignored() -> None:
    with pytest.raises(NotImplementedError, match="cannot export sparsity: its graphs have no such option"):
        onnx_graphs.attention(Tensors(Q, K, V), 1.0, {"is_causal": True, "sparsity": 2})


def test_the_example_of_the_page() -> None:
    blocks("docs/onnx.md")[0].run()
