"""Attention under torch's Inductor: every option, training, and a package for C++."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import selfattn_ext
from selfattn_ext import scaled_dot_product_attention

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def test_every_option_for_shapes_that_change() -> None:
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        offset = key.size(2) - query.size(2)
        plain = scaled_dot_product_attention(
            query * 2.0, key, value, is_causal=True, enable_gqa=True, query_offset=offset
        )
        results = scaled_dot_product_attention(
            query, key, value, mask, 0.3, True, 0.4, True, window_size=(9, 0), softcap=3.0, sinks=sinks,
            alibi_slopes=slopes, query_offset=offset, return_weights=True, return_lse=True,
        )  # fmt: skip
        # The offset shows each row a key on the diagonal, because a row without keys has an infinite lse.
        return sum(result.sin().sum() for result in (plain, *results))

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch, length, keys in ((2, 5, 7), (3, 16, 16), (4, 9, 40)):
        tensors = [torch.randn(batch, 4, length, 8), *(torch.randn(batch, 2, keys, 8) for _ in range(2))]
        tensors = [tensor.requires_grad_() for tensor in tensors]
        leaves = [*tensors, torch.randn(length, keys, requires_grad=True), sinks, slopes]
        outcomes = []
        for function in (step, compiled):
            # Inductor draws random numbers of its own, the seed of dropout too, unless told to use torch's.
            with torch._inductor.config.patch(fallback_random=True):
                torch.manual_seed(3)
                total = function(*leaves[:4])
                outcomes.append([total.detach(), *torch.autograd.grad(total, leaves)])
        torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("mode", ["gradient penalty", "gradient penalty of torch.func", "jvp"])
def test_training_steps_with_derivatives(mode: str) -> None:
    """Each step is one graph, although its loss contains derivatives of attention."""
    shapes = ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    tangent = torch.randn(shapes[0], dtype=torch.float64)

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def loss(query: torch.Tensor) -> torch.Tensor:
            out = scaled_dot_product_attention(query * 2.0, key, value, enable_gqa=True, is_causal=True)
            return out.sin().sum()

        if mode == "jvp":
            total, moved = torch.func.jvp(loss, (query,), (tangent,))
            return total + moved.square()
        total = loss(query)
        if mode == "gradient penalty":
            (force,) = torch.autograd.grad(total, query, create_graph=True)
        else:
            force = torch.func.grad(loss)(query)
        return total + force.square().sum()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        result = torch.compile(step, fullgraph=True)(*tensors)
    expected = step(*tensors)
    torch.testing.assert_close(result, expected)
    grads = (torch.autograd.grad(total, tensors) for total in (result, expected))
    torch.testing.assert_close(*grads)


def heads_apart(x: torch.Tensor) -> torch.Tensor:
    """Views a model's (B, L, H·D) as (B, H, L, D), without a copy."""
    return x.unflatten(-1, (4, 16)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    """Only the code around attention differs from eager's bits: see docs/compile-and-export.md."""

    def train(*rows: torch.Tensor) -> torch.Tensor:
        query, key, value = map(heads_apart, rows)
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)

    rows = [torch.randn(2, 19, 64).to(dtype).requires_grad_() for _ in range(3)]
    cotangent = torch.randn(2, 19, 64).to(dtype)
    outcomes = []
    for function in (train, torch.compile(train, fullgraph=True)):
        out = function(*rows)
        outcomes.append([out, *torch.autograd.grad(out, rows, cotangent)])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_of_a_decoder_has_the_bits_of_eager(queries: int) -> None:
    def step(keys: torch.Tensor, values: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = map(heads_apart, rows)
        return selfattn_ext.attention_with_kvcache(
            query, keys, values, key, value, cache_seqlens=lengths, is_causal=True, return_lse=True
        )

    lengths = torch.tensor([70, 90])
    caches = [torch.randn(2, 4, 100, 16).to(torch.bfloat16) for _ in range(2)]
    rows = [torch.randn(2, queries, 64).to(torch.bfloat16) for _ in range(3)]
    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True)):
        own = [cache.clone() for cache in caches]
        outcomes.append([*function(*own, *rows), *own])
    assert all(map(torch.equal, *outcomes))


def test_a_small_gpt_trains(capsys: pytest.CaptureFixture[str]) -> None:
    main: Any = runpy.run_path(str(EXAMPLE))["main"]
    small = ["--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--steps", "60"]
    compiled = main([*small, "--dtype", "bfloat16"])
    assert compiled[0] > 4.0
    assert sum(compiled[-5:]) / 5 < compiled[0] - 1.0
    printed = capsys.readouterr().out
    assert re.search(r"compute  torch.compile \(inductor\), bfloat16 on cpu", printed)
    assert re.search(r"kernel   fused/\w+", printed)
    eager, exact = (main([*small, "--no-compile", "--dtype", dtype]) for dtype in ("bfloat16", "float32"))
    of_rounding = max(abs(a - b) for a, b in zip(eager[:10], exact, strict=False))
    assert max(abs(a - b) for a, b in zip(compiled[:10], exact, strict=False)) < 2 * of_rounding + 1e-3


def test_a_package_for_programs_without_python(tmp_path: Path) -> None:
    """The example's C++ program runs it, too, in `make cpp-test`."""
    runpy.run_path(str(EXAMPLE.parent / "cpp" / "package.py"))["main"](str(tmp_path))
    loaded = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    *inputs, first, second = torch.load(tmp_path / "example.pt")
    for x, expected in zip(inputs, (first, second), strict=True):
        torch.testing.assert_close(loaded(x), expected)
