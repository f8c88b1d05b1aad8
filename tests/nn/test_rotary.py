"""apply_rotary and rotary_factors against the formula in float64, a product of complex numbers."""

from __future__ import annotations

from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import KVCache, apply_rotary, nn, rotary_factors


def turned(x: Tensor, positions: Tensor, interleaved: bool, base: float = 10000.0) -> Tensor:
    """Rotates x (..., D) by the position of each of its vectors."""
    pairs = x.shape[-1] // 2
    parts = x.double().unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    both = parts.unbind(-1) if interleaved else parts.unbind(-2)
    angles = positions.double()[..., None] * base ** -(torch.arange(0, 2 * pairs, 2).double() / (2 * pairs))
    number = torch.complex(*both) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack((number.real, number.imag), -1 if interleaved else -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_of_sequences(dtype: torch.dtype, layout: str, interleaved: bool) -> None:
    tokens = torch.randn(3, 5, 4, 16).to(dtype)  # batch, length, heads
    positions = torch.randint(0, 5000, (3, 5))
    expected = turned(tokens, positions[:, :, None], interleaved)
    x, places = tokens, positions
    if layout == "bhld":
        x, expected = tokens.transpose(1, 2), expected.transpose(1, 2)
    elif layout == "packed":
        x, places, expected = tokens.flatten(0, 1), positions.flatten(), expected.flatten(0, 1)
    keywords = {} if layout == "packed" else {"layout": layout}
    result = apply_rotary(x, places, interleaved=interleaved, **keywords)
    assert_accurate("rotated", result, expected)
    factors = rotary_factors(places, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(apply_rotary(x, factors, interleaved=interleaved, **keywords), result)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_of_16_bits_are_numbers_like_others(dtype: torch.dtype, interleaved: bool) -> None:
    """FlashAttention needs tables of the query's dtype; with them, too, the result is rounded once."""
    x = torch.randn(2, 3, 7, 16).to(dtype)
    table = [part.to(dtype) for part in rotary_factors(torch.arange(100), 16)]
    places = torch.randint(0, 100, (2, 7))
    result = apply_rotary(x, (table[0][places], table[1][places]), interleaved=interleaved)
    wide = apply_rotary(
        x.double(), (table[0][places].double(), table[1][places].double()), interleaved=interleaved
    )
    assert result.dtype == dtype
    # The bound is half a unit in the last place, plus the error of the sum in float32 before.
    assert ((result.double() - wide).abs() <= wide.abs() * torch.finfo(dtype).eps * 0.501 + 1e-6).all()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_positions_that_the_batch_shares(layout: str) -> None:
    x = torch.randn(2, 5, 5, 8)
    positions = torch.tensor([3, 1, 4, 1, 5])
    wide = apply_rotary(x, positions.expand(2, 5), layout=layout)
    assert torch.equal(apply_rotary(x, positions, layout=layout), wide)
    assert torch.equal(apply_rotary(x, positions[None], layout=layout), wide)
    # The layer's own function gives the same.
    own = nn.rotary_embedding(x, positions if layout == "bhld" else positions[:, None])
    assert torch.equal(wide, own)


def test_some_features_stay() -> None:
    x, positions = torch.randn(2, 3, 4, 12), torch.arange(4)
    result = apply_rotary(x, rotary_factors(positions, 8, base=100.0))
    assert torch.equal(result[..., 8:], x[..., 8:])
    assert torch.equal(result[..., :8], apply_rotary(x[..., :8], positions, base=100.0))


def test_frequencies_in_place_of_a_base() -> None:
    x, positions = torch.randn(2, 3, 4, 8), torch.arange(4)
    frequencies = 50.0 ** -(torch.arange(4).double() / 4)
    result = apply_rotary(x, rotary_factors(positions, 8, frequencies=frequencies))
    assert_accurate("rotated", result, turned(x, positions, False, 50.0))


def test_scores_depend_on_distances_alone() -> None:
    """The error may be that of the formula, whose angles are also rounded, the larger ones more."""
    query, key = torch.randn(2, 1, 1, 6, 32, dtype=torch.float64).unbind(0)
    near, far = torch.arange(6), torch.arange(6) + 100_000
    exact, peer = (turned(query, at, False) @ turned(key, at, False).mT for at in (near, far))
    for places in (near, far):
        scores = apply_rotary(query, places) @ apply_rotary(key, places).mT
        assert_accurate("scores", scores, exact, peer)


@pytest.mark.parametrize("page_size", [None, 2])
def test_with_a_cache(page_size: int | None) -> None:
    """Keys are rotated before they enter the cache; positions come from it, in batches and packed."""
    cache = KVCache(1, 2, 2, 8, 8, page_size=page_size)
    query, key, value = torch.randn(3, 2, 2, 8, 8).unbind(0)  # batch, heads, length
    turned_query, turned_key = apply_rotary(query, torch.arange(8)), apply_rotary(key, torch.arange(8))
    cache.extend([3, 5])
    packed = [torch.cat([x[0, :, :3], x[1, :, :5]], 1).transpose(0, 1) for x in (query, key, value)]
    places = cache.packed_positions
    first = cache.attend(0, apply_rotary(packed[0], places), apply_rotary(packed[1], places), packed[2])
    cache.extend()
    step = [torch.stack([x[0, :, 3:4], x[1, :, 5:6]]) for x in (query, key, value)]
    places = cache.positions
    second = cache.attend(0, apply_rotary(step[0], places), apply_rotary(step[1], places), step[2])
    hidden = torch.ones(8, 8).triu(1).bool()

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ value

    for b, length in enumerate((3, 5)):
        three = (turned_query[b], turned_key[b], value[b])
        exact, peer = formula(*(tensor.double() for tensor in three)), formula(*three)
        mine = first[:3] if b == 0 else first[3:]
        assert_accurate("prompt", mine.transpose(0, 1), exact[:, :length], peer[:, :length])
        assert_accurate("step", second[b], exact[:, length : length + 1], peer[:, length : length + 1])


X, P = torch.randn(2, 3, 4, 8), torch.arange(4)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "x must be a float tensor, got torch.int64", lambda: apply_rotary(P.view(2, 2), P)),
        (ValueError, r"x must be \(B, H, L, D\)", lambda: apply_rotary(X[0, 0], P)),
        (ValueError, "even number of features", lambda: apply_rotary(X[..., :7], P)),
        (ValueError, "layout must be", lambda: apply_rotary(X, P, layout="lbhd")),
        (ValueError, r"\(2, 4\) or \(4,\) for x .* got \(3,\)", lambda: apply_rotary(X, P[:3])),
        (ValueError, r"must be \(3,\) for x", lambda: apply_rotary(X[0].transpose(0, 1)[:3], P)),
        (ValueError, r"\(2, 3\) or \(3,\)", lambda: apply_rotary(X, P, layout="blhd")),
        (ValueError, "for 16 features, more than the 8 of x", lambda: apply_rotary(X, rotary_factors(P, 16))),
        (TypeError, "positions must be a tensor or what", lambda: apply_rotary(X, range(4))),
        (TypeError, "tensor of real numbers, got torch.complex64", lambda: rotary_factors(P * 1j, 4)),
        (ValueError, "even number above 0, got 3", lambda: rotary_factors(P, 3)),
        (ValueError, "base must be positive", lambda: rotary_factors(P, 4, base=-1.0)),
        (ValueError, "base must be finite", lambda: rotary_factors(P, 4, base=float("inf"))),
        (TypeError, "base must be a real number, got NoneType", lambda: rotary_factors(P, 4, base=None)),
        (TypeError, "features must be an int, got float 4.0", lambda: rotary_factors(P, 4.0)),
        (TypeError, "dtype must be a float dtype", lambda: rotary_factors(P, 4, dtype=torch.int32)),
        (TypeError, "frequencies must be a tensor", lambda: rotary_factors(P, 4, frequencies=[1.0, 2.0])),
        (
            ValueError,
            f"frequencies is on meta and positions on {gpu.DEVICE}",
            lambda: rotary_factors(P, 4, frequencies=torch.ones(2, device="meta")),
        ),
        (ValueError, f"positions is on meta and x on {gpu.DEVICE}", lambda: apply_rotary(X, P.to("meta"))),
        (ValueError, r"D above 0, got \(2, 3, 4, 0\)", lambda: apply_rotary(X[..., :0], P)),
        (
            TypeError,
            r"one shape, .* but sin is .*\(4, 3\)",
            lambda: apply_rotary(X, (X[0, 0], X[0, 0, :, :3])),
        ),
        (TypeError, "one shape, .* but cos is list", lambda: apply_rotary(X, ([1.0], [1.0]))),
        (ValueError, r"shape \(2,\), one per pair", lambda: rotary_factors(P, 4, frequencies=torch.ones(3))),
    ],
)
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()
