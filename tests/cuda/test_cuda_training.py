"""Training on the GPU: graphs of whole steps, checkpoints, autocast, streams, memory of the backward.

The tests of gradients' numbers run on every device: see tests/support/gpu.py.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch
from tolerances import assert_accurate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from selfattn_ext import (
    MultiheadAttention,
    MultiHeadSelfAttention,
    SelfAttention,
    attention_scores,
    backends,
    masked_softmax,
    reference,
    scaled_dot_product_attention,
)

gpu.need()

#: Calls of a training step with query, key and value, and with a mask, slopes and sinks that learn, too.
CALLS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, *_: scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, *_: scaled_dot_product_attention(q, k, v, is_causal=True),
    "mask": lambda q, k, v, mask, *_: scaled_dot_product_attention(q, k, v, mask),
    "mask of keys": lambda q, k, v, mask, *_: scaled_dot_product_attention(q, k, v, mask[:, :1]),
    "slopes and sinks": lambda q, k, v, mask, slopes, sinks: scaled_dot_product_attention(
        q, k, v, alibi_slopes=slopes, sinks=sinks, softcap=5.0, window_size=(300, 10)
    ),
    "groups": lambda q, k, v, *_: scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "lse": lambda q, k, v, *_: sum_of(scaled_dot_product_attention(q, k, v, return_lse=True)),
    "weights": lambda q, k, v, *_: sum_of(scaled_dot_product_attention(q, k, v, return_weights=True)),
    "softmax of scores": lambda q, k, v, mask, *_: masked_softmax(
        attention_scores(q, k), mask, is_causal=True
    ),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def sum_of(results: tuple[Tensor, Tensor]) -> Tensor:
    out, other = results
    return out + other.view(*out.shape[:3], -1).float().square().sum(-1, keepdim=True).to(out.dtype)


def leaves(dtype: torch.dtype, length: int = 300) -> list[Tensor]:
    """Query, key, value, mask, slopes and sinks."""
    shapes = [(2, 4, length, 64)] * 3 + [(4, length, length), (4,), (4,)]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    return [tensor.to(dtype if index < 4 else torch.float32) for index, tensor in enumerate(tensors)]


def step_of(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The result and the gradients, without those of tensors that the call does not take."""
    points = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*points)
    cotangent = torch.arange(out.numel(), device=out.device).view(out.shape).sin().to(out.dtype)
    grads = torch.autograd.grad(out, points, cotangent, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@calls
@dtypes
def test_a_graph_of_forward_and_backward_has_the_bits_of_the_calls(
    call: Callable[..., Tensor], dtype: torch.dtype, cuda_kernel: str
) -> None:
    tensors = leaves(dtype)
    graph, found = gpu.captured(lambda: step_of(call, tensors))
    for _ in range(2):
        others = leaves(dtype)
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)
        graph.replay()
        expected = step_of(call, others)
        assert len(found) == len(expected) > 3
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), index


class Model(nn.Module):
    """A layer of attention and a head, as in docs/training.md."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiheadAttention(64, 4, dropout=dropout, batch_first=True, rotary=True)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, is_causal=True, need_weights=False)
        return self.head(mixed)


def test_a_graph_of_a_whole_training_step_learns_as_the_steps_do(cuda_kernel: str) -> None:
    first = Model().cuda()
    # The last batch is the first again, because losses of different noise cannot be compared.
    batches = [torch.randn(4, 100, 64, device="cuda") for _ in range(19)]
    batches.append(batches[0])
    losses: list[list[float]] = []
    for graphed, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.float64)):
        model = copy.deepcopy(first).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, capturable=True)
        x = batches[0].to(dtype, copy=True)

        def step(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, x: Tensor = x
        ) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, result = step, None
        if graphed:
            graph, result = gpu.captured(step)
            run = graph.replay
        else:
            step()  # as a capture does
        losses.append([])
        for batch in batches:
            x.copy_(batch)
            loss = run()
            losses[-1].append(float(loss if result is None else result))
    steps, graph_of_steps, exact = torch.tensor(losses, dtype=torch.float64)
    assert_accurate("losses", graph_of_steps.float(), exact, steps)
    assert losses[1][-1] < losses[1][0]


@dtypes
def test_dropout_in_a_graph_is_the_same_in_forward_and_backward(dtype: torch.dtype, cuda_kernel: str) -> None:
    inputs = query, key, value = leaves(dtype, 200)[:3]
    value.requires_grad_()
    cotangent = torch.randn_like(value)

    def step() -> tuple[Tensor, Tensor]:
        out, weights = scaled_dot_product_attention(query, key, value, dropout_p=0.5, return_weights=True)
        return weights.detach(), torch.autograd.grad(out, value, cotangent)[0]

    graph, (weights, grad) = gpu.captured(step)
    patterns = []
    for _ in range(3):
        graph.replay()
        patterns.append(weights != 0)
        exact, peer = (
            (reference.attention(*tensors).weights * patterns[-1] * 2).mT @ cotangent.to(tensors[0].dtype)
            for tensors in ([tensor.detach().double() for tensor in inputs], inputs)
        )
        assert_accurate("gradient of value", grad, exact, peer.detach())
    assert not torch.equal(patterns[0], patterns[1])
    assert not torch.equal(patterns[1], patterns[2])


@pytest.mark.parametrize("reentrant", [False, True])
@dtypes
def test_checkpoints_compute_the_same_bits(reentrant: bool, dtype: torch.dtype, cuda_kernel: str) -> None:
    """The pattern of dropout is the same, too: torch resets the GPU's generator for the second forward."""
    points = [tensor.requires_grad_() for tensor in leaves(dtype)[:3]]

    def attend(*points: Tensor) -> Tensor:
        # The second forward runs in a thread of torch's, where the fixture's choice does not hold.
        with backends.use(cuda_kernel.partition("-")[2]):
            return scaled_dot_product_attention(*points, is_causal=True, dropout_p=0.3)

    grads = []
    for run in (attend, lambda *points: checkpoint(attend, *points, use_reentrant=reentrant)):
        torch.manual_seed(7)
        for point in points:
            point.grad = None
        run(*points).float().square().sum().backward()
        grads.append([point.grad for point in points])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, cuda_kernel: str) -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    x = torch.randn(4, 100, 64, device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            query, key, value = torch.randn(3, 2, 4, 10, 16, device="cuda")
            assert scaled_dot_product_attention(query, key, value).dtype == dtype
            found = model(x)
            assert found.dtype == dtype
        loss = (found.float() - x.roll(1, dims=1)).square().mean()
        scaler.scale(loss).backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@calls
def test_the_backward_runs_on_the_stream_of_its_forward(
    call: Callable[..., Tensor], cuda_kernel: str
) -> None:
    """Gradients depend on numbers that this stream is still writing; waiting for the stream is enough to read
    them.
    """
    tensors = leaves(torch.bfloat16)
    expected = step_of(call, tensors)
    with gpu.written_late(tensors) as late:
        found = step_of(call, late)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@calls
def test_a_step_returns_before_the_gpu_is_done(call: Callable[..., Tensor], cuda_kernel: str) -> None:
    tensors = leaves(torch.bfloat16)
    assert not gpu.waits(lambda: step_of(call, tensors))


def test_deterministic_algorithms_have_nothing_to_refuse(cuda_kernel: str) -> None:
    tensors = leaves(torch.bfloat16)
    expected = step_of(CALLS["mask of keys"], tensors)
    torch.use_deterministic_algorithms(True)
    try:
        found = step_of(CALLS["mask of keys"], tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_compiled_steps(cuda_kernel: str) -> None:
    tensors = leaves(torch.bfloat16, 200)
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["causal"], backend="aot_eager", fullgraph=True)
    found, expected = step_of(compiled, tensors), step_of(CALLS["causal"], tensors)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    torch._dynamo.reset()


#: Layers with the calls of them; torch's default device stays the CPU throughout.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "SelfAttention": (lambda: SelfAttention(32, 16, 24), lambda layer, x: layer(x)[0]),
    "MultiHeadSelfAttention": (
        lambda: MultiHeadSelfAttention(32, 4),
        lambda layer, x: layer(x, torch.ones(x.shape[1], x.shape[1], device=x.device).tril()),
    ),
    "MultiheadAttention": (
        lambda: MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        lambda layer, x: layer(x, x, x)[0],
    ),
    "rotary, grouped": (
        lambda: MultiheadAttention(
            32, 4, batch_first=True, rotary=True, num_kv_heads=2, window_size=(5, 0)
        ).double(),
        lambda layer, x: layer(x.double(), x.double(), x.double(), is_causal=True, need_weights=False)[0],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_on_either_device_alike(name: str, cuda_kernel: str) -> None:
    make, apply = LAYERS[name]
    layer, x = make(), torch.randn(2, 20, 32)
    twin, exact = copy.deepcopy(layer).cuda(), copy.deepcopy(layer).double()
    with backends.use(""):  # the CPU has none of the GPU's kernels
        apply(layer, x).double().square().sum().backward()
        apply(exact, x.double()).square().sum().backward()
    apply(twin, x.cuda()).double().square().sum().backward()
    for (parameter_name, ours), theirs, judge in zip(
        layer.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        assert ours.grad is not None, parameter_name
        assert_accurate(parameter_name, theirs.grad.cpu(), judge.grad, ours.grad)


@pytest.mark.parametrize("option", ["plain", "mask of keys", "mask of rows", "slopes and sinks", "dropout"])
@dtypes
def test_memory_of_the_backward_does_not_grow_with_the_square_of_the_length(
    option: str, dtype: torch.dtype, cuda_kernel: str
) -> None:
    extra = []
    for length in (2048, 8192):
        tensors = [torch.randn(1, 2, length, 64, device="cuda").to(dtype) for _ in range(3)]
        options: dict[str, Any] = {}
        if option.startswith("mask"):
            shape = (1, length) if option == "mask of keys" else (length, 1)
            options["attn_mask"] = torch.randn(shape, device="cuda", requires_grad=True)
        elif option == "dropout":
            options["dropout_p"] = 0.1
        elif option == "slopes and sinks":
            options |= {
                name: torch.rand(2, device="cuda", requires_grad=True) for name in ("alibi_slopes", "sinks")
            }
        points = [tensor.requires_grad_() for tensor in tensors]
        learned = points + [tensor for tensor in options.values() if isinstance(tensor, Tensor)]
        out = scaled_dot_product_attention(*points, **options)
        backward = functools.partial(torch.autograd.grad, out, learned, torch.randn_like(out))
        extra.append(gpu.peak(backward))
    # Gradients, and some numbers per row and per block, are allowed; a matrix of scores would have grown
    # sixteenfold.
    assert extra[1] <= 4.5 * extra[0]


def test_memory_of_a_mask_gradient_is_that_of_the_gradient(cuda_kernel: str) -> None:
    length = 4096
    points = [torch.randn(4, 8, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.zeros(length, length, device="cuda", requires_grad=True)
    out = scaled_dot_product_attention(*points, mask)
    cotangent = torch.randn_like(out)
    extra = gpu.peak(lambda: torch.autograd.grad(out, mask, cotangent))
    # One matrix of 32 is allowed besides the gradients of query, key and value, which the operator always
    # returns.
    gradients = sum(point.nbytes for point in points)
    assert extra <= 1.25 * mask.nbytes + gradients + 32 * 2**20


def test_memory_is_given_back(cuda_kernel: str) -> None:
    tensors = leaves(torch.bfloat16)
    step_of(CALLS["mask of keys"], tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for call in CALLS.values():
        step_of(call, tensors)
    # autograd's thread of the device may still hold its last results when the caller goes on.
    for _ in range(100):
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.05)
    assert torch.cuda.memory_allocated() == before


def test_gradients_on_a_device_that_is_not_the_current_one() -> None:
    last = torch.cuda.device_count() - 1
    points = [torch.randn(1, 2, 70, 64, device=f"cuda:{last}", requires_grad=True) for _ in range(3)]
    exact = [point.detach().double().requires_grad_() for point in points]
    with torch.cuda.device(0):
        grads = torch.autograd.grad(scaled_dot_product_attention(*points).sin().sum(), points)
        assert torch.cuda.current_device() == 0
    expected = torch.autograd.grad(reference.attention(*exact).out.sin().sum(), exact)
    peers = torch.autograd.grad(reference.attention(*points).out.sin().sum(), points)
    for grad, other, by_formula in zip(grads, expected, peers, strict=True):
        assert grad.device == points[0].device
        assert_accurate("gradient", grad, other, by_formula)


@pytest.mark.parametrize("option", ["plain", "causal"])
def test_a_graph_of_a_gradient_penalty(option: str, cuda_kernel: str) -> None:
    """Second derivatives: the formula looks at no values while a graph records."""
    points = [torch.randn(1, 2, 20, 16, device="cuda", requires_grad=True) for _ in range(3)]

    def penalty_of(points: list[Tensor]) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(*points, is_causal=option == "causal")
        grads = torch.autograd.grad(out.square().sum(), points, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), points)

    def penalty() -> tuple[Tensor, ...]:
        return penalty_of(points)

    graph, found = gpu.captured(penalty)
    with torch.no_grad():
        for point in points:
            point.normal_()
    graph.replay()
    exact = penalty_of([point.detach().double().requires_grad_() for point in points])
    for ours, theirs, judge in zip(found, penalty(), exact, strict=True):
        assert_accurate("second derivative", ours, judge, theirs)
