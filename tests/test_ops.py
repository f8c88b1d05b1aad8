"""The operators as torch sees them: schema, fake kernels, strides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from selfattn_ext import ops

DTYPES = (torch.float64, torch.bfloat16)


def qkv(dtype: torch.dtype, transposed: bool, queries: int = 5) -> tuple[torch.Tensor, ...]:
    tensors = [
        torch.randn(2, heads, length, width).to(dtype)
        for heads, length, width in ((4, queries, 8), (2, 6, 8), (2, 6, 3))
    ]
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) if transposed else t for t in tensors)


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


def calls(dtype: torch.dtype, transposed: bool) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    query, key, value = qkv(dtype, transposed)
    scores = torch.randn(2, 4, 5, 6).to(dtype)
    everything = []
    for keywords in ({}, options(dtype)):
        out, row_max, row_sum, residual = ops.attention_forward(
            query, key, value, 0.3, need_residual=True, **keywords
        )
        of_16_bits = {"out_residual": residual} if dtype in ops.SIXTEEN_BITS else {}
        everything += [
            (ops.attention_forward, (query, key, value, 0.3), keywords),
            (ops.attention_forward, (query, key, value, 0.3), {**keywords, "need_residual": True}),
            (ops.attention_weights, (query, key, row_max, row_sum, 0.3), keywords),
            (ops.attention_backward, (out, query, key, value, out, row_max, row_sum, 0.3), keywords),
            (
                ops.attention_backward,
                (out, query, key, value, out, row_max, row_sum, 0.3),
                {
                    **keywords,
                    **of_16_bits,
                    "grad_row": row_max,
                    "grad_weights": scores,
                    "need_mask_grad": bool(keywords),
                },
            ),
        ]
    return [
        *everything,
        (ops.attention_scores, (query, key, 0.3), {}),
        (ops.attention_scores_backward, (scores, query, key, 0.3), {}),
        (ops.masked_softmax, (scores, 0.3), {"mask": torch.rand(1, 1, 5, 6) < 0.5, "is_causal": True}),
        (ops.masked_softmax, (scores, 0.3), {}),
        (ops.masked_softmax_backward, (scores, scores.softmax(-1), 0.3), {}),
    ]


@pytest.mark.parametrize(("dtype", "transposed"), list(itertools.product(DTYPES, [False, True])), ids=str)
def test_opcheck(dtype: torch.dtype, transposed: bool) -> None:
    """Schema, no hidden aliasing or mutation, and fake kernels with the metadata of the real results."""
    for operator, arguments, keywords in calls(dtype, transposed):
        torch.library.opcheck(operator, arguments, keywords, test_utils=("test_schema", "test_faketensor"))


def test_traced_for_the_compiler_with_dynamic_shapes() -> None:
    for operator, arguments, keywords in calls(torch.float64, False)[:-2]:
        torch.library.opcheck(operator, arguments, keywords, test_utils="test_aot_dispatch_dynamic")


def test_every_operator_is_checked() -> None:
    library = getattr(torch.ops, ops.NAMESPACE)
    checked = {operator.overloadpacket.__name__ for operator, _, _ in calls(torch.float64, False)}
    assert checked == {name for name in ops.__all__ if name != "NAMESPACE"}
    assert all(hasattr(library, name) for name in checked)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (3, 4)], ids=str)
def test_strides_at_sizes_of_one(transposed: bool, shape: tuple[int, int]) -> None:
    """Where a dimension has size 1 the two orders meet, and real and fake kernels must take the same."""
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
        assert (result.shape, result.stride(), result.dtype) == (shadow.shape, shadow.stride(), shadow.dtype)


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
