"""torch's fused operators on CUDA by this package's kernels: their results, and their backward.

They compute on whatever device their tensors are on, so the CPU says whether the numbers are right, and
torch's fake kernels say whether shapes, strides and dtypes are.
"""

from __future__ import annotations

import inspect
from typing import Any

import gpu
import pytest
import torch
import torch.nn.functional as F
from cases import drawn
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext.integrations import aten_cuda

NAMES = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


FAMILIES = tuple(NAMES)
#: Each family without and with a bias; flash has no bias.
BIASED = [
    (family, biased) for family in FAMILIES for biased in (False, True) if not (biased and family == "flash")
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return drawn(shape, torch.Generator().manual_seed(seed)).bfloat16().to(gpu.DEVICE)


def inputs(order: tuple[int, ...] = (0, 2, 1, 3), length: int = 9, keys: int = 9) -> list[Tensor]:
    shapes = ((2, 4, length, 16), (2, 4, keys, 16), (2, 4, keys, 16))
    inverse = tuple(order.index(dim) for dim in range(4))
    return [
        normal(*shape, seed=seed).permute(order).contiguous().permute(inverse)
        for seed, shape in enumerate(shapes)
    ]


def call(family: str, tensors: list[Tensor], bias: Tensor | None, causal: bool, torchs: bool) -> list[Any]:
    """All results of forward and backward, from this package or from torch's fake kernels."""
    forward, backward = (
        getattr(torch.ops.aten, name) if torchs else aten_cuda.OPERATORS[name]
        for name in (NAMES[family], f"{NAMES[family]}_backward")
    )
    options = {"scale": 0.3}
    if family == "flash":
        results = forward(*tensors, 0.0, causal, **options)
        out, lse, *ends, state, unused, _ = results
        grads = backward(_grad(out), *tensors, out, lse, *ends, 0.0, causal, state, unused, **options)
    elif family == "efficient":
        results = forward(*tensors, bias, True, 0.0, causal, **options)
        wanted = [True, True, True, bias is not None]
        grads = backward(_grad(results[0]), *tensors, bias, *results, 0.0, wanted, causal, **options)
    else:
        results = forward(*tensors, bias, True, 0.0, causal, **options)
        out, lse, *ends, state, unused, _ = results
        grads = backward(_grad(out), *tensors, out, lse, state, unused, bias, *ends, 0.0, causal, **options)
    return [*results, *grads]


def _grad(out: Tensor) -> Tensor:
    return normal(*out.shape, seed=9).to(out.device)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize(("family", "biased"), BIASED)
def test_what_they_return_is_what_compiled_code_expects(
    family: str, biased: bool, order: tuple[int, ...]
) -> None:
    tensors = inputs(order, keys=13)
    bias = normal(2, 1, 9, 13, seed=5).expand(2, 4, 9, 13) if biased else None
    ours = call(family, tensors, bias, False, False)
    meta = [tensor.to("meta") for tensor in tensors]
    promised = call(family, meta, None if bias is None else bias.to("meta"), False, True)
    for position, (result, wanted) in enumerate(zip(ours, promised, strict=True)):
        assert type(result) is type(wanted), position
        if isinstance(wanted, Tensor):
            assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype), position
            assert result.stride() == wanted.stride(), position
        else:
            assert result == wanted, position


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("family", "biased"), BIASED)
def test_results_and_gradients(family: str, biased: bool, causal: bool) -> None:
    tensors = inputs(keys=13)
    bias = normal(2, 1, 9, 13, seed=5).expand(2, 4, 9, 13) if biased else None
    results = call(family, tensors, bias, causal, False)
    count = 4 if family == "efficient" else 9
    names = ["query", "key", "value", "bias"][: len(results) - count]
    ours = {"out": results[0], **dict(zip(names, results[count:], strict=True))}

    # flash aligns the diagonal with the last query and key.
    seen = torch.ones(9, 13, dtype=torch.bool).tril(4 if family == "flash" else 0)
    mask = torch.zeros(9, 13).masked_fill(~seen, -torch.inf) if causal else torch.zeros(9, 13)

    def formula(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [
            tensor.to(dtype).detach().requires_grad_() for tensor in (*tensors, *([bias] if biased else []))
        ]
        whole = mask.to(dtype) + (leaves[3] if biased else 0)
        out = _attention(leaves[0], leaves[1], leaves[2], whole)
        grads = torch.autograd.grad(out, leaves, _grad(out).to(dtype))
        return {"out": out.detach(), **dict(zip(("query", "key", "value", "bias"), grads, strict=False))}

    exact, peer = formula(torch.float64), formula(torch.bfloat16)
    for name, result in ours.items():
        if result is not None:
            assert_accurate(name, result, exact[name], peer[name], 4.0)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(0.3 * query @ key.mT + mask, dim=-1) @ value


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_torchs(family: str) -> None:
    operators = aten_cuda.OPERATORS
    tensors = inputs()
    arguments: tuple[Any, ...] = (0.1,) if family == "flash" else (None, True, 0.1)
    with pytest.raises(ValueError, match="dropout"):
        operators[NAMES[family]](*tensors, *arguments)


def test_the_forward_alone_needs_no_statistics() -> None:
    out, lse, *_ = aten_cuda.efficient(*inputs(), None, False)
    assert out.shape == (2, 4, 9, 16)
    assert lse.shape == (2, 4, 0)


def test_every_operator_has_the_arguments_of_torchs() -> None:
    for name, function in aten_cuda.OPERATORS.items():
        schema = getattr(torch.ops.aten, name).default._schema
        ours = inspect.signature(function).parameters.values()
        assert len(ours) == len(schema.arguments), name
        for mine, argument in zip(ours, schema.arguments, strict=True):
            assert (mine.kind is mine.KEYWORD_ONLY) == argument.kwarg_only, (name, argument.name)
            assert (mine.default is not mine.empty) == argument.has_default_value(), (name, argument.name)
            if argument.has_default_value():
                assert mine.default == argument.default_value, (name, argument.name)
