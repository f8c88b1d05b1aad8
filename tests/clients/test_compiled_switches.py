"""The switches with torch.compile and Inductor, which keeps its results on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import ran
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from selfattn_ext import as_sdpa


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def training_step(function: Callable[..., Tensor], *options: object) -> Callable[[], None]:
    compiled = torch.compile(function, fullgraph=True)
    tensors = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]
    return lambda: compiled(*tensors, *options).sum().backward()


def with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return 2 * F.scaled_dot_product_attention(2 * query, key, value, dropout_p=0.1)


def test_a_block_finds_its_own_results_on_disk() -> None:
    step = training_step(with_dropout)
    for last in (False, True):
        # As in another process, nothing is in memory and everything on disk.
        torch.compiler.reset()
        counters.clear()
        for block, expected in ((nullcontext, (0, 0)), (as_sdpa, (1, 1)), (nullcontext, (0, 0))):
            with block():
                step()
                assert ran.ours(step) == expected
        assert counters["aot_autograd"]["autograd_cache_hit"] == (2 if last else 0)


def causal(query: Tensor, key: Tensor, value: Tensor, order: tuple[int, ...]) -> Tensor:
    inverse = tuple(order.index(dim) for dim in range(4))
    query, key, value = (
        tensor.permute(order).contiguous().permute(inverse) for tensor in (query, key, value)
    )
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).reshape(2, 9, 64).square()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_compiled_code_gets_the_strides_that_it_expects(order: tuple[int, ...]) -> None:
    compiled = torch.compile(causal, fullgraph=True)
    tensors = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]

    def results() -> list[Tensor]:
        out = compiled(*tensors, order)
        return [out, *torch.autograd.grad(out.sum(), tensors)]

    expected = results()
    with ran.activated():
        assert ran.ours(results) == (1, 1)
        torch.testing.assert_close(results(), expected)


FLEX_STEP = """
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from selfattn_ext import as_flex
from selfattn_ext.flex import attention_with_functions as flex_module

torch.manual_seed(0)
table = torch.randn(4, 7, requires_grad=True)
given = [torch.randn(1, 4, 24, 16, requires_grad=True) for _ in range(3)]
mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 24, 24, device="cpu")

def step(attention):
    out = attention(*given, lambda s, b, h, q, kv: s + table.tanh()[h, (q - kv) % 7], mask)
    return [out, *torch.autograd.grad(out.sin().sum(), [*given, table])]

with as_flex():
    compiled = step(torch.compile(flex_attention, fullgraph=True))
    for one, other in zip(compiled, step(flex_attention)):
        torch.testing.assert_close(one, other)
print(sum(counters["aot_autograd"][name] for name in ("autograd_cache_hit", "autograd_cache_miss")) > 0,
      counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_flex_attention_and_its_results_on_disk(run_python: Callable[..., str], tmp_path: Path) -> None:
    """A second process reads the compiled graphs from disk, and loads the functions that they call."""
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "SELFATTN_FUNCTION_CACHE": str(tmp_path / "functions"),
    }
    assert run_python(FLEX_STEP, **folders).split() == ["True", "0"]
    assert run_python(FLEX_STEP, **folders).split() == ["True", "1"]
