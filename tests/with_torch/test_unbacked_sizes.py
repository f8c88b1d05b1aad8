"""Graphs in which the number of rows depends on data, as in packing by nonzero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import export

import selfattn_ext
from selfattn_ext import MultiheadAttention, MultiHeadSelfAttention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, WIDTH = 4, 8
#: The functions have type Any here, as tests pass tensors and options in one mapping.
varlen_attention: Any = selfattn_ext.varlen_attention
sdpa: Any = selfattn_ext.scaled_dot_product_attention

#: A function of rows (N, H, E), where N is not known, and of the starts of sequences.
Function = Callable[[Tensor, Tensor], Any]


def packed(rows: Tensor, starts: Tensor, **options: Any) -> Any:
    return varlen_attention(rows, rows, rows, starts, starts, 9, 9, **options)


def dense(rows: Tensor, starts: Tensor, **options: Any) -> Any:
    heads = rows.transpose(0, 1)
    return sdpa(heads, heads[:2], heads[:2], enable_gqa=True, **options)


def cache_of(rows: Tensor) -> tuple[Tensor, ...]:
    """Returns a query for each row, and a cache with room for three keys."""
    query = rows.detach().unsqueeze(2)
    return query, query.repeat(1, 1, 3, 1), query.repeat(1, 1, 3, 1)


def step(tokens: Tensor, length: int | Tensor, layout: str | None = None) -> Tensor:
    """Makes a step of one sequence, whose cache has room for all new tokens."""
    sizes = (1, HEADS, 30, WIDTH) if layout == "bhld" else (1, 30, HEADS, WIDTH)
    keys, values = torch.zeros(sizes), torch.zeros(sizes)
    return selfattn_ext.attention_with_kvcache(
        tokens, keys, values, tokens, tokens, length, is_causal=True, layout=layout
    )


FUNCTIONS: dict[str, Function] = {
    "packed with options": lambda rows, starts: packed(
        rows, starts, is_causal=True, window_size=(3, 0), softcap=3.0, sinks=rows[:, :, 0].sum(0),
        attn_mask=starts.view(-1, 1, 1, 1)[1:] * torch.ones(1, 9, 9), dropout_p=0.1, return_lse=True,
    ),
    "packed with a function": lambda rows, starts: packed(
        rows, starts, score_mod=lambda s, b, h, q, kv: s + (q - kv) * h * starts[b], return_lse=True
    ),
    "packed in other strides": lambda rows, starts: packed(
        rows.transpose(1, 2).contiguous().transpose(1, 2), starts
    ),
    "a sequence per row": lambda rows, starts: packed(
        rows, torch.arange(rows.size(0) + 1), sinks=rows.sum((0, 2)), return_weights=True
    ),
    "on keys with room": lambda rows, starts: varlen_attention(
        rows.detach(), rows.detach(), rows.detach(), starts, starts, 9, 9, seqused_k=starts.diff() // 2
    ),
    "options": lambda rows, starts: dense(
        rows, starts, is_causal=True, attn_mask=rows[:, 0, 0], return_weights=True, return_lse=True,
        query_offset=2,
    ),
    "one batch element per row": lambda rows, starts: sdpa(rows, rows, rows),
    "weights": lambda rows, starts: selfattn_ext.attention_weights(rows, rows),
    "scores": lambda rows, starts: selfattn_ext.attention_scores(rows.transpose(0, 1), rows.transpose(0, 1)),
    "softmax with a mask": lambda rows, starts: selfattn_ext.masked_softmax(
        rows.transpose(0, 2), rows[:, 0, 0], is_causal=True
    ),
    "a function": lambda rows, starts: selfattn_ext.flex_attention(
        *(rows.transpose(0, 1).unsqueeze(0),) * 3, lambda s, b, h, q, kv: s * (q + kv) * 0.1
    ),
    "16 bits": lambda rows, starts: packed(rows.bfloat16(), starts, return_lse=True),
    "tokens of a step": lambda rows, starts: step(rows.detach().unsqueeze(0), 2),
    "tokens of a step, lengths": lambda rows, starts: step(
        rows.detach().transpose(0, 1).unsqueeze(0).contiguous(), torch.tensor([2]), layout="bhld"
    ),
    "a cache": lambda rows, starts: selfattn_ext.attention_with_kvcache(
        *cache_of(rows), rows.detach().unsqueeze(2), rows.detach().unsqueeze(2), 2
    ),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Parameter(torch.randn(HEADS, WIDTH))
        self.layer = MultiHeadSelfAttention(HEADS * WIDTH, HEADS)
        self.drop_in = MultiheadAttention(HEADS * WIDTH, HEADS)

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, tuple[Tensor, ...]]:
        rows = x.flatten(0, 1)[keep.flatten().nonzero().squeeze(1)] * self.before
        starts = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
        results = {name: function(rows, starts) for name, function in FUNCTIONS.items()}
        flat = rows.flatten(1)
        results["a layer"] = self.layer(flat, is_causal=True)
        results["torch's layer"] = self.drop_in(flat, flat, flat)[0]
        return {name: of if isinstance(of, tuple) else (of,) for name, of in results.items()}


def outcome(module: Any, x: Tensor, keep: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Returns the results by function, and the gradients of their sum by parameter."""
    torch.manual_seed(3)
    results = module(x, keep)
    total = sum(result.float().nan_to_num(neginf=0.0).sin().sum() for of in results.values() for result in of)
    assert isinstance(total, Tensor)
    parameters = {name.removeprefix("_orig_mod."): each for name, each in module.named_parameters()}
    return results, dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))


@pytest.fixture(params=["export", pytest.param("strict export", marks=pytest.mark.thorough), "compile"])
def graph_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    def graph(module: torch.nn.Module, given: tuple[Tensor, ...]) -> Any:
        if request.param == "compile":
            return torch.compile(module, backend="aot_eager", fullgraph=True)
        return export(module, given, strict=request.param == "strict export").module()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield graph


def test_any_number_of_rows(graph_of: Callable[..., Any]) -> None:
    module = Model()
    x, some = torch.randn(3, 9, HEADS, WIDTH), torch.rand(3, 9) < 0.6
    graph = graph_of(module, (x, some))
    one = torch.zeros(3, 9, dtype=torch.bool).index_fill_(1, torch.tensor(4), True)
    one[1:] = False
    for keep in (some, torch.ones_like(some), torch.zeros_like(some), one, torch.rand(3, 9) < 0.4):
        torch.testing.assert_close(outcome(graph, x, keep), outcome(module, x, keep))
