"""The weights that dropout keeps, from counter-based random numbers, in plain PyTorch operations.

Its names are public in :mod:`selfattn_ext.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout_keep", "philox4x32"]

_WORD = 0xFFFFFFFF


def dropout_keep(seed: Tensor, p: float, shape: tuple[int, int, int, int], first_batch: int = 0) -> Tensor:
    """The weights that survive dropout, the same on every device.

    Args:
        seed: int64 of one element, or of five: the seed, and the numbers that the first batch element, head,
            query and key count as, the last of these a multiple of 4.
        p: the probability with which a weight is dropped.
        shape: (B, H, L, S).
        first_batch: the number that the first batch element counts as.

    Returns:
        A bool tensor of that shape, True for weights that are kept.

    The random words are those of Philox4x32-7 with the key (low, high 32 bits of seed) and the counter
    (j >> 2, i, h, b). Key j takes the word ``j & 3`` and is dropped if that is below ``floor(p * 2**32)``.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> keep = reference.dropout_keep(torch.tensor([7]), 0.25, (2, 4, 64, 64))
        >>> keep.dtype, abs(keep.float().mean().item() - 0.75) < 0.02
        (torch.bool, True)
    """
    batch, heads, length, keys = shape
    origin = seed[1:] if seed.numel() == 5 else seed.new_zeros(4)
    seed = seed.reshape(-1)[0]

    def along(size: int, dim: int) -> Tensor:
        return torch.arange(size, device=seed.device).reshape([-1 if d == dim else 1 for d in range(4)])

    counter = (
        along((keys + 3) // 4, 3) + (origin[3] >> 2),
        along(length, 2) + origin[2],
        along(heads, 1) + origin[1],
        along(batch, 0) + (origin[0] + first_batch),
    )
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    flat = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
    return flat[..., :keys] >= int(p * 2**32)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The counter-based generator Philox4x32 of Salmon et al. (2011), "Parallel random numbers: as easy as 1,
    2, 3".

    Args:
        counter, key: four and two int64 tensors that hold 32-bit words and broadcast.
        rounds: the number of rounds.

    Returns:
        Four int64 tensors of random 32-bit words.

    Example:
        >>> import torch
        >>> from selfattn_ext import reference
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [hex(word) for word in reference.philox4x32((zero,) * 4, (zero,) * 2, rounds=10)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(rounds):
        if index:
            k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
        # The 64-bit product may overflow into the sign; shift and mask recover both words nevertheless.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
    return c0, c1, c2, c3
