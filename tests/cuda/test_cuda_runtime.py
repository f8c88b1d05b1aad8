"""What CUDA programs rely on besides numbers: streams, graphs, current device, no hidden waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import attention_scores, masked_softmax, reference, scaled_dot_product_attention

gpu.need()

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "plain": scaled_dot_product_attention,
    "causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, q[:1, :1, :, :1] > 0),
    "weights": lambda q, k, v: scaled_dot_product_attention(q, k, v, return_weights=True)[1],
    # There are so many keys that they are split.
    "one query": lambda q, k, v: scaled_dot_product_attention(
        q[:, :, :1], k.repeat(1, 1, 5, 1), v.repeat(1, 1, 5, 1)
    ),
    "scores": lambda q, k, v: attention_scores(q, k),
    "softmax": lambda q, k, v: masked_softmax(q @ k.mT, is_causal=True),
}

calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def qkv(dtype: torch.dtype, length: int = 300) -> list[Tensor]:
    """Inputs of several tiles. No test depends on their size: torch.cuda._sleep keeps the GPU busy where a
    test needs that.
    """
    return [torch.randn(2, 4, length, 64, device="cuda").to(dtype) for _ in range(3)]


@calls
@dtypes
def test_kernels_run_on_the_current_stream(
    call: Callable[..., Tensor], dtype: torch.dtype, cuda_kernel: str
) -> None:
    """Stream order alone makes the call wait for inputs that another stream is still writing."""
    tensors = qkv(dtype)
    expected = call(*tensors)
    with gpu.written_late(tensors) as late:
        found = call(*late)
    assert torch.equal(found, expected)


@calls
@dtypes
def test_calls_return_before_the_gpu_is_done(
    call: Callable[..., Tensor], dtype: torch.dtype, cuda_kernel: str
) -> None:
    tensors = qkv(dtype)
    assert not gpu.waits(lambda: call(*tensors))


@calls
@dtypes
def test_graphs_replay_with_new_inputs(
    call: Callable[..., Tensor], dtype: torch.dtype, cuda_kernel: str
) -> None:
    tensors, others = qkv(dtype), qkv(dtype)
    graph, found = gpu.captured(lambda: call(*tensors))
    for values in (others, qkv(dtype)):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(found, call(*values))


def test_dropout_in_a_graph_draws_anew(cuda_kernel: str) -> None:
    query, key, value = qkv(torch.bfloat16, 200)

    def call() -> Tensor:
        return scaled_dot_product_attention(query, key, value, dropout_p=0.5, return_weights=True)[1]

    graph, weights = gpu.captured(call)
    patterns = []
    for _ in range(3):
        graph.replay()
        patterns.append(weights != 0)
    assert not torch.equal(patterns[0], patterns[1])
    assert not torch.equal(patterns[1], patterns[2])
    assert 0.45 < float(patterns[0].float().mean()) < 0.55


def test_current_device_is_restored_and_need_not_be_that_of_the_tensors() -> None:
    last = torch.cuda.device_count() - 1
    tensors = query, key, value = [torch.randn(1, 2, 70, 64, device=f"cuda:{last}") for _ in range(3)]
    before = torch.cuda.current_device()
    with torch.cuda.device(0):
        out = scaled_dot_product_attention(query, key, value)
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == before
    assert out.device == query.device
    exact = reference.attention(*(tensor.double() for tensor in tensors)).out
    assert_accurate("out", out, exact, reference.attention(*tensors).out)


def test_tensors_of_two_devices_are_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    query, key = torch.randn(1, 2, 7, 8, device="cuda:0"), torch.randn(1, 2, 7, 8, device="cuda:1")
    with pytest.raises(ValueError, match="key is on cuda:1"):
        scaled_dot_product_attention(query, key, key)


def test_a_failing_call_leaves_the_next_ones_alone() -> None:
    query, key, value = qkv(torch.bfloat16, 100)
    expected = scaled_dot_product_attention(query, key, value)
    with pytest.raises(ValueError, match="softcap"):
        scaled_dot_product_attention(query, key, value, softcap=-1.0)
    assert torch.equal(scaled_dot_product_attention(query, key, value), expected)
    torch.cuda.synchronize()


def test_memory_is_given_back(cuda_kernel: str) -> None:
    query, key, value = qkv(torch.bfloat16, 300)
    scaled_dot_product_attention(query[:, :, :1], key, value)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for length in (1, 300):
        scaled_dot_product_attention(query[:, :, :length], key, value, return_weights=True, return_lse=True)
    assert torch.cuda.memory_allocated() == before


def test_compiled_calls(cuda_kernel: str) -> None:
    tensors = qkv(torch.bfloat16, 200)
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), scaled_dot_product_attention(*tensors))
    torch._dynamo.reset()
