"""torch's own attention on the GPU by this package's kernels: three operators, and the block."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gpu
import pytest
import ran
import torch
import torch.nn.functional as F
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from selfattn_ext import as_sdpa

gpu.need()

FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)

since_ampere = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (8, 0), reason="torch takes its operator since 8.0"
)


def leaves(dtype: torch.dtype, count: int = 3) -> list[Tensor]:
    """Query, key, value and a mask."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(2, 4, 100, 64)] * 3 + [(2, 4, 100, 100)]
    return [
        torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()
        for shape in shapes[:count]
    ]


def step(tensors: list[Tensor], forward: Any, backward: Any, **options: Any) -> list[Tensor]:
    with forward:
        out = F.scaled_dot_product_attention(*tensors, **options)
    cotangent = torch.arange(out.numel(), device="cuda").view(out.shape).sin().to(out.dtype)
    with backward:
        return [out.detach(), *torch.autograd.grad(out, tensors, cotangent)]


def exact(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    precise = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with attention.sdpa_kernel(SDPBackend.MATH):
        return step(precise, nullcontext(), nullcontext(), **options)


@pytest.mark.parametrize(
    ("backend", "dtype", "masked", "causal"),
    [
        pytest.param(FLASH, torch.bfloat16, False, False, marks=since_ampere),
        pytest.param(FLASH, torch.float16, False, True, marks=since_ampere),
        (EFFICIENT, torch.float16, False, True),
        (EFFICIENT, torch.float32, True, False),
        pytest.param(CUDNN, torch.bfloat16, False, True, marks=since_ampere),
    ],
)
def test_each_operator(backend: SDPBackend, dtype: torch.dtype, masked: bool, causal: bool) -> None:
    """The forward or the backward may also be torch's own."""
    tensors = leaves(dtype, 4 if masked else 3)
    judge = exact(tensors, is_causal=causal)
    with attention.sdpa_kernel(backend):
        peer = step(tensors, nullcontext(), nullcontext(), is_causal=causal)
        for forward, backward in ((True, True), (True, False), (False, True)):
            ours = step(tensors, ran.activated(forward), ran.activated(backward), is_causal=causal)
            for index, results in enumerate(zip(ours, judge, peer, strict=True)):
                assert_accurate(f"{index} {forward} {backward}", *results, 16.0)
        with ran.activated():
            counted = ran.ours(lambda: step(tensors, nullcontext(), nullcontext(), is_causal=causal))
        assert counted == (1, 1)
        assert ran.ours(lambda: step(tensors, nullcontext(), nullcontext())) == (0, 0)


def test_block() -> None:
    tensors = leaves(torch.bfloat16, 4)
    judge = exact(tensors)
    peer = step(tensors, nullcontext(), nullcontext())
    ours = step(tensors, as_sdpa(), nullcontext())
    for index, results in enumerate(zip(ours, judge, peer, strict=True)):
        assert_accurate(str(index), *results, 16.0)
    with as_sdpa():
        assert ran.ours(lambda: step(tensors, nullcontext(), nullcontext(), dropout_p=0.1)) == (1, 1)


def test_recomputation_in_the_threads_of_autograd() -> None:
    tensors = leaves(torch.float32)

    def training_step() -> None:
        out = checkpoint(F.scaled_dot_product_attention, *tensors, None, 0.1, use_reentrant=False)
        out.sum().backward()

    with as_sdpa():
        assert ran.ours(training_step) == (2, 1)


@pytest.mark.parametrize("switch", [pytest.param(ran.activated, marks=since_ampere), as_sdpa])
def test_transformer_encoder(switch: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(128, 2, 128, dropout=0.0, batch_first=True, device="cuda")
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).bfloat16()
    tokens = torch.randn(2, 50, 128, device="cuda", dtype=torch.bfloat16)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training), switch():
            assert ran.ours(lambda: model(tokens))[0] == 2


@pytest.mark.parametrize("switch", [pytest.param(ran.activated, marks=since_ampere), as_sdpa])
def test_compiled(switch: Any) -> None:
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    tensors = leaves(torch.bfloat16)
    with switch():
        compiled(*tensors).sum().backward()
        assert ran.ours(lambda: compiled(*tensors).sum().backward()) == (1, 1)
    assert ran.ours(lambda: compiled(*tensors).sum().backward()) == (0, 0)
