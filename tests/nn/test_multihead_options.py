"""MultiheadAttention: options that torch lacks, arguments of the kernels, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch
from test_multihead_attention import BATCH, EMBED, HEADS, LENGTH, SOURCE, make_pair
from test_rotary import turned
from torch import Tensor

from selfattn_ext.nn import MultiheadAttention, multihead_attention


def test_grouped_heads_equal_repeated_heads() -> None:
    """H_kv heads compute the same as H heads whose parameters repeat in groups."""
    for kv_heads, options in (
        (1, {}),
        (2, {"bias": False}),
        (2, {"kdim": 5, "vdim": 9, "add_bias_kv": True}),
    ):
        grouped = MultiheadAttention(EMBED, HEADS, num_kv_heads=kv_heads, dtype=torch.float64, **options)
        full = MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
        size = EMBED // HEADS

        def widen(rows: Tensor, kv_heads: int = kv_heads, size: int = size) -> Tensor:
            return (
                rows.unflatten(0, (kv_heads, size)).repeat_interleave(HEADS // kv_heads, dim=0).flatten(0, 1)
            )

        state = grouped.state_dict()
        for name, tensor in state.items():
            if name.startswith("in_proj"):
                query, key, value = tensor.split([EMBED, kv_heads * size, kv_heads * size])
                state[name] = torch.cat([query, widen(key), widen(value)])
            elif name.startswith(("k_proj", "v_proj")):
                state[name] = widen(tensor)
            elif name.startswith("bias_"):
                state[name] = widen(tensor.flatten()).view(1, 1, EMBED)
        full.load_state_dict(state)
        query = torch.randn(LENGTH, BATCH, EMBED, dtype=torch.float64)
        key = torch.randn(SOURCE, BATCH, options.get("kdim", EMBED), dtype=torch.float64)
        value = torch.randn(SOURCE, BATCH, options.get("vdim", EMBED), dtype=torch.float64)
        torch.testing.assert_close(grouped(query, key, value), full(query, key, value))


@pytest.mark.parametrize("layout", ["batch_first", "sequence_first", "unbatched"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_the_formula(layout: str, interleaved: bool) -> None:
    rotary = {"rotary": True, "rotary_base": 100.0, "rotary_interleaved": interleaved}
    ours = MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64, **rotary)
    x, y = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    q, k, v = torch.nn.functional._in_projection_packed(x, y, y, ours.in_proj_weight, ours.in_proj_bias)

    def rotate(t: Tensor) -> Tensor:
        t = t.unflatten(-1, (2, 8)).transpose(1, 2)
        return turned(t, torch.arange(t.shape[2]), interleaved, base=100.0)

    weights = torch.softmax(rotate(q) @ rotate(k).transpose(-1, -2) / math.sqrt(8), dim=-1)
    out = ours.out_proj((weights @ v.unflatten(-1, (2, 8)).transpose(1, 2)).transpose(1, 2).flatten(2))
    ours.batch_first = layout == "batch_first"
    if layout == "unbatched":
        actual = [ours(a, b, b, average_attn_weights=False) for a, b in zip(x, y, strict=True)]
        torch.testing.assert_close(torch.stack([a for a, _ in actual]), out)
        torch.testing.assert_close(torch.stack([w for _, w in actual]), weights)
    else:
        a, b = (x, y) if ours.batch_first else (x.transpose(0, 1), y.transpose(0, 1))
        actual_out, actual_weights = ours(a, b, b, average_attn_weights=False)
        torch.testing.assert_close(actual_out, out if ours.batch_first else out.transpose(0, 1))
        torch.testing.assert_close(actual_weights, weights)


def test_window_is_a_band_mask() -> None:
    _, theirs = make_pair()
    ours = MultiheadAttention(EMBED, HEADS, window_size=(2, 1))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(8, BATCH, EMBED)
    distance = torch.arange(8) - torch.arange(8)[:, None]
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x, attn_mask=(distance < -2) | (distance > 1)))
    causal = theirs(x, x, x, attn_mask=(distance < -2) | (distance > 0))
    torch.testing.assert_close(ours(x, x, x, is_causal=True), causal)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records what each call passes to the attention function."""
    calls: list[dict[str, Any]] = []
    attend: Callable[..., Any] = multihead_attention.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, "mask": mask, **options})
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(multihead_attention, "scaled_dot_product_attention", spy)
    return calls


def test_masks_are_not_materialised(seen: list[dict[str, Any]]) -> None:
    ours = MultiheadAttention(EMBED, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, EMBED)
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    ours(x, x, x, hidden, False)
    ours(x, x, x, None, False, causal)
    ours(x, x, x, hidden, False, causal, is_causal=True)
    ours(x, x, x, None, True, causal, is_causal=True)
    shapes = [
        None if call["mask"] is None else (tuple(call["mask"].shape), call["mask"].dtype) for call in seen
    ]
    padding = ((BATCH, 1, 1, LENGTH), torch.bool)
    assert shapes == [padding, ((LENGTH, LENGTH), torch.bool), padding, None]
    assert [call["is_causal"] for call in seen] == [False, False, True, True]


def test_projections_are_views_of_one_product(seen: list[dict[str, Any]]) -> None:
    for batch_first in (False, True):
        ours = MultiheadAttention(EMBED, HEADS, batch_first=batch_first, num_kv_heads=2)
        x = torch.randn(4, 4, EMBED)
        ours(x, x, x)
        storages = {seen[-1][name].untyped_storage().data_ptr() for name in ("query", "key", "value")}
        assert len(storages) == 1


X = torch.zeros(LENGTH, BATCH, EMBED)
Y = torch.zeros(SOURCE, BATCH, EMBED)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "divisible by num_heads, got embed_dim=10, num_heads=4", {"embed_dim": 10}),
        (ValueError, "embed_dim must be a positive integer", {"embed_dim": 0}),
        (ValueError, "divisible by num_kv_heads, got num_heads=4, num_kv_heads=3", {"num_kv_heads": 3}),
        (ValueError, "even embed_dim / num_heads, got 3", {"rotary": True}),
        (ValueError, "window_size must be", {"window_size": (-2, 0)}),
        (ValueError, "window_size does not combine", {"add_zero_attn": True, "window_size": (1, 0)}),
    ],
)
def test_constructor_errors(error: type[Exception], match: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        MultiheadAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})


@pytest.mark.parametrize(
    ("error", "match", "inputs", "options"),
    [
        (TypeError, "key must be a tensor, got list", (X, [1.0], X), {}),
        (TypeError, "query must have the dtype of the parameters", (X.double(), X, X), {}),
        (TypeError, "value must have the dtype of the parameters", (X, X, X.int()), {}),
        (ValueError, r"query must be \(..., 12\)", (X[..., :5], X, X), {}),
        (ValueError, "all be 2-D or all be 3-D", (X, X[0], X[0]), {}),
        (ValueError, "all be 2-D or all be 3-D", (X[None], X[None], X[None]), {}),
        (ValueError, "key and value must agree", (X, Y, X), {}),
        (ValueError, r"same batch size \(dimension 1\)", (X, Y[:, :2], Y[:, :2]), {}),
        (ValueError, f"device of the parameters, {gpu.DEVICE}.*, got meta", (X, X.to("meta"), X), {}),
        (
            ValueError,
            r"attn_mask must have the shape \(5, 7\) or \(12, 5, 7\), got \(7, 5\)$",
            (X, Y, Y),
            {"attn_mask": torch.zeros(SOURCE, LENGTH)},
        ),
        (
            ValueError,
            r"attn_mask must have the shape .*, got \(3, 7\), which is the shape of key_padding_mask",
            (X, Y, Y),
            {"attn_mask": torch.zeros(BATCH, SOURCE)},
        ),
        (ValueError, "attn_mask must have", (X, X, X), {"attn_mask": X, "is_causal": True}),
        (
            ValueError,
            r"key_padding_mask must have the shape \(3, 7\), got \(3, 5\)",
            (X, Y, Y),
            {"key_padding_mask": torch.zeros(BATCH, LENGTH)},
        ),
        (TypeError, "got torch.int64", (X, X, X), {"attn_mask": torch.zeros(LENGTH, LENGTH).long()}),
        (TypeError, "must be a tensor, got list", (X, Y, Y), {"key_padding_mask": [[True]]}),
    ],
)
def test_forward_errors(error: type[Exception], match: str, inputs: Any, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        MultiheadAttention(EMBED, HEADS)(*inputs, **options)
