"""The operators that write keys and values into a cache, and attend to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..fake_results import empty_like, empty_statistic, refuse_meta
from .registration import direct, operator

__all__ = [
    "append_to_cache",
    "attention_with_cache",
    "direct_with_cache",
    "statistics_with_cache",
]


@operator
def append_to_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Writes key and value (B,Hk,L,.) behind the seqlens (B,) rows that the caches hold."""
    refuse_meta(key_cache, value_cache, key, value)


@operator
def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Appends key and value, then attends to the caches, whose lengths seqlens_k gives as they are then
    -> out, row_max, row_sum.
    """
    refuse_meta(query, key_cache, value_cache, key, value, *options.values())
    return (
        empty_like(query, query.shape[2], value_cache.shape[3]),
        empty_statistic(query),
        empty_statistic(query),
    )


direct_with_cache = direct(attention_with_cache)


@operator
def statistics_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of attention_with_cache, row_top and row_mean."""
    refuse_meta(query, key_cache, value_cache, key, value, *options.values())
    out = empty_like(query, query.shape[2], value_cache.shape[3])
    row_max, row_sum, row_top, row_mean = (empty_statistic(query) for _ in range(4))
    return out, row_max, row_sum, row_top, row_mean
