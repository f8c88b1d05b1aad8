"""Score functions that people use, as torch's flex_attention takes them, and their formula.

Each is made for sizes (B, H, L, S) and for the dtype of the tensors that it learns. The formula is attention
that computes all scores at once. The other functions are the steps that tests of score functions share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gpu
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from selfattn_ext import flex, reference
from selfattn_ext.flex import compiler, kernel_calls
from selfattn_ext.flex.indexing import Indexing


@dataclass
class Functions:
    """A score_mod, a mask_mod, and the tensors that they learn."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    learned: list[Tensor] = field(default_factory=list)


Sizes = tuple[int, int, int, int]
#: The type leaves out the signature, because tests unpack tensors and options into one call.
flex_attention: Any = flex.flex_attention


def _learned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def causal(sizes: Sizes, dtype: torch.dtype) -> Functions:
    return Functions(mask_mod=lambda b, h, q, kv: q >= kv)


def sliding_window(sizes: Sizes, dtype: torch.dtype) -> Functions:
    return Functions(mask_mod=lambda b, h, q, kv: (q - kv <= 7) & (kv - q <= 3))


def prefix_lm(sizes: Sizes, dtype: torch.dtype) -> Functions:
    prefix = torch.arange(sizes[0]) * 5 + 3
    return Functions(mask_mod=lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv))


def documents(sizes: Sizes, dtype: torch.dtype) -> Functions:
    ids = torch.arange(max(sizes[2:])) // 13
    return Functions(mask_mod=lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv))


def dilated(sizes: Sizes, dtype: torch.dtype) -> Functions:
    return Functions(mask_mod=lambda b, h, q, kv: ((q - kv) % 3 == 0) & ((q - kv).abs() < 30))


def alibi(sizes: Sizes, dtype: torch.dtype) -> Functions:
    heads = sizes[1]
    return Functions(lambda score, b, h, q, kv: score + torch.exp2(-((h + 1) * 8.0 / heads)) * (kv - q))


def learned_alibi(sizes: Sizes, dtype: torch.dtype) -> Functions:
    slopes = _learned(sizes[1], dtype=dtype)
    return Functions(
        lambda score, b, h, q, kv: score - torch.nn.functional.softplus(slopes[h]) * (q - kv).abs(),
        learned=[slopes],
    )


def softcap(sizes: Sizes, dtype: torch.dtype) -> Functions:
    return Functions(lambda score, b, h, q, kv: 2 * torch.tanh(score / 2))


def relative_bias(sizes: Sizes, dtype: torch.dtype) -> Functions:
    keys = sizes[3]
    table = _learned(sizes[1], sizes[2] + keys, dtype=dtype)
    return Functions(lambda score, b, h, q, kv: score + table[h, q - kv + keys], learned=[table])


def t5_buckets(sizes: Sizes, dtype: torch.dtype) -> Functions:
    table = _learned(32, sizes[1], dtype=dtype)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = (kv - q).abs()
        # The 0.5 keeps distances off the edges of buckets, so that a logarithm's last bit decides nothing.
        far = 8 + (torch.log((distance + 0.5) / 8) / math.log(16.0) * 8).to(torch.int32)
        bucket = torch.where(distance < 8, distance, torch.minimum(far, torch.full_like(far, 15)))
        return score + table[bucket + torch.where(kv > q, 16, 0), h]

    return Functions(score_mod, learned=[table])


def swin_table(sizes: Sizes, dtype: torch.dtype) -> Functions:
    places = torch.randint(0, 25, sizes[2:])
    table = _learned(25, sizes[1], dtype=dtype)
    return Functions(lambda score, b, h, q, kv: score + table[places[q, kv], h], learned=[table])


def neighbourhood(sizes: Sizes, dtype: torch.dtype) -> Functions:
    width = 8

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        rows = (q // width - kv // width).abs()
        return (rows <= 2) & ((q % width - kv % width).abs() <= 1)

    return Functions(mask_mod=mask_mod)


def temperature(sizes: Sizes, dtype: torch.dtype) -> Functions:
    of_heads, of_all = _learned(sizes[1], dtype=dtype), _learned(dtype=dtype)
    return Functions(
        lambda score, b, h, q, kv: score * torch.exp(of_heads[h]) + of_all * 0.1 * score,
        learned=[of_heads, of_all],
    )


def full_bias(sizes: Sizes, dtype: torch.dtype) -> Functions:
    bias = _learned(*sizes[2:], dtype=dtype)
    return Functions(lambda score, b, h, q, kv: score + bias[q, kv], learned=[bias])


def graph_distances(sizes: Sizes, dtype: torch.dtype) -> Functions:
    distances = torch.randint(0, 6, (sizes[0], *sizes[2:]))
    table = _learned(5, sizes[1], dtype=dtype)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = distances[b, q, kv]
        return torch.where(distance == 5, -torch.inf, score + table[distance.clamp(max=4), h])

    return Functions(score_mod, learned=[table])


def of_queries_and_keys(sizes: Sizes, dtype: torch.dtype) -> Functions:
    query, key = _learned(sizes[2], dtype=dtype), _learned(sizes[0], sizes[3], dtype=dtype)
    return Functions(
        lambda score, b, h, q, kv: score * torch.sigmoid(query[q] * key[b, kv]), learned=[query, key]
    )


def conjunction(sizes: Sizes, dtype: torch.dtype) -> Functions:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    first, second, third = (
        make(sizes, dtype).mask_mod for make in (documents, sliding_window, neighbourhood)
    )
    table = _learned(sizes[1], 64, dtype=dtype)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.relu(score) ** 2 - table.exp()[h, (q * 7 + kv) % 64] * torch.rsqrt(1.0 + (q - kv) ** 2)

    return Functions(score_mod, or_masks(and_masks(first, second), third), [table])


ALL: dict[str, Callable[[Sizes, torch.dtype], Functions]] = {
    make.__name__: make
    for make in (
        causal, sliding_window, prefix_lm, documents, dilated, alibi, learned_alibi, softcap, relative_bias,
        t5_buckets, swin_table, neighbourhood, temperature, full_bias, graph_distances, of_queries_and_keys,
        conjunction,
    )
}  # fmt: skip


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    functions: Functions,
    visible: Tensor | None = None,
    compute: Callable[..., Any] = reference.attention,
    **options: Any,
) -> Any:
    """Computes attention with all scores at once; ``visible`` (B | 1, H | 1, L, S) hides further scores.

    ``compute`` takes the place of the formula.
    """
    indices = [torch.arange(size) for size in (*query.shape[:3], key.size(2))]

    def mapped(function: Callable[..., Any], *first: Tensor) -> Tensor:
        for dims in (
            (None, None, None, 0),
            (None, None, 0, None),
            (None, 0, None, None),
            (0, None, None, None),
        ):
            function = torch.vmap(function, in_dims=(*(0 for _ in first), *dims))
        result: Tensor = function(*first, *indices)
        return result

    with Indexing():
        if functions.mask_mod is not None:
            shown = mapped(functions.mask_mod)
            visible = shown if visible is None else visible & shown
        mask = options.pop("attn_mask", None)
        if visible is not None:
            mask = visible if mask is None else torch.where(visible, mask, -torch.inf)
        if functions.score_mod is not None:
            score_mod = functions.score_mod
            options["score_function"] = lambda scores: mapped(score_mod, scores)
        return compute(query, key, value, mask, **options)


def options_of(heads: int) -> dict[str, dict[str, Any]]:
    """Returns the package's own options, of which tests take every pair."""
    return {
        "causal": {"is_causal": True, "query_offset": 3},
        "window": {"window_size": (19, 14)},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": torch.tensor([0.1, 0.3, 0.0, 0.2])[:heads]},
        "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])[:heads]},
        "scale": {"scale": 0.7},
    }


def tensors(sizes: Sizes, dtype: torch.dtype = torch.float32, kv_heads: int | None = None) -> list[Tensor]:
    batch, heads, length, keys = sizes
    kv_heads = kv_heads or heads
    shapes = ((batch, heads, length, 16), (batch, kv_heads, keys, 16), (batch, kv_heads, keys, 24))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def mask_of(functions: Functions, sizes: Sizes, block_size: int | tuple[int, int]) -> BlockMask | None:
    if functions.mask_mod is None:
        return None
    return create_block_mask(functions.mask_mod, *sizes, device=gpu.DEVICE, BLOCK_SIZE=block_size)


def gradients(
    out: Tensor, given: Sequence[Tensor], learned: Sequence[Tensor] = (), **how: Any
) -> list[Tensor]:
    total = (out * (torch.arange(out.size(-1)) % 5 - 1)).sum()
    return list(torch.autograd.grad(total, [*given, *learned], materialize_grads=True, **how))


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Asserts equal bits."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(one, other), index


def assert_same_on_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Asserts that one, two and three threads compute the same bits. The fixture one_thread restores them."""
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(compute())
    for other in results[1:]:
        assert_same(other, results[0])


def assert_derivatives(attend: Callable[..., Tensor], given: Sequence[Tensor], learned: Tensor) -> None:
    """Compares first and second derivatives, forward mode and torch.func's with finite differences."""
    assert torch.autograd.gradcheck(attend, (*given, learned), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (*given, learned), fast_mode=True)
    eager = torch.autograd.grad(attend(*given, learned).sin().sum(), given)
    transformed = torch.func.grad(lambda *a: attend(*a, learned).sin().sum(), (0, 1, 2))(*given)
    torch.testing.assert_close(transformed, eager)


def assert_same_dropout(attend: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Asserts that dropout has the same pattern with a function and without; returns the last results."""
    patterns = []
    for score_mod in (None, lambda s, b, h, q, kv: s * 1.5 - (q - kv) * 0.05):
        torch.manual_seed(3)
        out, weights = attend(score_mod=score_mod, dropout_p=0.4, return_weights=True)
        patterns.append(weights == 0)
    assert torch.equal(*patterns)
    return out, weights


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no function be compiled until the test ends, and forgets that a warning said so."""

    def refuse(source: str) -> str:
        raise compiler.CompilerError("no compiler today")

    monkeypatch.setattr(compiler, "load", refuse)
    monkeypatch.setattr(kernel_calls, "_warned", set())
