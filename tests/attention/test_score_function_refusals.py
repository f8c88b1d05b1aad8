"""Functions of scores and maps of blocks that operators refuse, and files that are no libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_functions import load
from function_cases import SCALE, Call
from torch import Tensor

from selfattn_ext import ops
from selfattn_ext.build import library


def refusal(
    match: str, error: type[Exception] = ValueError, call: Call | None = None, **changed: Any
) -> None:
    call = Call("Bias", (5, 9)) if call is None else call
    arguments = {**call.arguments(), **changed}
    with pytest.raises(error, match=match):
        ops.attention_forward(*call.tensors(), SCALE, **arguments)


def test_refusals() -> None:
    refusal("has not been loaded", score_function="nobody")
    refusal("has not been loaded", score_function="a name of more than the 31 characters that there may be")
    refusal(
        "scores of 4 bytes",
        call=Call("Bias", (5, 9), torch.float64),
        score_function=load("Bias", torch.float32),
    )
    refusal(r"float32\[2\]\) and 1", captured=[])
    refusal(r"captured are \(float32\[1\]\)", captured=[torch.zeros(4)])
    refusal(r"captured are \(int64\[2\]\)", captured=[torch.zeros(4, 4, dtype=torch.int64)])
    refusal("and 0 numbers", captured_numbers=None)
    # The places of this tensor's elements exceed the 32 bits that the function is compiled for.
    refusal(r"captured are \(float32\[2\]\(wide\)\)", captured=[torch.zeros(2, 1).expand(2, 2**30)])
    call, many = Call("Bias", (5, 9)), 2**30 + 1
    query, key, value = (tensor[:1, :, :1] for tensor in call.tensors())
    for name, (batch, keys) in {"keys": (1, many), "batch": (many, 9)}.items():
        given = [x.expand(batch, -1, keys if x is not query else -1, -1) for x in (query, key, value)]
        with pytest.raises(ValueError, match=f"at most 2\\*\\*30 .*, but {name} is {many}"):
            ops.attention_forward(*given, SCALE, **call.arguments())
    refusal("without score_function", score_function="")
    refusal("without score_function", score_function="", captured=None)
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    refusal("without block_map", block_size=(4, 4))
    refusal("block_size must be given", block_map=blocks)
    refusal("two positive numbers", block_map=blocks, block_size=(0, 4))
    refusal("must be uint8", block_map=blocks.bool(), block_size=(4, 4))
    refusal("4 dimensions", block_map=blocks[0], block_size=(4, 4))
    refusal("1 or 2, 1 or 4", block_map=blocks.expand(3, 1, 2, 2), block_size=(4, 4))
    refusal("stride 1", block_map=torch.ones(1, 1, 2, 4, dtype=torch.uint8)[..., ::2], block_size=(4, 4))


def test_reading_beside_a_tensor_is_an_error(isa: str) -> None:
    short = Call("Bias", (5, 9))
    refusal("captured tensor", IndexError, captured=[short.captured()[0][:-2]])
    # It is no error if no query sees the score.
    shown = torch.tensor([[2, 0]], dtype=torch.uint8).reshape(1, 1, 1, 2)
    arguments = {**short.arguments(), "captured": [short.captured()[0][:-2]]}
    ops.attention_forward(*short.tensors(), SCALE, block_map=shown, block_size=(8, 4), **arguments)


def test_refusals_of_gradients() -> None:
    call = Call("Square", (5, 9))
    out, row_max, row_sum, _ = ops.attention_forward(*call.tensors(), SCALE, **call.arguments())

    def gradients(sizes: list[int], **changed: Any) -> Tensor:
        passed = (out, *call.tensors(), out, row_max, row_sum, SCALE)
        options = {**call.arguments(), **changed}
        return ops.attention_captured_gradients(*passed, captured_sizes=sizes, **options)

    assert gradients([9, 2]).shape == (11,)
    assert gradients([0, 0]).shape == (0,)
    for sizes, match in (([9], "2 numbers"), ([8, 2], "tensor 0 with 9 elements"), ([9, -1], "tensor 1")):
        with pytest.raises(ValueError, match=match):
            gradients(sizes)
    with pytest.raises(ValueError, match="exclusive"):
        gradients([9, 2], exclusive=8)


def test_libraries_that_are_none(tmp_path: Any) -> None:
    load_score_function = library.extension().load_score_function
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_score_function("text", str(text))
    with pytest.raises(ValueError, match="has no table"):
        load_score_function("other", str(library.extension().__file__))
    for name in ("", "x" * 32):
        with pytest.raises(ValueError, match="1 to 31 characters"):
            load_score_function(name, str(text))
    # A name that is already loaded is not loaded again.
    load_score_function(load("Bias", torch.float32), str(text))


def test_kernels_without_functions_refuse_them() -> None:
    call = Call("Bias", (5, 9))
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    refusal("does not apply score_function", call=call, kernel_name="loops")
    refusal(
        "does not apply block_map",
        call=Call(None, (5, 9)),
        kernel_name="loops",
        block_map=blocks,
        block_size=(4, 4),
    )
