"""Packed sequences without options: the short way for CPU tensors, compared with the general way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_cases import ARGUMENTS, index, starts

from selfattn_ext import ops, varlen_attention

pytestmark = pytest.mark.cpu_only


class Names(TorchDispatchMode):
    """Notes the names of our operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == ops.NAMESPACE:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def rows(lengths: tuple[int, ...], heads: int, width: int, dtype: torch.dtype, more: int = 0) -> Tensor:
    """Returns rows whose strides are those of one of three tensors in one."""
    return torch.randn(sum(lengths) + more, 3, heads, width).to(dtype).unbind(1)[1].requires_grad_()


LENGTHS = (((1,) * 8, (1,) * 8), ((2, 0, 2), (1, 2, 0)), ((1, 5, 17), (3, 0, 9)), ((), ()))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_short_way_gives_the_bits_of_the_general_way(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for number, (queries, keys) in enumerate(LENGTHS):
        more, kv_heads = number % 2 * 2, heads[1]
        tensors = [
            rows(queries, heads[0], 8, dtype, more),
            rows(keys, kv_heads, 8, dtype, more),
            rows(keys, kv_heads, 5, dtype, more),
        ]
        offsets = [starts(lengths, torch.int32 if number % 2 else torch.int64) for lengths in (queries, keys)]
        longest = (max(queries, default=0), max(keys, default=0) + 1)
        for is_causal, scale in ((False, None), (True, None), (True, 0.3)):
            rest = (None, 0.0, is_causal, scale, heads[0] != kv_heads)
            results = []
            for general in (False, True):
                out = varlen_attention(*tensors, *offsets, *longest, *rest, return_lse=general)
                out = out[0] if general else out
                results.append((out, *torch.autograd.grad(out.cos().sum(), tensors)))
            with torch.no_grad():
                alone = varlen_attention(*tensors, *offsets, *longest, *rest)
            assert torch.equal(alone, results[0][0])
            for short, general_one in zip(*results, strict=True):
                assert torch.equal(short, general_one)
                assert short.stride() == general_one.stride()


def test_plain_calls_take_the_short_way() -> None:
    tensors = [ARGUMENTS[name].clone().requires_grad_() for name in ("query", "key", "value")]
    packing = list(ARGUMENTS.values())[3:]
    with Names() as noted:
        out = varlen_attention(*tensors, *packing)
        torch.autograd.grad(out.sum(), tensors)
        with torch.no_grad():
            varlen_attention(*tensors, *packing, is_causal=True, scale=0.5)
            varlen_attention(*tensors, *packing, softcap=2.0)
    assert noted.names == [
        "packed_attention_forward", "packed_attention_backward", "packed_attention", "attention_forward",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_strided_offsets_may_be_overwritten_before_the_backward(dtype: torch.dtype) -> None:
    query = torch.randn(9, 2, 8, requires_grad=True)
    expected = varlen_attention(query, query, query, starts((4, 5)), starts((4, 5)), 5, 5)
    wide = torch.stack([starts((4, 5)), starts((4, 5)) + 77], dim=1).to(dtype)
    out = varlen_attention(query, query, query, wide[:, 0], wide[:, 0], 5, 5)
    wide.zero_()
    gradients = [torch.autograd.grad(one.square().sum(), query)[0] for one in (out, expected)]
    assert torch.equal(out, expected)
    assert torch.equal(*gradients)


def test_gradients_of_gradients() -> None:
    offsets, tensors = starts((2, 1)), [rows((2, 1), heads, 3, torch.float64) for heads in (2, 1, 1)]

    def call(*given: Tensor) -> Tensor:
        return varlen_attention(*given, offsets, offsets, 2, 2, is_causal=True)

    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_saved_tensor_that_has_changed_is_explained() -> None:
    query = torch.randn(3, 2, 8, requires_grad=True)
    out = varlen_attention(query, query, query, starts((1, 2)), starts((1, 2)), 2, 2)
    out.add_(1)
    with pytest.raises(RuntimeError, match="change a copy"):
        out.sum().backward()


def test_the_operators_refuse_offsets_themselves() -> None:
    query = torch.randn(5, 2, 8)
    good = index(0, 2, 5)
    for bad in (
        index(1, 2, 5),
        index(0, 6, 5),
        index(0, 2, 6),
        index(0, 5),
        index(),
        good[None],
        good.float(),
    ):
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(ValueError, match="cu_seqlens"):
                ops.packed_attention(query, query, query, *pair, 9, 9, None, False, False)
    with pytest.raises(ValueError, match="longer than the longest"):
        ops.packed_attention(query, query, query, good, good, 3, 2, None, False, False)
    out, statistics, _, offsets = ops.packed_attention_forward(
        query, query, query, good, good, 3, 3, None, False, False
    )
    saved = (out, query, query, query, out, statistics, None)
    for wrong in (offsets[0], offsets.int(), offsets + 1, offsets[:1]):
        with pytest.raises(ValueError, match=r"offsets|cu_seqlens"):
            ops.packed_attention_backward(*saved, wrong, 3, 3, None, False)
