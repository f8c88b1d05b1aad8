"""Rotary position embedding (Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864).

Pair p of the D/2 pairs of features is rotated by the angle position · base^(−2p/D), so that the dot product
of a rotated query and a rotated key depends on their positions only through the difference. Keys can
therefore be rotated once, before they enter a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import checks
from ..reference import accumulation_dtype

__all__ = ["RotaryFactors", "apply_rotary", "rotary_embedding", "rotary_factors"]


class RotaryFactors(NamedTuple):
    """Cosines and sines of the angles, (..., D / 2) each, which all layers of a step can share.

    Example:
        >>> import torch
        >>> from selfattn_ext import rotary_factors
        >>> cos, sin = rotary_factors(torch.tensor([0.0]), 4)
        >>> cos, sin
        (tensor([[1., 1.]]), tensor([[0., 0.]]))
    """

    cos: Tensor
    sin: Tensor


def rotary_embedding(
    x: Tensor, positions: Tensor | None = None, *, base: float = 10000.0, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of features by angles that grow with the position.

    Args:
        x: (..., L, D), any float dtype, D even.
        positions: the factors of the frequencies; any real dtype, broadcastable to x.shape[:-1]. By default
            0..L−1 along dimension −2.
        base: the wavelengths run from 2π to 2π · base.
        interleaved: pairs are neighbours (2p, 2p + 1) as in the paper; otherwise (p, p + D/2) as in GPT-NeoX
            and Llama. The two are the same up to a fixed order of the features.

    Returns:
        A tensor of x's shape and dtype. Angles are computed in float64, the rotation in float32 (float64 for
        float64) and rounded once.

    Raises:
        TypeError: x is not a float tensor.
        ValueError: D is odd, base is not positive, or positions do not broadcast.

    Example:
        >>> import torch
        >>> from selfattn_ext.nn import rotary_embedding
        >>> x = torch.randn(2, 4, 6, 32)  # (batch, heads, length, head dim)
        >>> torch.equal(rotary_embedding(x)[:, :, 0], x[:, :, 0])  # position 0 is not rotated
        True
    """
    _check_features(x)
    checks.flags(interleaved=interleaved)
    if x.shape[-1] % 2:
        raise ValueError(f"x must be (..., L, D) with even D, got {tuple(x.shape)}")
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    else:
        _check_broadcastable(positions, x)
        checks.on_device("positions", positions, "x", x.device)
    dtype = accumulation_dtype(x.dtype)
    return _rotated(x, rotary_factors(positions, x.shape[-1], base=base, dtype=dtype), interleaved)


def rotary_factors(
    positions: Tensor,
    features: int,
    *,
    base: float = 10000.0,
    frequencies: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> RotaryFactors:
    """Cosines and sines for :func:`selfattn_ext.apply_rotary`, which all layers of a step can share.

    Args:
        positions: any shape and real dtype.
        features: how many features are rotated, an even number up to the head dim.
        base: frequency p of features/2 is base^(−2p/features).
        frequencies: (features / 2,) in place of those of the base, for models that stretch some of them.
        dtype: of the result; float64 for float64 queries.

    Returns:
        cos and sin, ``(*positions.shape, features / 2)`` each, from angles in float64.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed.

    Example:
        >>> import torch
        >>> from selfattn_ext import apply_rotary, rotary_factors
        >>> factors = rotary_factors(torch.arange(6), 32)
        >>> factors.cos.shape
        torch.Size([6, 16])
        >>> query, key = (apply_rotary(x, factors) for x in torch.randn(2, 1, 4, 6, 32))
    """
    _check_real("positions", positions)
    features = checks.integer("features", features)
    if features <= 0 or features % 2:
        raise ValueError(f"features must be an even number above 0, got {features}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a float dtype, got {dtype}")
    if frequencies is None:
        base = checks.number("base", base)
        if base <= 0:
            raise ValueError(f"base must be positive, got {base}")
        exponents = torch.arange(0, features, 2, device=positions.device, dtype=torch.float64) / features
        frequencies = base**-exponents
    else:
        _check_real("frequencies", frequencies)
        if tuple(frequencies.shape) != (features // 2,):
            raise ValueError(
                f"frequencies must have the shape {(features // 2,)}, one per pair of features, got "
                f"{tuple(frequencies.shape)}"
            )
        checks.on_device("frequencies", frequencies, "positions", positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies.to(torch.float64)
    return RotaryFactors(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(
    x: Tensor,
    positions: Tensor | tuple[Tensor, Tensor],
    *,
    layout: str = "bhld",
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotates queries or keys whose sequences may have different positions, in batches or packed.

    Args:
        x: (B, H, L, D), or (B, L, H, D) with layout "blhd", or packed tokens (total, H, D); any float dtype.
        positions: (L,) or (B, L), for packed tokens (total,): the position of each token in its sequence, as
            :attr:`selfattn_ext.KVCache.positions` gives it, or the result of
            :func:`selfattn_ext.rotary_factors` for such positions. If the factors are for fewer features than
            D, the remaining ones stay unchanged.
        layout: "bhld" or "blhd", of x with four dimensions.
        base, interleaved: as in :func:`selfattn_ext.nn.rotary_embedding`; base is ignored if factors are
            given.

    Returns:
        A tensor of x's shape and dtype, rounded once.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed.

    Example:
        >>> import torch
        >>> from selfattn_ext import apply_rotary
        >>> positions = torch.tensor([[0, 1, 2], [7, 8, 9]])  # two sequences, which have come to 0 and to 7
        >>> apply_rotary(torch.randn(2, 4, 3, 32), positions).shape
        torch.Size([2, 4, 3, 32])
    """
    _check_features(x)
    checks.flags(interleaved=interleaved)
    if layout not in ("bhld", "blhd"):
        raise ValueError(f'layout must be "bhld" or "blhd", got {layout!r}')
    if x.dim() not in (3, 4):
        raise ValueError(
            f"x must be (B, H, L, D), (B, L, H, D) or packed (total, H, D), got {tuple(x.shape)}"
        )
    if isinstance(positions, Tensor):
        if x.shape[-1] % 2 or x.shape[-1] == 0:
            raise ValueError(f"x must have an even number of features D above 0, got {tuple(x.shape)}")
        factors = rotary_factors(positions, x.shape[-1], base=base, dtype=accumulation_dtype(x.dtype))
    elif isinstance(positions, tuple) and len(positions) == 2:
        factors = RotaryFactors(*positions)
        for name, part in factors._asdict().items():
            if not isinstance(part, Tensor) or not part.is_floating_point() or part.shape != factors[0].shape:
                raise TypeError(
                    "positions must be a tensor, or two float tensors of one shape, as from rotary_factors, "
                    f"but {name} is {checks.described(part)}"
                )
    else:
        raise TypeError(f"positions must be a tensor or what rotary_factors returns, got {_kind(positions)}")
    # With 16-bit factors, as models keep them, every product with a 16-bit x would be rounded.
    dtype = torch.promote_types(factors[0].dtype, accumulation_dtype(x.dtype))
    factors = RotaryFactors(*(part.to(dtype) for part in factors))
    cos, sin = factors
    checks.on_device("positions", cos, "x", x.device)
    heads = -3 if x.dim() == 4 and layout == "bhld" else -2  # the dimension of x's heads
    tokens = tuple(x.shape[:-3] + x.shape[-2:-1] if heads == -3 else x.shape[:-2])
    given = tuple(cos.shape[:-1])
    # Only sizes that must be equal are compared, as torch.export remembers every answer about a size.
    if len(given) == 1:
        fits = given == tokens[-1:]
    else:
        fits = len(given) == len(tokens) and given[-1] == tokens[-1] and given[0] in (1, tokens[0])
    if not fits:
        allowed = f"{tokens} or {tokens[1:]}" if x.dim() == 4 else f"{tokens}"
        raise ValueError(f"positions must be {allowed} for x of shape {tuple(x.shape)}, got {given}")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"positions has factors for {2 * cos.shape[-1]} features, more than the {x.shape[-1]} of x"
        )
    if len(given) == 1 and heads == -3:
        return _rotated(x, factors, interleaved)
    return _rotated(x, RotaryFactors(cos.unsqueeze(heads), sin.unsqueeze(heads)), interleaved)


def _rotated(x: Tensor, factors: RotaryFactors, interleaved: bool) -> Tensor:
    cos, sin = factors
    features = 2 * cos.shape[-1]
    turned = x if features == x.shape[-1] else x[..., :features]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return rotated if turned is x else torch.cat((rotated, x[..., features:]), dim=-1)


def _check_features(x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a float tensor, got {_kind(x)}")
    if x.dim() < 2:
        raise ValueError(f"x must be (..., L, D) with even D, got {tuple(x.shape)}")


def _check_real(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or value.is_complex():
        raise TypeError(f"{name} must be a tensor of real numbers, got {_kind(value)}")


def _check_broadcastable(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor, got {_kind(positions)}")
    wanted, given = tuple(x.shape[:-1]), tuple(positions.shape)
    if len(given) > len(wanted) or any(
        g not in (1, w) for g, w in zip(given[::-1], wanted[::-1], strict=False)
    ):
        raise ValueError(f"positions must broadcast to {wanted}, got {given}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
