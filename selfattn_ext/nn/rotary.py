"""Rotary position embedding (Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import accumulation_dtype

__all__ = ["rotary_embedding"]


def rotary_embedding(
    x: Tensor, positions: Tensor | None = None, *, base: float = 10000.0, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of features by angles that grow with the position.

    Pair p of D/2 is turned by position · base^(−2p/D), so that the dot product of a rotated query and a
    rotated key depends on their positions only through the difference.

    Args:
        x: (..., L, D), any float dtype, D even.
        positions: what to multiply the frequencies by; any real dtype, broadcastable to x.shape[:-1]. By
            default 0..L−1 along dimension −2.
        base: the wavelengths run from 2π to 2π · base.
        interleaved: pairs are neighbours (2p, 2p + 1) as in the paper; otherwise (p, p + D/2) as in GPT-NeoX
            and Llama. The two are the same up to a fixed order of the features.

    Returns:
        A tensor of x's shape and dtype. Angles are computed in float64, the rotation in float32 (float64 for
        float64) and rounded once.

    Raises:
        TypeError: x is not a float tensor.
        ValueError: D is odd, base is not positive, or positions do not broadcast.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float tensor, got {given}")
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"x must be (..., L, D) with even D, got {tuple(x.shape)}")
    if not base > 0:
        raise ValueError(f"base must be positive, got {base}")
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    else:
        _check_broadcastable(positions, x)
    features = x.shape[-1]
    exponents = torch.arange(0, features, 2, device=x.device, dtype=torch.float64) / features
    angles = positions.to(torch.float64).unsqueeze(-1) * base**-exponents
    dtype = accumulation_dtype(x.dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _check_broadcastable(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor, got {type(positions).__name__}")
    wanted, given = tuple(x.shape[:-1]), tuple(positions.shape)
    if len(given) > len(wanted) or any(
        g not in (1, w) for g, w in zip(given[::-1], wanted[::-1], strict=False)
    ):
        raise ValueError(f"positions must broadcast to {wanted}, got {given}")
