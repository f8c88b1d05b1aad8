"""Errors for bad input, which name the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_upper_left

from selfattn_ext import (
    attention_scores,
    attention_weights,
    backends,
    masked_softmax,
    ops,
    scaled_dot_product_attention,
)

QUERY, KEY, VALUE = (torch.randn(2, 4, length, 8) for length in (5, 6, 6))
INTEGERS = torch.ones(2, 4, 5, 8, dtype=torch.int64)
SPARSE = torch.eye(8).to_sparse()


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


#: name -> (changed arguments, exception, words in the message).
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "head dims": (
        {"key": KEY[..., :7]},
        ValueError,
        ["query", "key", "head dim", "(2, 4, 5, 8)", "(2, 4, 6, 7)"],
    ),
    "causal": ({"is_causal": torch.ones(4)}, TypeError, ["is_causal", "bool", "(4,)"]),
    "lengths": (
        {"value": VALUE[:, :, :5]},
        ValueError,
        ["key", "value", "length", "(2, 4, 6, 8)", "(2, 4, 5, 8)"],
    ),
    "batches": ({"key": KEY[:1].expand(3, -1, -1, -1)}, ValueError, ["batch", "(3, 4, 6, 8)"]),
    "heads": ({"key": KEY[:, :2], "value": VALUE[:, :2]}, ValueError, ["4", "2", "enable_gqa"]),
    "heads of key and value": ({"key": KEY[:, :2]}, ValueError, ["key has 2", "value 4"]),
    "heads that do not divide": (
        {"key": KEY[:, :3], "value": VALUE[:, :3], "enable_gqa": True},
        ValueError,
        ["divide", "4", "3"],
    ),
    "no kv heads": (
        {"key": KEY[:, :0], "value": VALUE[:, :0], "enable_gqa": True},
        ValueError,
        ["divide", "0"],
    ),
    "one dimension": ({"query": QUERY[0, 0, 0]}, ValueError, ["query", "2 dimensions", "(8,)"]),
    "no dimension": ({"key": torch.tensor(1.0)}, ValueError, ["key", "2 dimensions"]),
    "integers": ({"query": INTEGERS}, TypeError, ["query", "float32", "int64"]),
    "complex": ({"query": QUERY.to(torch.complex64)}, TypeError, ["query", "complex64"]),
    "bool": ({"value": VALUE > 0}, TypeError, ["value", "torch.bool"]),
    "float8": ({"key": KEY.to(torch.float8_e4m3fn)}, TypeError, ["key", "float8"]),
    "mixed dtypes": ({"key": KEY.double()}, TypeError, ["key", "float64", "query", "float32"]),
    "mixed 16-bit": ({"query": QUERY.bfloat16(), "value": VALUE.half()}, TypeError, ["dtype", "bfloat16"]),
    "list": ({"query": [[1.0]]}, TypeError, ["query", "Tensor", "list"]),
    "None": ({"key": None}, TypeError, ["key", "Tensor", "NoneType"]),
    "NumPy": ({"value": VALUE.cpu().numpy()}, TypeError, ["value", "ndarray", "from_numpy"]),
    "meta": (
        {"query": on_meta(QUERY), "key": on_meta(KEY), "value": on_meta(VALUE)},
        ValueError,
        ["query", "meta"],
    ),
    "meta key": ({"key": on_meta(KEY)}, ValueError, ["key", "meta", gpu.DEVICE]),
    "meta value": ({"value": on_meta(VALUE)}, ValueError, ["value", "meta", gpu.DEVICE]),
    "sparse query": ({"query": SPARSE}, TypeError, ["query", "dense", "sparse"]),
    "sparse value": (
        {"query": QUERY[0, 0], "key": KEY[0, 0], "value": torch.eye(6, 8).to_sparse()},
        TypeError,
        ["value", "sparse"],
    ),
    "nested": ({"query": torch.nested.nested_tensor([QUERY[0], QUERY[1]])}, TypeError, ["query", "nested"]),
    "dropout above": ({"dropout_p": 1.5}, ValueError, ["dropout_p", "0 and 1", "1.5"]),
    "dropout below": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1"]),
    "dropout NaN": ({"dropout_p": float("nan")}, ValueError, ["dropout_p", "nan"]),
    "dropout text": ({"dropout_p": "0.1"}, TypeError, ["dropout_p", "'0.1'"]),
    "scale NaN": ({"scale": float("nan")}, ValueError, ["scale", "finite", "nan"]),
    "scale inf": ({"scale": float("inf")}, ValueError, ["scale", "finite", "inf"]),
    "scale beyond float32": ({"scale": -1e39}, ValueError, ["scale", "finite in float32", "-1e+39"]),
    "scale text": ({"scale": "1"}, TypeError, ["scale", "real number"]),
    "scale complex": ({"scale": 1j}, TypeError, ["scale", "real number", "1j"]),
    "scale tensor": ({"scale": torch.ones(2)}, TypeError, ["scale", "(2,)"]),
    "learned scale": (
        {"scale": torch.tensor(1.0, requires_grad=True)},
        ValueError,
        ["scale", "requires_grad"],
    ),
    "window below": ({"window_size": (-2, 0)}, ValueError, ["window_size", "-1", "-2"]),
    "window of one": ({"window_size": 4}, TypeError, ["window_size", "pair", "4"]),
    "window of three": ({"window_size": (1, 2, 3)}, TypeError, ["window_size", "pair"]),
    "window of floats": ({"window_size": (1.5, 2)}, TypeError, ["window_size[0]", "int", "1.5"]),
    "window with a text": ({"window_size": (1, "2")}, TypeError, ["window_size[1]", "int", "'2'"]),
    "window too wide": ({"window_size": [1, 2**70]}, ValueError, ["window_size[1]", str(2**70)]),
    "offset": ({"query_offset": 1.5}, TypeError, ["query_offset", "int", "1.5"]),
    "offset far away": ({"query_offset": 2**62}, ValueError, ["query_offset", str(2**62)]),
    "softcap": ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
    "softcap NaN": ({"softcap": float("nan")}, ValueError, ["softcap", "nan"]),
    "softcap text": ({"softcap": "big"}, TypeError, ["softcap", "big"]),
    "mask shape": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool)},
        ValueError,
        ["attn_mask", "(5, 7)", "(2, 4, 5, 6)"],
    ),
    "mask of keys": (
        {"attn_mask": torch.ones(2, 6, dtype=torch.bool)},
        ValueError,
        ["attn_mask", "(2, 6)", "(2, 4, 5, 6)", "attn_mask[:, None, None, :]"],
    ),
    "mask of keys in three dimensions": (
        {"attn_mask": torch.ones(2, 1, 6)},
        ValueError,
        ["(2, 1, 6)", "attn_mask[:, None, :, :]"],
    ),
    "mask without heads": (
        {"attn_mask": torch.zeros(2, 5, 6)},
        ValueError,
        ["attn_mask", "(2, 5, 6)", "(2, 4, 5, 6)", "attn_mask[:, None, :, :]"],
    ),
    "mask rank": ({"attn_mask": torch.zeros(3, 2, 4, 5, 6)}, ValueError, ["attn_mask", "(3, 2, 4, 5, 6)"]),
    "mask heads": ({"attn_mask": torch.zeros(3, 5, 6)}, ValueError, ["attn_mask", "(3, 5, 6)"]),
    "integer mask": (
        {"attn_mask": torch.ones(5, 6, dtype=torch.int64)},
        TypeError,
        ["attn_mask", "bool", "int64"],
    ),
    "byte mask": (
        {"attn_mask": torch.ones(5, 6, dtype=torch.uint8)},
        TypeError,
        ["attn_mask", "bool", "uint8"],
    ),
    "complex mask": (
        {"attn_mask": torch.zeros(5, 6, dtype=torch.complex64)},
        TypeError,
        ["attn_mask", "complex64"],
    ),
    "mask list": ({"attn_mask": [[True]]}, TypeError, ["attn_mask", "Tensor", "list"]),
    "mask NumPy": ({"attn_mask": np.ones((5, 6), bool)}, TypeError, ["attn_mask", "ndarray", "from_numpy"]),
    "mask meta": (
        {"attn_mask": torch.zeros(5, 6, device="meta")},
        ValueError,
        ["attn_mask", "meta", gpu.DEVICE],
    ),
    "mask sparse": ({"attn_mask": torch.zeros(5, 6).to_sparse()}, TypeError, ["attn_mask", "sparse"]),
    "slopes shape": ({"alibi_slopes": torch.ones(3)}, ValueError, ["alibi_slopes", "(3,)", "(2, 4)"]),
    "slopes dtype": (
        {"alibi_slopes": torch.ones(4, dtype=torch.int32)},
        TypeError,
        ["alibi_slopes", "int32"],
    ),
    "slopes list": ({"alibi_slopes": [0.5] * 4}, TypeError, ["alibi_slopes", "Tensor"]),
    "slopes meta": ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, ["alibi_slopes", "meta"]),
    "sinks shape": ({"sinks": torch.ones(3, 4)}, ValueError, ["sinks", "(3, 4)", "(2, 4)"]),
    "sinks number": ({"sinks": 0.5}, TypeError, ["sinks", "Tensor", "0.5"]),
}


def refused(
    function: Callable[..., Any], arguments: dict[str, Any], exception: type[Exception], words: list[str]
) -> str:
    """Asserts that a call raises an error with these words in its message, which it returns."""
    with pytest.raises(exception) as caught:
        function(**arguments)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_argument(name: str, requires_grad: bool) -> None:
    changed, exception, words = BAD[name]
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **changed}
    if requires_grad and "value" not in changed:
        arguments["value"] = VALUE.clone().requires_grad_()
    copies = {
        key: value.detach().clone()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_nested)
    }
    message = refused(scaled_dot_product_attention, arguments, exception, words)
    assert refused(backends.explain, arguments, exception, words) == message
    assert all(torch.equal(arguments[key], copy) for key, copy in copies.items())
    # The next call is not affected.
    assert scaled_dot_product_attention(QUERY, KEY, VALUE).isfinite().all()


SCORES = torch.randn(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "exception", "words"),
    [
        ({"query": INTEGERS}, TypeError, ["query", "int64"]),
        ({"key": KEY[..., :3]}, ValueError, ["head dim"]),
        ({"key": None}, TypeError, ["key", "NoneType"]),
        ({"key": KEY.double()}, TypeError, ["key", "float64"]),
        ({"key": KEY[:, :2]}, ValueError, ["enable_gqa"]),
        ({"key": KEY[0, 0, 0]}, ValueError, ["key", "2 dimensions"]),
        ({"key": on_meta(KEY)}, ValueError, ["key", "meta"]),
        ({"scores": INTEGERS}, TypeError, ["scores", "int64"]),
        ({"scores": None}, TypeError, ["scores", "NoneType"]),
        ({"scores": torch.ones(3)}, ValueError, ["scores", "2 dimensions", "(3,)"]),
        ({"scores": torch.ones(2, 3).to_sparse()}, TypeError, ["scores", "sparse"]),
        ({"scores": torch.ones(2, 3, device="meta")}, ValueError, ["scores", "meta"]),
        ({"mask": torch.ones(3, 7)}, ValueError, ["mask", "(3, 7)", "(2, 4, 5, 8)"]),
        ({"mask": torch.ones(5, 8, dtype=torch.int32)}, TypeError, ["mask", "bool", "int32"]),
        ({"mask": "causal"}, TypeError, ["mask", "str"]),
        ({"mask": causal_upper_left(5, 8)}, TypeError, ["CausalBias", "is_causal"]),
        ({"query_offset": 0.5}, TypeError, ["query_offset", "0.5"]),
        ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
        ({"scale": 1e39}, ValueError, ["scale", "finite in float32", "1e+39"]),
    ],
    ids=lambda value: None,
)
def test_bad_argument_of_other_functions(arguments: dict, exception: type, words: list[str]) -> None:
    if not {"query", "key"} & arguments.keys():
        refused(masked_softmax, {"scores": SCORES, **arguments}, exception, words)
    if {"query", "key", "scale"} & arguments.keys():
        for function in (attention_scores, attention_weights):
            refused(function, {"query": QUERY, "key": KEY, **arguments}, exception, words)


def test_causal_bias_of_another_size() -> None:
    bias = causal_upper_left(6, 6)
    with pytest.raises(
        ValueError, match="attn_mask is a CausalBias for 6 queries and 6 keys, but there are 5"
    ):
        scaled_dot_product_attention(QUERY, KEY, VALUE, bias)


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="fast"), backends.use("fast"):
        pass
    with pytest.raises(ValueError, match="sse9"), backends.use_cpu_isa("sse9"):
        pass
    assert scaled_dot_product_attention(QUERY, KEY, VALUE).isfinite().all()


def test_unknown_names_in_the_environment(run_in_forks: Callable[..., list[str]]) -> None:
    script = (
        "os.environ[{!r}] = {!r}\n"
        "import selfattn_ext\n"
        "x = torch.ones(1, 1, 2, 2)\n"
        "try:\n"
        "    selfattn_ext.scaled_dot_product_attention(x, x, x)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    settings = (("SELFATTN_CPU_ISA", "sse9"), ("SELFATTN_KERNEL", "fast"))
    of_isa, of_kernel = run_in_forks("import torch", [script.format(*setting) for setting in settings])
    assert "sse9" in of_isa
    assert "scalar" in of_isa
    assert "fast" in of_kernel
    assert "fused" in of_kernel


# The operators refuse by themselves what the Python functions never pass to them.
F = {"query": QUERY, "key": KEY, "value": VALUE, "scale": 1.0}
OUT, ROW_MAX, ROW_SUM, _ = ops.attention_forward(**F)
B = {"grad_out": OUT, "out": OUT, "row_max": ROW_MAX, "row_sum": ROW_SUM, **F}
P = {**F, "attn_mask": None, "scale": None, "is_causal": False, "enable_gqa": False}
STATISTICS = torch.stack([ROW_MAX, ROW_SUM])
PB = {
    **F, "grad_out": OUT, "out": OUT, "statistics": STATISTICS, "out_residual": None, "attn_mask": None,
    "is_causal": False,
}  # fmt: skip
OPERATOR_CALLS = {
    "rank": (ops.attention_forward, {**F, "query": QUERY[0]}, "query"),
    "dtype": (ops.attention_forward, {**F, "query": INTEGERS}, "query"),
    "mixed dtypes": (ops.attention_forward, {**F, "key": KEY.double()}, "key"),
    "batches": (ops.attention_forward, {**F, "key": KEY[:1]}, "key"),
    "head dims": (ops.attention_forward, {**F, "key": KEY[..., :4]}, "key"),
    "heads": (ops.attention_forward, {**F, "key": KEY[:, :3], "value": VALUE[:, :3]}, "heads"),
    "lengths": (ops.attention_forward, {**F, "value": VALUE[:, :, :2]}, "value"),
    "stride": (ops.attention_forward, {**F, "query": QUERY.mT.contiguous().mT}, "query"),
    "NaN scale": (ops.attention_forward, {**F, "scale": float("nan")}, "scale"),
    "mask shape": (ops.attention_forward, {**F, "attn_mask": torch.ones(2, 4, 5, 7)}, "attn_mask"),
    "mask rank": (ops.attention_forward, {**F, "attn_mask": torch.ones(5, 6)}, "attn_mask"),
    "mask dtype": (
        ops.attention_forward,
        {**F, "attn_mask": torch.ones(1, 1, 5, 6, dtype=torch.int8)},
        "attn_mask",
    ),
    "slopes": (ops.attention_forward, {**F, "alibi_slopes": torch.ones(1, 3)}, "alibi_slopes"),
    "slopes dtype": (ops.attention_forward, {**F, "alibi_slopes": torch.ones(1, 4).double()}, "alibi_slopes"),
    "sinks": (ops.attention_forward, {**F, "sinks": torch.ones(4)}, "sinks"),
    "dropout": (ops.attention_forward, {**F, "dropout_p": 2.0}, "dropout_p"),
    "no seed": (ops.attention_forward, {**F, "dropout_p": 0.5}, "dropout_seed"),
    "seed": (ops.attention_forward, {**F, "dropout_p": 0.5, "dropout_seed": torch.ones(1)}, "dropout_seed"),
    "window": (ops.attention_forward, {**F, "window_left": -2}, "window_left"),
    "offset": (ops.attention_forward, {**F, "query_offset": 2**60}, "query_offset"),
    "softcap": (ops.attention_forward, {**F, "softcap": -1.0}, "softcap"),
    "kernel": (ops.attention_forward, {**F, "kernel_name": "fast"}, "fast"),
    "precision": (ops.attention_forward, {**F, "float32_precision": "low"}, 'float32_precision .* "low"'),
    "grad shape": (ops.attention_backward, {**B, "grad_out": OUT[:, :, :4]}, "grad_out"),
    "grad dtype": (ops.attention_backward, {**B, "grad_out": OUT.double()}, "grad_out"),
    "out shape": (ops.attention_backward, {**B, "out": OUT[..., :4]}, "out"),
    "statistics": (ops.attention_backward, {**B, "row_max": ROW_MAX[:1]}, "row_max"),
    "grad_row": (ops.attention_backward, {**B, "grad_row": ROW_MAX[..., :1]}, "grad_row"),
    "grad_weights": (ops.attention_backward, {**B, "grad_weights": OUT}, "grad_weights"),
    "gradient of no mask": (ops.attention_backward, {**B, "need_mask_grad": True}, "attn_mask"),
    "gradient of a bool mask": (
        ops.attention_backward,
        {**B, "need_mask_grad": True, "attn_mask": torch.ones(1, 1, 5, 6, dtype=torch.bool)},
        "attn_mask",
    ),
    "basic heads": (ops.masked_attention, {**P, "key": KEY[:, :2], "value": VALUE[:, :2]}, "enable_gqa"),
    "basic heads that do not divide": (
        ops.masked_attention,
        {**P, "key": KEY[:, :3], "value": VALUE[:, :3], "enable_gqa": True},
        "heads",
    ),
    "basic rank": (ops.masked_attention_forward, {**P, "query": QUERY[0]}, "query"),
    "basic number": (ops.masked_attention, {**P, "query": torch.tensor(1.0)}, "query"),
    "basic dtype": (ops.masked_attention_forward, {**P, "value": VALUE.double()}, "value"),
    "basic mask shape": (ops.masked_attention, {**P, "attn_mask": torch.ones(5, 7)}, "attn_mask"),
    "basic mask rank": (ops.masked_attention, {**P, "attn_mask": torch.ones(1, 1, 1, 5, 6)}, "attn_mask"),
    "basic mask dtype": (
        ops.masked_attention_forward,
        {**P, "attn_mask": torch.ones(5, 6, dtype=torch.int8)},
        "attn_mask",
    ),
    "basic mask of a gradient": (
        ops.masked_attention_backward,
        {**PB, "attn_mask": torch.ones(2, 6)},
        "attn_mask",
    ),
    "tensors alone, heads": (
        ops.basic_attention,
        {"query": QUERY, "key": KEY[:, :2], "value": VALUE[:, :2]},
        "enable_gqa",
    ),
    "basic NaN scale": (ops.masked_attention_forward, {**P, "scale": float("nan")}, "scale"),
    "basic grad shape": (ops.masked_attention_backward, {**PB, "grad_out": OUT[:, :, :4]}, "grad_out"),
    "basic statistics": (ops.masked_attention_backward, {**PB, "statistics": ROW_MAX}, "statistics"),
    "basic statistics of another dtype": (
        ops.masked_attention_backward,
        {**PB, "statistics": STATISTICS.double()},
        "statistics",
    ),
    "scores": (ops.attention_scores, {"query": QUERY, "key": KEY[:, :3], "scale": 1.0}, "heads"),
    "softmax rank": (ops.masked_softmax, {"scores": torch.ones(3, 4), "scale": 1.0}, "scores"),
    "softmax mask": (
        ops.masked_softmax,
        {"scores": QUERY, "scale": 1.0, "mask": torch.ones(1, 1, 1, 3)},
        "mask",
    ),
    "softmax grad": (
        ops.masked_softmax_backward,
        {"grad_weights": QUERY[:1], "weights": QUERY, "scale": 1.0},
        "grad_weights",
    ),
}


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_operator_refuses(name: str) -> None:
    operator, arguments, word = OPERATOR_CALLS[name]
    with pytest.raises(ValueError, match=word):
        operator(**arguments)
