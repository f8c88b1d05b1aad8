"""The positional rules of attention (causal, window, ALiBi) as small frozen dataclasses.

Query ``i`` stands at position ``i + query_offset`` among the keys; key ``j`` stands at ``j``. The rules
compare these positions, so one offset places a chunk of queries anywhere in a longer sequence
(``query_offset=0`` is PyTorch's upper-left causal alignment, ``S - L`` the lower-right one).

The kernels evaluate these rules from their numbers and never build them as tensors. ``visible`` and ``bias``
build the tensors for the reference formula, for tests and for pictures; ``options`` gives the keyword
arguments that ask :func:`selfattn_ext.scaled_dot_product_attention` for the same rule::

    rule = Window(left=128, right=0)
    out = selfattn_ext.scaled_dot_product_attention(query, key, value, **rule.options())
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Alibi", "Causal", "Window", "alibi_head_slopes"]

Device = torch.device | str | None


def _distance(query_length: int, key_length: int, query_offset: int, device: Device) -> Tensor:
    """``j - (i + query_offset)`` for every query i and key j, int64 of shape (L, S)."""
    rows = torch.arange(query_length, device=device).unsqueeze(-1) + query_offset
    return torch.arange(key_length, device=device) - rows


@dataclass(frozen=True)
class Causal:
    """Query i sees the keys ``j <= i + query_offset``.

    Args:
        query_offset: position of query 0 among the keys.

    Example:
        >>> from selfattn_ext.masks import Causal
        >>> Causal().visible(2, 3)
        tensor([[ True, False, False],
                [ True,  True, False]])
        >>> Causal(query_offset=1).options()
        {'is_causal': True, 'query_offset': 1}
    """

    query_offset: int = 0

    def visible(self, query_length: int, key_length: int, device: Device = None) -> Tensor:
        """The rule as a mask.

        Args:
            query_length, key_length: L and S.
            device: the device of the mask.

        Returns:
            A bool tensor (L, S), True where the key is seen.
        """
        return _distance(query_length, key_length, self.query_offset, device) <= 0

    def options(self) -> dict[str, Any]:
        """Keyword arguments for :func:`selfattn_ext.scaled_dot_product_attention`.

        Returns:
            is_causal and query_offset.
        """
        return {"is_causal": True, "query_offset": self.query_offset}


@dataclass(frozen=True)
class Window:
    """Query i sees the keys ``i + query_offset - left <= j <= i + query_offset + right``; -1 means no limit.

    Sliding-window attention as in Longformer (Beltagy et al. 2020) and Mistral (Jiang et al. 2023); the pair
    has the meaning of FlashAttention's ``window_size``.

    Args:
        left: how many keys before its own position a query sees; -1 for all.
        right: how many keys after its own position a query sees; -1 for all.
        query_offset: position of query 0 among the keys.

    Example:
        >>> import torch, selfattn_ext
        >>> from selfattn_ext.masks import Window
        >>> rule = Window(left=1, right=0)
        >>> rule.visible(3, 3)
        tensor([[ True, False, False],
                [ True,  True, False],
                [False,  True,  True]])
        >>> query, key, value = torch.randn(3, 1, 2, 3, 8).unbind()
        >>> out = selfattn_ext.scaled_dot_product_attention(query, key, value, **rule.options())
    """

    left: int = -1
    right: int = -1
    query_offset: int = 0

    def visible(self, query_length: int, key_length: int, device: Device = None) -> Tensor:
        """The rule as a mask.

        Args:
            query_length, key_length: L and S.
            device: the device of the mask.

        Returns:
            A bool tensor (L, S), True where the key is seen.
        """
        distance = _distance(query_length, key_length, self.query_offset, device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        return seen

    def options(self) -> dict[str, Any]:
        """Keyword arguments for :func:`selfattn_ext.scaled_dot_product_attention`.

        Returns:
            window_size and query_offset.
        """
        return {"window_size": (self.left, self.right), "query_offset": self.query_offset}


def alibi_head_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes that Press et al. (2022), "Train Short, Test Long", give to ``num_heads`` heads.

    For a power of two, head h has the slope ``2 ** (-8 (h + 1) / num_heads)``; for other numbers the slopes
    of the next lower power of two are followed by every other slope of the next higher one.

    Args:
        num_heads: number of query heads, at least 1.

    Returns:
        One positive slope per head.

    Raises:
        ValueError: num_heads is less than 1.

    Example:
        >>> from selfattn_ext.masks import alibi_head_slopes
        >>> alibi_head_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / lower) for head in range(lower)]
    between = [2.0 ** (-8.0 * (head + 1) / (2 * lower)) for head in range(0, 2 * lower, 2)]
    return tuple(slopes + between[: num_heads - lower])


@dataclass(frozen=True)
class Alibi:
    """Adds ``-slope * |i + query_offset - j|`` to the scores of each head (Press et al. 2022).

    Args:
        slopes: one slope per query head.
        query_offset: position of query 0 among the keys.

    Example:
        >>> import torch, selfattn_ext
        >>> from selfattn_ext.masks import Alibi
        >>> rule = Alibi.for_heads(4)
        >>> rule.bias(2, 2)[0]
        tensor([[-0.0000, -0.2500],
                [-0.2500, -0.0000]])
        >>> query, key, value = torch.randn(3, 1, 4, 6, 8).unbind()
        >>> out = selfattn_ext.scaled_dot_product_attention(query, key, value, **rule.options())
    """

    slopes: tuple[float, ...]
    query_offset: int = 0

    @classmethod
    def for_heads(cls, num_heads: int, query_offset: int = 0) -> Alibi:
        """The rule with the slopes that :func:`alibi_head_slopes` gives to ``num_heads`` heads.

        Args:
            num_heads: number of query heads, at least 1.
            query_offset: position of query 0 among the keys.

        Raises:
            ValueError: num_heads is less than 1.
        """
        return cls(alibi_head_slopes(num_heads), query_offset)

    def bias(
        self,
        query_length: int,
        key_length: int,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The rule as a bias that is added to the scores.

        Args:
            query_length, key_length: L and S.
            device, dtype: those of the bias.

        Returns:
            (H, L, S).
        """
        slopes = torch.tensor(self.slopes, dtype=dtype, device=device)
        return alibi_bias(slopes, query_length, key_length, self.query_offset)

    def options(self, device: Device = None) -> dict[str, Any]:
        """Keyword arguments for :func:`selfattn_ext.scaled_dot_product_attention`.

        Call this once before a training loop: copying numbers to a GPU waits for it, and a CUDA graph cannot
        record such a copy.

        Args:
            device: that of the query.

        Returns:
            alibi_slopes, a float32 tensor (H,), and query_offset.
        """
        slopes = torch.tensor(self.slopes, device=device)
        return {"alibi_slopes": slopes, "query_offset": self.query_offset}


def alibi_bias(slopes: Tensor, query_length: int, key_length: int, query_offset: int = 0) -> Tensor:
    """Returns ``-slope * |i + query_offset - j|`` as a tensor that is added to the scores.

    Args:
        slopes: (..., H), any float dtype.
        query_length, key_length: L and S.
        query_offset: position of query 0 among the keys.

    Returns:
        (..., H, L, S) in the dtype and on the device of the slopes, differentiable in them.
    """
    distance = _distance(query_length, key_length, query_offset, slopes.device).abs().to(slopes.dtype)
    return -slopes[..., None, None] * distance


def visible_pairs(
    query_length: int,
    key_length: int,
    *,
    is_causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    query_offset: int = 0,
    device: Device = None,
) -> Tensor | None:
    """Returns the causal rule and the window together as one mask.

    Args:
        query_length, key_length: L and S.
        is_causal: query i sees only keys ``j <= i + query_offset``.
        window_size: (left, right) as in :class:`Window`; -1 means no limit.
        query_offset: position of query 0 among the keys.
        device: the device of the mask.

    Returns:
        A bool tensor (L, S), True where the key is seen, or None when every query sees every key.
    """
    left, right = window_size
    if is_causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    return Window(left, right, query_offset).visible(query_length, key_length, device)


def selected_pairs(
    indices: Tensor, query_length: int, key_length: int, heads: int, block_size: tuple[int, int]
) -> Tensor:
    """Returns which keys each query selects as a mask.

    Args:
        indices: (B, Hs, rows, K), any integer dtype: numbers of blocks of keys, -1 for none. Hs divides
            ``heads``.
        query_length, key_length, heads: L, S and H.
        block_size: how many neighbouring queries share a row, and how many keys a block has.

    Returns:
        A bool tensor (B, 1 or H, L, S), True where the key is selected.
    """
    queries, keys = block_size
    blocks = -(-key_length // keys)
    marked = indices.new_zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool)
    marked.scatter_(-1, indices.long() % (blocks + 1), True)  # -1 marks the last place
    by_key = marked[..., :blocks].repeat_interleave(keys, -1)[..., :key_length]
    by_query = by_key.repeat_interleave(queries, -2)[..., :query_length, :]
    listed = indices.size(1)
    return by_query if listed in (1, heads) else by_query.repeat_interleave(heads // listed, 1)
