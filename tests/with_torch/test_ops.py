"""The operators as torch sees them: schema, fake kernels, strides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import LAYOUTS, laid_out
from compiled_functions import load
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from selfattn_ext import attention_scores, ops, scaled_dot_product_attention
from selfattn_ext.flex import written
from selfattn_ext.flex.tracing import trace

DTYPES = (torch.float64, torch.bfloat16)
CPU = torch.device("cpu")


def qkv(dtype: torch.dtype, transposed: bool, queries: int = 5) -> tuple[torch.Tensor, ...]:
    tensors = [
        torch.randn(2, heads, length, width).to(dtype)
        for heads, length, width in ((4, queries, 8), (2, 6, 8), (2, 6, 3))
    ]
    return tuple(laid_out(tensor, "transposed" if transposed else "contiguous") for tensor in tensors)


def options(dtype: torch.dtype) -> dict[str, Any]:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "attn_mask": torch.randn(1, 4, 1, 6),
        "alibi_slopes": torch.rand(1, 4, dtype=statistics),
        "sinks": torch.randn(2, 4, dtype=statistics),
        "dropout_seed": torch.tensor([3]),
        "dropout_p": 0.2,
        "is_causal": True,
        "query_offset": 2,
        "softcap": 2.0,
        "float32_precision": "high",
    }


Calls = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


def calls(dtype: torch.dtype, transposed: bool) -> Calls:
    query, key, value = qkv(dtype, transposed)
    scores = torch.randn(2, 4, 5, 6).to(dtype)
    everything = []
    for keywords in ({}, options(dtype)):
        out, row_max, row_sum, residual = ops.attention_forward(
            query, key, value, 0.3, need_residual=True, **keywords
        )
        of_16_bits = {"out_residual": residual} if dtype in ops.SIXTEEN_BITS else {}
        tangents = {"tangent_query": query, "tangent_value": value}
        if keywords:
            names = {"tangent_mask": "attn_mask", "tangent_slopes": "alibi_slopes", "tangent_sinks": "sinks"}
            tangents |= {"tangent_key": key, **{name: keywords[of] for name, of in names.items()}}
        given, saved = (query, key, value, 0.3), (out, query, key, value, out, row_max, row_sum, 0.3)
        of_keys = torch.randn(2, 4, 6, dtype=row_max.dtype)
        of_statistics = {"grad_mean": row_max, "grad_sink": row_sum, "grad_keys": of_keys}
        more = {**keywords, **of_16_bits, "grad_row": row_max, "need_mask_grad": bool(keywords)}
        everything += [
            (ops.attention_jvp, given, {**keywords, **tangents, "need_residual": True}),
            (ops.attention_jvp, given, {**keywords, "tangent_key": key}),
            (ops.attention_backward_backward, saved, {**more, **tangents}),
            (ops.attention_forward, given, keywords),
            (ops.attention_forward, given, {**keywords, "need_residual": True}),
            (ops.attention_statistics, given, {**keywords, "need_residual": True}),
            (ops.attention_weights, (query, key, row_max, row_sum, 0.3), keywords),
            (ops.attention_weight_sums, (query, key, row_max, row_sum, 0.3), keywords),
            (ops.attention_weight_sums, (query, key, row_max, row_sum, 0.3), {"per_key": of_keys}),
            (ops.attention_backward, saved, keywords),
            (ops.attention_backward, saved, {**more, "grad_weights": scores, **of_statistics}),
        ]
    library = getattr(torch.ops, ops.NAMESPACE)
    mask = torch.rand(5, 6) < 0.5
    out, statistics, residual = ops.masked_attention_forward(query, key, value, mask, None, True, True)
    saved = (out, query, key, value, out, statistics)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = [tensor[0, :, :5].transpose(0, 1) for tensor in (query, key, value)]
    longest, packed = (3, 4, None, True), (*rows, starts, starts)
    given, stats, rounding, offsets = ops.packed_attention_forward(*packed, *longest, True)
    same_heads = (query[:, :2], key, value)
    return [
        *cache_calls(dtype, transposed),
        *everything,
        *function_calls(dtype, transposed),
        (library.basic_attention.default, same_heads, {}),
        (library.basic_attention_forward.default, same_heads, {}),
        (library.basic_attention_backward.default, saved, {}),
        (library.causal_attention.default, same_heads, {}),
        (library.causal_attention_forward.default, same_heads, {}),
        (library.causal_attention_backward.default, saved, {}),
        (library.masked_attention.default, (query, key, value, mask, 0.3, False, True), {}),
        (library.masked_attention_forward.default, (query, key, value, None, None, True, True), {}),
        (library.masked_attention_backward.default, (*saved, residual, mask, None, True), {}),
        (library.packed_attention.default, (*packed, *longest, True), {}),
        (library.packed_attention_forward.default, (*packed, *longest, True), {}),
        (
            library.packed_attention_backward.default,
            (given, *rows, given, stats, rounding, offsets, *longest),
            {},
        ),
        (ops.attention_scores, (query, key, 0.3), {}),
        (ops.attention_scores_backward, (scores, query, key, 0.3), {}),
        (ops.masked_softmax, (scores, 0.3), {"mask": torch.rand(1, 1, 5, 6) < 0.5, "is_causal": True}),
        (ops.masked_softmax, (scores, 0.3), {}),
        (ops.masked_softmax_backward, (scores, scores.softmax(-1), 0.3), {}),
    ]


def function_calls(dtype: torch.dtype, transposed: bool) -> Calls:
    """Returns calls with a function of scores and a map of blocks, which only the CPU has."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.device("cpu"):
        query, key, value = qkv(dtype, transposed)
        keywords = {
            "score_function": load("Square", dtype),
            "captured": [torch.rand(6, dtype=statistics), torch.rand(2, dtype=statistics)],
            "block_map": torch.ones(1, 4, 2, 1, dtype=torch.uint8),
            "block_size": [3, 6],
        }
    out, row_max, row_sum, _ = ops.attention_forward(query, key, value, 0.3, **keywords)
    given = (out, query, key, value, out, row_max, row_sum, 0.3)
    return [
        (ops.attention_forward, (*given[1:4], 0.3), keywords),
        (ops.attention_backward, given, keywords),
        (ops.attention_captured_gradients, given, {"captured_sizes": [6, 0], "exclusive": 1, **keywords}),
        (ops.sorted_selection, (torch.tensor([[[[4, -1, 4, 0]]]], device="cpu"), 6), {}),
    ]


def cache_calls(dtype: torch.dtype, transposed: bool) -> Calls:
    """Returns calls of the operators that write: to a cache of 9 rows, and to pages of 3."""
    query, key, value = qkv(dtype, transposed)
    packed = [tensor[:, :, :5].transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value)]
    cache = (torch.randn(2, 2, 9, 8).to(dtype), torch.randn(2, 2, 9, 3).to(dtype))
    pages = (torch.randn(7, 2, 3, 8).to(dtype), torch.randn(7, 2, 3, 3).to(dtype))
    table = torch.tensor([[6, 0, 3], [1, 5, 2]], dtype=torch.int32)
    before, starts = torch.tensor([0, 3]), torch.tensor([0, 4, 10])
    after, offsets = {"seqlens_k": before + 6}, {"query_offsets": before}
    return [
        (ops.append_to_cache, (*cache, key, value, before), {}),
        (ops.append_to_cache, (*pages, key, value, before), {"block_table": table}),
        (ops.append_to_cache, (*cache, *packed[1:], before), {"cu_seqlens": starts}),
        (ops.attention_with_cache, (query, *cache, key, value, 0.3), {**after, **offsets}),
        (ops.statistics_with_cache, (query, *cache, key, value, 0.3), {**after, **offsets}),
        (
            ops.attention_with_cache,
            (packed[0], *pages, *packed[1:], 0.3),
            {
                **offsets,
                "cu_seqlens_q": starts,
                "max_seqlen_q": 6,
                "seqlens_k": before + starts.diff(),
                "block_table": table,
                "is_causal": True,
            },
        ),
    ]


@pytest.mark.parametrize(("dtype", "transposed"), list(itertools.product(DTYPES, [False, True])), ids=str)
def test_opcheck(dtype: torch.dtype, transposed: bool) -> None:
    """opcheck tests the schema, aliasing and mutation, and that fake results have the real metadata."""
    for operator, arguments, keywords in calls(dtype, transposed):
        torch.library.opcheck(operator, arguments, keywords, test_utils=("test_schema", "test_faketensor"))


def test_traced_for_the_compiler_with_dynamic_shapes() -> None:
    """Each operator is traced in one call, that with most options."""
    longest = {}
    for operator, arguments, keywords in calls(torch.float64, False)[:-2]:
        if len(keywords) >= len(longest.get(operator, (arguments, {}))[1]):
            longest[operator] = arguments, keywords
    for operator, (arguments, keywords) in longest.items():
        torch.library.opcheck(operator, arguments, keywords, test_utils="test_aot_dispatch_dynamic")


def test_every_operator_is_checked() -> None:
    checked = {operator.name() for operator, _, _ in [*calls(torch.float64, False), *composed_calls()]}
    registered = torch._C._dispatch_get_all_op_names()
    ours = {name for name in registered if name.startswith(f"{ops.NAMESPACE}::")}
    # attention_refusals is not checked, as it returns a text and never occurs in a graph.
    assert ours - checked == {f"{ops.NAMESPACE}::attention_refusals"}


def composed_calls() -> Calls:
    """Returns calls of the operators of graphs, which are composed of the library's: those with gradients,
    those that refuse gradients, and that of block masks.
    """
    library = getattr(torch.ops, ops.NAMESPACE)
    query, key, value = (tensor.requires_grad_() for tensor in qkv(torch.float64, True))
    given = options(torch.float64)
    for name in ("attn_mask", "alibi_slopes", "sinks"):
        given[name].requires_grad_()
    scores, mask = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(1, 1, 5, 6, requires_grad=True)
    wanted = {"return_weights": True, "return_lse": True}
    # Block masks belong to functions of scores, which are computed on the CPU.
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32, device="cpu")
    indices = torch.tensor([[[[0, 1, 2], [2, 1, 0]]]], dtype=torch.int32, device="cpu")
    with torch.device("cpu"):
        inputs = [tensor.requires_grad_() for tensor in qkv(torch.float64, False)]
        table = torch.randn(13, dtype=torch.float64, requires_grad=True)
    function = trace(lambda s, b, h, q, kv: s * table[q - kv + 6], None, torch.float64, CPU, True)
    read = {
        "score_function": written.write(function),
        "captured": [table],
        "captured_numbers": function.numbers,
    }
    on_cache: dict[Any, Any] = {operator: call for operator, *call in cache_calls(torch.float64, False)}
    cached, step = ({**keywords, **wanted} for keywords in ({}, on_cache[ops.attention_with_cache][1]))
    return [
        (library.flex_attention_with_gradient.default, (*inputs, 0.3), {**read, **wanted}),
        (library.attention_without_gradient.default, (*qkv(torch.float64, True), 0.3), cached),
        (library.append_to_cache_without_gradient.default, *on_cache[ops.append_to_cache]),
        (library.attention_with_cache_without_gradient.default, on_cache[ops.attention_with_cache][0], step),
        (library.attention_with_gradient.default, (query, key, value, 0.3), {}),
        (library.attention_with_gradient.default, (query, key, value, 0.3), {**given, **wanted}),
        (
            library.attention_and_statistics_with_gradient.default,
            (query, key, value, 0.3),
            {**given, "results": ["lse", "entropy", "key_weights"]},
        ),
        (library.capped_attention.default, (query, key, value, mask, 0.3, True, 2.0), {}),
        (library.attention_scores_with_gradient.default, (query, key, 0.3), {}),
        (library.masked_softmax_with_gradient.default, (scores, 0.3), {"mask": mask, "is_causal": True}),
        (library.block_map.default, (counts, indices, None, None), {}),
        (library.block_map.default, (counts, indices, counts, indices), {}),
    ]


def test_opcheck_of_operators_of_graphs() -> None:
    for operator, arguments, keywords in composed_calls():
        torch.library.opcheck(operator, arguments, keywords)


def looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize("layout", [*LAYOUTS, "one head"])
@pytest.mark.parametrize("heads", [1, 4])
def test_fake_results_look_like_real_ones(layout: str, heads: int) -> None:
    """Shapes, strides, dtypes and devices agree for all results and gradients and every input layout."""

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, numbers: Tensor) -> list[Tensor]:
        tensors = (query, key, value)
        if layout == "one head":
            tensors = tuple(tensor[:, :1].expand(tensor.shape) for tensor in tensors)
        else:
            tensors = tuple(laid_out(tensor, layout) for tensor in tensors)
        leaves = [tensor.detach().requires_grad_() for tensor in (*tensors, mask, numbers)]
        plain = scaled_dot_product_attention(*leaves[:3], is_causal=True, enable_gqa=True)
        results = scaled_dot_product_attention(
            *leaves[:4], 0.2, sinks=leaves[4], enable_gqa=True, return_weights=True, return_lse=True
        )
        gradients = torch.autograd.grad(sum(result.float().sum() for result in (plain, *results)), leaves)
        return [plain, *results, *gradients]

    shapes = ((2, heads, 5, 8), (2, 1, 6, 8), (2, 1, 6, 3), (heads, 5, 6), (heads,))
    for dtype in DTYPES:
        real = [torch.randn(shape).to(dtype) for shape in shapes]
        mode = FakeTensorMode()
        with mode:
            shadows = run(*(mode.from_tensor(tensor) for tensor in real))
        for result, shadow in zip(run(*real), shadows, strict=True):
            assert looks(result) == looks(shadow)


@pytest.mark.parametrize("keywords", [{}, {"softcap": 2.0}], ids=["plain", "general"])
def test_operations_are_counted_as_those_of_torch(keywords: dict[str, float]) -> None:
    tensors = [torch.randn(2, 4, *size, requires_grad=True) for size in ((5, 8), (6, 8), (6, 3))]
    shapes = [tensor.shape for tensor in tensors]
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(*tensors, is_causal=True, **keywords).sum().backward()
    expected = sdpa_flop_count(*shapes) + sdpa_backward_flop_count((2, 4, 5, 3), *shapes)
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        attention_scores(*tensors[:2]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 4) * 5 * 6 * 8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (3, 4)], ids=str)
def test_strides_at_sizes_of_one(transposed: bool, shape: tuple[int, int]) -> None:
    """If a dimension has size 1, both orders are possible, and real and fake kernels must take the same."""
    heads, length = shape
    query = (
        torch.randn(2, length, heads, 8).transpose(1, 2) if transposed else torch.randn(2, heads, length, 8)
    )
    key = torch.randn(2, heads, 6, 8)
    real = ops.attention_forward(query, key, key, 1.0)
    mode = FakeTensorMode()
    with mode:
        fake = ops.attention_forward(*(mode.from_tensor(tensor) for tensor in (query, key, key)), 1.0)
    for result, shadow in zip(real, fake, strict=True):
        assert looks(result) == looks(shadow)


#: The sizes of masks (L, S) with more dimensions before these, and without.
MASKS: dict[str, tuple[int, ...] | None] = {
    "no mask": None, "keys": (9,), "scores": (9, 9), "heads": (4, 1, 9), "batch": (2, 1, 1, 9),
}  # fmt: skip


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_basic_operators_give_the_same_bits(
    dtype: torch.dtype, is_causal: bool, shape: tuple[int, ...] | None
) -> None:
    for layout, width in (("contiguous", 8), ("transposed", 8), ("contiguous", 7), ("contiguous", 96)):
        query, key, value = (
            laid_out(torch.randn(2, heads, 9, width).to(dtype), layout) for heads in (4, 2, 2)
        )
        # Rows of one in two, so that a view of the mask must heed its offset and its strides.
        mask = None if shape is None else torch.randn(2, *shape[:-1], 2 * shape[-1])[1, ..., ::2]
        options: dict[str, Any] = {"is_causal": is_causal}
        if mask is not None:
            options["attn_mask"] = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        scale = width**-0.5
        out, row_max, row_sum, rounding = ops.attention_forward(
            query, key, value, scale, need_residual=True, **options
        )
        residual = rounding if dtype in ops.SIXTEEN_BITS else None
        grads = ops.attention_backward(
            out.cos(), query, key, value, out, row_max, row_sum, scale, out_residual=residual, **options
        )
        for given in (scale, None):
            rules = (mask, given, is_causal)
            basic = ops.masked_attention_forward(query, key, value, *rules, True)
            assert torch.equal(basic[0], out)
            assert torch.equal(basic[0], ops.masked_attention(query, key, value, *rules, True))
            assert torch.equal(basic[1], torch.stack([row_max, row_sum]))
            assert basic[2] is None if residual is None else torch.equal(basic[2], residual)
            # The statistics are used as they come, and in another layout.
            for statistics in (basic[1], basic[1].mT.contiguous().mT):
                saved = (query, key, value, out, statistics)
                basic_grads = ops.masked_attention_backward(out.cos(), *saved, basic[2], *rules)
                assert all(torch.equal(*pair) for pair in zip(basic_grads, grads, strict=False))


@pytest.mark.parametrize("kind", ["basic", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_operators_of_tensors_alone_give_the_same_bits(dtype: torch.dtype, kind: str) -> None:
    alone, forward, backward = (
        getattr(ops, f"{kind}_attention{step}") for step in ("", "_forward", "_backward")
    )
    query, key, value, grad = (torch.randn(2, heads, 9, 8).to(dtype) for heads in (4, 1, 1, 4))
    rules = (None, None, kind == "causal")
    out, statistics, residual = forward(query, key, value)
    expected = ops.masked_attention_forward(query, key, value, *rules, False)
    assert torch.equal(out, expected[0])
    assert torch.equal(statistics, expected[1])
    assert torch.equal(out, alone(query, key, value))
    assert (residual is None) == (dtype not in ops.SIXTEEN_BITS)
    saved = (grad, query, key, value, out, statistics)
    assert all(map(torch.equal, backward(*saved), ops.masked_attention_backward(*saved, None, *rules)))


@pytest.mark.parametrize("kind", ["basic", "causal", "masked"])
def test_plain_calls_take_the_basic_operators(kind: str) -> None:
    """Only the basic operators are fast on tiny tensors; calls with other options take the others."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == ops.NAMESPACE:
                names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    tensors = [torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3)]
    mask = torch.rand(5, 5) < 0.7 if kind == "masked" else None
    is_causal = kind == "causal"
    with Recorder():
        for enable_gqa in (False, True):
            out = scaled_dot_product_attention(*tensors, mask, 0.0, is_causal, None, enable_gqa)
            torch.autograd.grad(out.sum(), tensors)
            with torch.no_grad():
                scaled_dot_product_attention(*tensors, mask, 0.0, is_causal, None, enable_gqa)
        with torch.no_grad():
            scaled_dot_product_attention(*tensors, mask, 0.0, is_causal, 0.3)
            scaled_dot_product_attention(*tensors, mask, is_causal=is_causal, softcap=1.0)
    assert names == [
        f"{kind}_attention_forward", f"{kind}_attention_backward", f"{kind}_attention",
        "masked_attention_forward", f"{kind}_attention_backward", "masked_attention",
        "masked_attention", "attention_forward",
    ]  # fmt: skip


def test_results_are_no_views_of_the_inputs() -> None:
    query, key, value = qkv(torch.float64, False)
    out, row_max, row_sum, _ = ops.attention_forward(query, key, value, 1.0)
    grads = ops.attention_backward(out, query, key, value, out, row_max, row_sum, 1.0)
    storages = [
        tensor.untyped_storage().data_ptr()
        for tensor in (query, key, value, out, row_max, row_sum, *grads[:3])
    ]
    assert len(set(storages)) == len(storages)


def test_meta_tensors_get_no_results() -> None:
    query, key, value = (tensor.to("meta") for tensor in qkv(torch.float64, False))
    with pytest.raises(RuntimeError, match="meta"):
        ops.attention_forward(query, key, value, 1.0)
