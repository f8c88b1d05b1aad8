"""Steps on caches in graphs of torch.compile and torch.export.

Autograd knows that the steps write to caches, and that they have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import export

import selfattn_ext
from selfattn_ext.kv_cache.step import append_to_cache

pytestmark = pytest.mark.filterwarnings("ignore:Error detected in")

attention_with_kvcache: Any = selfattn_ext.attention_with_kvcache
varlen_attention: Any = selfattn_ext.varlen_attention

Step = Callable[[Tensor, Tensor, Tensor], Any]


def slots(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attention_with_kvcache(query, keys, values, query, query, torch.tensor([2, 3]))


def pages(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attention_with_kvcache(
        query, keys, values, query, query, torch.tensor([2, 3]), torch.arange(2).view(2, 1),
        return_weights=True, return_lse=True,
    )[0]  # fmt: skip


def appended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    append_to_cache(keys, values, query, query, torch.tensor([2, 3]), None, None)
    return query.sin()


TABLE = torch.randn(30)


def with_functions(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attention_with_kvcache(
        query.sin(), keys, values, query, query, torch.tensor([2, 3]), is_causal=True, sinks=TABLE[:2],
        score_mod=lambda s, b, h, q, kv: s * (q + 1) + TABLE.sin()[q - kv + 9] * b,
        mask_mod=lambda b, h, q, kv: (q - kv < 3) | (b == 0), return_weights=True, return_lse=True,
    )[0].cos()  # fmt: skip


class Model(torch.nn.Module):
    """The products save the cache for their gradient; then the step changes it."""

    def __init__(self, step: Step):
        super().__init__()
        self.step = step

    def forward(self, factor: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = (factor * keys).sum() + (factor * values).sum()
        return before, self.step(query, keys, values)


def inputs(step: Step) -> tuple[Tensor, ...]:
    return (torch.randn(()), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8))


def eager(module: torch.nn.Module, given: tuple[Tensor, ...]) -> Any:
    return module


def compiled(module: torch.nn.Module, given: tuple[Tensor, ...]) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def exported(strict: bool) -> Callable[..., Any]:
    return lambda module, given: export(module, given, strict=strict).module()


MAKERS = {
    "eager": eager,
    "compiled": compiled,
    "exported": exported(False),
    "exported strictly": exported(True),
}
STEPS = {"slots": slots, "pages": pages, "appended": appended, "functions": with_functions}


def cases(steps: dict[str, Step], makers: Iterable[str]) -> list[Any]:
    """Returns pairs of a step and a maker; steps with functions break a graph of torch.compile, which traces
    for a strict export, too.
    """
    more = {(name, "exported strictly") for name in steps if name != "appended"}
    return [
        pytest.param(name, maker, marks=pytest.mark.thorough if (name, maker) in more else ())
        for name in steps
        for maker in makers
        if maker != "compiled" or "function" not in name
    ]


@pytest.mark.parametrize(("name", "maker"), cases(STEPS, MAKERS))
def test_autograd_knows_that_a_saved_cache_has_changed(name: str, maker: str) -> None:
    step = STEPS[name]
    torch._dynamo.reset()
    module = MAKERS[maker](Model(step), inputs(step))
    factor, *given = inputs(step)
    copies = [tensor.clone() for tensor in given]
    expected = step(*copies)
    with torch.no_grad():
        out = module(factor, *given)[1]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert all(torch.equal(*pair) for pair in zip(given, copies, strict=True))
    # AOTAutograd raises the error while it compiles, as it does for torch's own in-place operations.
    with pytest.raises(Exception, match="modified by an inplace operation"):
        module(factor.requires_grad_(), *given)[0].backward()


def reading(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attention_with_kvcache(query, keys, values, cache_seqlens=torch.tensor([2, 3]))


def reading_packed(query: Tensor, keys: Tensor, values: Tensor, **functions: Any) -> Tensor:
    rows, starts = query.transpose(1, 2).flatten(0, 1), torch.tensor([0, 1, 2])
    caches = (cache.transpose(1, 2) for cache in (keys, values))
    table, used = torch.arange(2).view(2, 1), torch.tensor([2, 3])
    return varlen_attention(rows, *caches, starts, None, 1, 6, seqused_k=used, block_table=table, **functions)


def reading_with_functions(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return reading_packed(query, keys, values, score_mod=lambda s, b, h, q, kv: s + kv * TABLE[b])


READING = {"reading": reading, "packed": reading_packed, "packed functions": reading_with_functions}


@pytest.mark.parametrize(("name", "maker"), cases(STEPS | READING, MAKERS))
def test_what_requires_grad_is_refused(name: str, maker: str) -> None:
    """A program that was exported when nothing required a gradient refuses it, too."""
    step = (STEPS | READING)[name]
    torch._dynamo.reset()
    with torch.no_grad():
        module = MAKERS[maker](Model(step), inputs(step))
    factor, query, keys, values = inputs(step)
    before = keys.clone()
    module(factor, query, keys.clone(), values)
    with pytest.raises(Exception, match="argument requires grad"):
        module(factor, query.requires_grad_(), keys, values)
    assert torch.equal(keys, before)
