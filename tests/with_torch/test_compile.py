"""torch.compile: every option in one graph, forward and backward; few graphs for many shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import selfattn_ext
from selfattn_ext import attention_scores, attention_weights, masked_softmax, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, LENGTHS = 4, (5, 6, 7, 9, 16, 33)


def qkv(length: int, keys: int | None = None, batch: int = 2, kv_heads: int = HEADS) -> list[torch.Tensor]:
    sizes = ((HEADS, length), (kv_heads, keys or length), (kv_heads, keys or length))
    return [torch.randn(batch, *size, 8, requires_grad=True) for size in sizes]


def options() -> dict[str, dict[str, Any]]:
    slopes, sinks = torch.rand(2, HEADS, requires_grad=True), torch.randn(HEADS, requires_grad=True)
    return {
        "nothing": {},
        "rules": {
            "attn_mask": torch.rand(2, 1, 7, 9) > 0.3,
            "is_causal": True,
            "window_size": (3, 0),
            "query_offset": 2,
            "softcap": 2.0,
            "return_lse": True,
        },
        "mask of another dtype": {"attn_mask": torch.randn(7, 9, dtype=torch.float16), "scale": 0.3},
        "everything": {
            "attn_mask": torch.randn(HEADS, 7, 9, requires_grad=True),
            "dropout_p": 0.3,
            "is_causal": True,
            "scale": 0.3,
            "window_size": (5, 0),
            "softcap": 3.0,
            "alibi_slopes": slopes,
            "sinks": sinks,
            "query_offset": 2,
            "return_weights": True,
            "return_lse": True,
        },
    }


@pytest.mark.parametrize(
    ("names", "dynamic"), [(["everything"], False), (list(options()), True)], ids=["static", "dynamic"]
)
def test_every_option_in_one_graph(names: list[str], dynamic: bool) -> None:
    """With dynamic, floats and ints become symbols, too, which an option must accept like numbers."""
    given = {name: options()[name] for name in names}
    dtype = torch.bfloat16 if dynamic else torch.float32
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in qkv(7, 9, kv_heads=2)]
    learned = [each for of in given.values() for each in of.values() if isinstance(each, torch.Tensor)]
    leaves = tensors + [each for each in learned if each.requires_grad]

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> Any:
        totals = []
        for of in given.values():
            results = scaled_dot_product_attention(query, key, value, enable_gqa=True, **of)
            results = results if isinstance(results, tuple) else (results,)
            totals.append(sum(result.float().nan_to_num(neginf=0.0).sin().sum() for result in results))
        return torch.stack(totals)

    torch._dynamo.reset()
    outcomes = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        torch.manual_seed(3)
        totals = function(*tensors, given)
        outcomes.append([totals.detach(), *torch.autograd.grad(totals.sum(), leaves)])
    torch.testing.assert_close(*outcomes)


def graphs(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> int:
    """Counts the graphs that torch.compile makes of a function for these calls, and checks the results."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for call in calls:
        torch.testing.assert_close(compiled(*call), function(*call))
    return counter.frame_count


def bottom_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    offset = key.size(2) - query.size(2)
    return scaled_dot_product_attention(query, key, value, is_causal=True, query_offset=offset)


def every_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return (
        scaled_dot_product_attention(q, k, v, is_causal=True),
        attention_weights(q, k, window_size=(4, 0)),
        attention_scores(q, k),
        masked_softmax(q, is_causal=True),
        scaled_dot_product_attention(q[0], k[0], v[0], return_lse=True),
        scaled_dot_product_attention(
            q, k, v, softcap=2.0, sinks=torch.ones(HEADS), alibi_slopes=torch.ones(HEADS)
        ),
    )


def test_two_graphs_serve_all_lengths_and_batches() -> None:
    """One function that specialised its sizes would cause more."""
    calls = [qkv(length, batch=batch) for batch, length in enumerate(LENGTHS, 2)]
    assert graphs(every_function, calls) <= 2


def test_two_graphs_serve_all_positions() -> None:
    """In a decoder's calls the offset is the length so far, or a number that the caller counts."""
    assert graphs(bottom_right, [qkv(4, keys) for keys in LENGTHS]) <= 2

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: int) -> Any:
        return (
            scaled_dot_product_attention(q, k, v, query_offset=n),
            scaled_dot_product_attention(q, k, v, window_size=(n, 0)),
            masked_softmax(q, is_causal=True, query_offset=n),
        )

    assert graphs(counted, [(*qkv(4, 20), offset) for offset in range(10)]) <= 2


def test_two_graphs_serve_all_shapes_of_layers() -> None:
    layers = selfattn_ext.SelfAttention(16), selfattn_ext.MultiHeadSelfAttention(16, HEADS)
    drop_ins = [
        selfattn_ext.MultiheadAttention(16, HEADS, batch_first=True),
        selfattn_ext.MultiheadAttention(16, HEADS, num_kv_heads=2, rotary=True, window_size=(3, 0)),
    ]

    def every_layer(x: torch.Tensor) -> Any:
        return [*(layer(x, is_causal=True) for layer in layers), *(layer(x, x, x) for layer in drop_ins)]

    calls = [(torch.randn(length, batch, 16),) for batch, length in enumerate(LENGTHS, 2)]
    assert graphs(every_layer, calls) <= 2


def test_layers_where_a_default_device_is_set() -> None:
    """A default device is a mode, under which Dynamo does not trace tensor methods written in Python."""
    ours = selfattn_ext.MultiHeadSelfAttention(16, HEADS)
    drop_in = selfattn_ext.MultiheadAttention(16, HEADS, batch_first=True)
    x, hidden = torch.randn(3, 5, 16), torch.ones(3 * HEADS, 5, 5).triu(1) > 0

    def layers(x: torch.Tensor) -> torch.Tensor:
        x = ours(x, is_causal=True)
        return drop_in(x, x, x, attn_mask=hidden)[0]

    torch._dynamo.reset()
    with torch.device(x.device):
        found = torch.compile(layers, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, layers(x))


def test_marked_dimensions_are_never_specialised() -> None:
    tensors = qkv(7, 9)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 2)
    assert graphs(bottom_right, [tensors, qkv(33, 40, batch=5)]) == 1


def test_a_number_that_changes_costs_a_graph_and_no_error() -> None:
    """Graphs hold floats of operators as constants, with torch's own attention, too."""
    calls = [(*qkv(4, 6), scale) for scale in (0.1, 0.2, 0.4)]
    assert graphs(lambda q, k, v, s: scaled_dot_product_attention(q, k, v, scale=s, softcap=s), calls) == 3


def test_one_tensor_for_everything() -> None:
    """Dynamo refuses an autograd.Function that is given a tensor twice."""

    def step(x: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(x, x, x, is_causal=True)
        return (out + masked_softmax(attention_scores(x, x)) @ x).square().sum()

    torch._dynamo.reset()
    x = torch.randn(2, HEADS, 7, 8, requires_grad=True)
    gradients = [
        torch.autograd.grad(function(x), x)[0]
        for function in (torch.compile(step, backend="aot_eager", fullgraph=True), step)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("inf")}, "scale must be finite"),
        ({"window_size": (-3, 0)}, "window_size must be"),
        ({"query_offset": 2**50}, "query_offset must lie"),
        ({"attn_mask": torch.zeros(3, 3)}, "does not broadcast"),
    ],
    ids=str,
)
def test_refusals_name_the_argument(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=message):
        compiled(*qkv(5), **options)
