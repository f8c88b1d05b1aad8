"""SelfAttention, MultiHeadSelfAttention and the rotary embedding against their formulas."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rotary import turned
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext.nn import MultiHeadSelfAttention, SelfAttention, rotary_embedding

B, L, D, H = 2, 5, 12, 3


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    return weights @ v, weights


def single_head(m: SelfAttention, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, weights = attend(x @ m.W_q.weight.T, x @ m.W_k.weight.T, x @ m.W_v.weight.T, visible)
    return out @ m.W_o.weight.T, weights


def multi_head(m: MultiHeadSelfAttention, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    heads = [layer(x).unflatten(-1, (m.num_heads, -1)).transpose(-3, -2) for layer in (m.Wq, m.Wk, m.Wv)]
    out, weights = attend(*heads, visible)
    return m.Wo(out.transpose(-3, -2).flatten(-2)), weights


@pytest.mark.parametrize(("d_k", "d_v"), [(None, None), (4, None), (None, 7), (1, 9)])
@pytest.mark.parametrize("shape", [(L, D), (B, L, D), (2, B, L, D), (B, 1, D), (0, L, D)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_self_attention(d_k: int | None, d_v: int | None, shape: tuple[int, ...], masked: bool) -> None:
    module = SelfAttention(D, d_k, d_v, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(shape[-2], shape[-2], dtype=torch.bool).tril() if masked else None
    actual, expected = module(x, visible), single_head(module, x, visible)
    assert len(actual) == 2
    torch.testing.assert_close(actual, expected)
    leaves = [x, *module.parameters()]
    gradients = [
        torch.autograd.grad(o.square().sum() + w.pow(3).sum(), leaves) for o, w in (actual, expected)
    ]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(module(x, is_causal=masked), expected)


def test_self_attention_parameters() -> None:
    shapes = {name: tuple(p.shape) for name, p in SelfAttention(D, 4, 7).named_parameters()}
    assert shapes == {"W_q.weight": (4, D), "W_k.weight": (4, D), "W_v.weight": (7, D), "W_o.weight": (D, 7)}


@pytest.mark.parametrize("shape", [(L, D), (B, L, D), (2, B, L, D)], ids=str)
@pytest.mark.parametrize("return_weights", [False, True])
def test_multi_head(shape: tuple[int, ...], return_weights: bool) -> None:
    module = MultiHeadSelfAttention(D, H, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(L, L, dtype=torch.bool).tril()
    for mask, is_causal, seen in ((None, False, None), (visible, False, visible), (None, True, visible)):
        actual = module(x, mask, is_causal=is_causal, return_weights=return_weights)
        expected = multi_head(module, x, seen)
        actual = actual if return_weights else (actual,)
        torch.testing.assert_close(actual, expected[: len(actual)])
        leaves = [x, *module.parameters()]
        losses = [sum(t.pow(3).sum() for t in results[: len(actual)]) for results in (actual, expected)]
        torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def test_multi_head_parameters() -> None:
    shapes = {name: tuple(p.shape) for name, p in MultiHeadSelfAttention(D, H).named_parameters()}
    assert shapes == {f"W{p}.{kind}": ((D, D) if kind == "weight" else (D,))
                      for p in "qkvo" for kind in ("weight", "bias")}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(L, L), (1, L), (B, L, L), (1, L, L), (B, 1, L, L), (B, 1, 1, L), (1, H, L, L), (B, H, L, L)],
    ids=str,
)
def test_masks_of_zero_and_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = MultiHeadSelfAttention(D, H)
    x = torch.randn(B, L, D)
    visible = torch.rand(shape) < 0.6
    visible[..., 0] = True
    seen = visible.unsqueeze(1) if len(shape) == 3 else visible
    actual = module(x, visible.to(dtype), return_weights=True)
    torch.testing.assert_close(actual, multi_head(module, x, seen))


def test_three_dimensional_mask_counts_sequences_even_where_the_heads_are_as_many() -> None:
    module = MultiHeadSelfAttention(D, B)
    visible = torch.ones(B, L, L).tril()
    visible[1] = 1
    weights = module(torch.randn(B, L, D), visible, return_weights=True)[1]
    assert (weights[0].triu(1) == 0).all()
    assert (weights[1] > 0).all()


def test_wholly_hidden_query_gets_zeros() -> None:
    x = torch.randn(B, L, D, requires_grad=True)
    mask = torch.ones(L, L)
    mask[2] = 0
    single, multi = SelfAttention(D), MultiHeadSelfAttention(D, H)
    out, weights = single(x, mask)
    assert torch.equal(weights[:, 2], torch.zeros(B, L))
    assert torch.equal(out[:, 2], torch.zeros(B, D))
    torch.testing.assert_close(multi(x, mask)[:, 2], multi.Wo.bias.expand(B, D))
    (out.sum() + multi(x, mask).sum()).backward()
    assert torch.isfinite(x.grad).all()


def test_modules_are_ordinary_modules() -> None:
    x = torch.randn(B, L, D)
    for module in (SelfAttention(D, 4), MultiHeadSelfAttention(D, H)):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(twin(x), module(x), rtol=0, atol=0)
        other = type(module)(D, 4 if isinstance(module, SelfAttention) else H)
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
        assert "d_model=12" in repr(module)


@pytest.mark.parametrize(
    ("make", "mask_dtype"),
    [(SelfAttention, torch.float32), (MultiHeadSelfAttention, None), (MultiHeadSelfAttention, torch.bool)],
)
def test_compiles_without_a_graph_break(
    make: Callable[[int, int], torch.nn.Module], mask_dtype: torch.dtype | None
) -> None:
    module = make(D, H)
    x = torch.randn(B, L, D)
    mask = None if mask_dtype is None else torch.ones(L, L).tril().to(mask_dtype)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), module(x, mask))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(B, H, L, 8, dtype=dtype)
    actual = rotary_embedding(x, interleaved=interleaved, base=50.0)
    assert actual.dtype == dtype
    assert_accurate("turned", actual, turned(x, torch.arange(L), interleaved, 50.0))


def test_rotary_positions_broadcast() -> None:
    x = torch.randn(L, B, H, 4, dtype=torch.float64)
    expected = rotary_embedding(x.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
    torch.testing.assert_close(rotary_embedding(x, torch.arange(L).view(L, 1, 1)), expected)


X = torch.zeros(B, L, D)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "divisible by num_heads, got d_model=10", lambda: MultiHeadSelfAttention(10, 3)),
        (ValueError, "num_heads must be a positive integer", lambda: MultiHeadSelfAttention(10, 0)),
        (ValueError, "d_k must be a positive integer, got -1", lambda: SelfAttention(10, -1)),
        (TypeError, "x must be a tensor, got list", lambda: SelfAttention(D)([1.0])),
        (ValueError, r"at least 2 dimensions, got \(12,\)", lambda: MultiHeadSelfAttention(D, H)(X[0, 0])),
        (ValueError, r"x must be \(..., 12\).*got \(2, 5, 7\)", lambda: SelfAttention(D)(X[..., :7])),
        (TypeError, "torch.float32, got torch.float64", lambda: SelfAttention(D)(X.double())),
        (TypeError, "mask must be a tensor, got list", lambda: MultiHeadSelfAttention(D, H)(X, [1])),
        (TypeError, "bool, integer or float", lambda: SelfAttention(D)(X, torch.ones(L, L).cfloat())),
        (
            ValueError,
            r"mask must broadcast to \(2, 3, 5, 5\), got \(2, 5\); mask\[:, None, None, :\] does",
            lambda: MultiHeadSelfAttention(D, H)(X, torch.ones(B, L)),
        ),
        (
            ValueError,
            r"mask must broadcast to \(2, 3, 3\), got \(2, 3\); mask\[:, None, :\] does",
            lambda: SelfAttention(D)(torch.randn(2, 3, D), torch.ones(2, 3)),
        ),
        (
            ValueError,
            r"mask must broadcast to \(2, 5, 5\), got \(3, 5, 5\)$",
            lambda: SelfAttention(D)(X, torch.ones(3, L, L)),
        ),
        (
            ValueError,
            "an additive mask of 0 and -inf",
            lambda: MultiHeadSelfAttention(D, H)(X, torch.zeros(L, L).fill_diagonal_(-math.inf)),
        ),
        (TypeError, "x must be a float tensor", lambda: rotary_embedding(torch.ones(2, 2).long())),
        (ValueError, "even D", lambda: rotary_embedding(torch.ones(2, 3))),
        (ValueError, "base must be positive", lambda: rotary_embedding(torch.ones(2, 2), base=0.0)),
        (ValueError, r"to \(2,\), got", lambda: rotary_embedding(torch.ones(2, 2), torch.arange(3))),
        (TypeError, "must be a tensor, got range", lambda: rotary_embedding(torch.ones(2, 2), range(2))),
    ],
)
def test_errors(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()
