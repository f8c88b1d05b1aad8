"""A prompt that is cut into calls, and checks of its rows, for the tests of batch_invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from comparisons import assert_same
from torch import Tensor

from selfattn_ext import scaled_dot_product_attention

LENGTH = 163  # a prime: more than two blocks of keys, and three strips of queries of every width
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Prompt:
    """The tensors and options of a sequence of LENGTH tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0  # the position of the first query; that of the first key is 0

    def attend(self, begin: int, end: int, keys: int | None = None) -> tuple[Tensor, ...]:
        """Computes causal out, weights and log-sum-exp of the queries begin .. end - 1."""
        keys = end if keys is None else keys
        mask = self.mask
        if mask is not None:
            mask = mask[..., :keys]
            mask = mask if mask.shape[-2] == 1 else mask[..., begin:end, :]
        results: tuple[Tensor, ...] = scaled_dot_product_attention(
            self.query[:, :, begin:end],
            self.key[:, :, :keys],
            self.value[:, :, :keys],
            mask,
            is_causal=True,
            enable_gqa=True,
            query_offset=self.first + begin,
            return_weights=True,
            return_lse=True,
            **self.options,
        )
        return results

    def chunks(self, ends: list[int] | tuple[int, ...]) -> Iterator[tuple[int, int]]:
        return zip([0, *ends[:-1]], ends, strict=True)


def prompt(
    dtype: torch.dtype, head_dim: int = 48, value_dim: int = 40, mask: Tensor | None = None, **options: Any
) -> Prompt:
    """Draws random tensors; neither the scale nor the head dims are powers of two."""
    query = torch.randn(1, HEADS, LENGTH, head_dim).to(dtype)
    key = torch.randn(1, KV_HEADS, LENGTH, head_dim).to(dtype)
    value = torch.randn(1, KV_HEADS, LENGTH, value_dim).to(dtype)
    return Prompt(query, key, value, mask, options)


def assert_cuts(it: Prompt, cuts: list[list[int] | tuple[int, ...]]) -> None:
    """Asserts that every cut of the prompt gives the rows of the whole, and weights at the visible keys."""
    out, weights, lse = it.attend(0, LENGTH)
    for ends in cuts:
        for begin, end in it.chunks(ends):
            rows = slice(begin, end)
            part = it.attend(begin, end)
            found = part[0], part[1].tril(begin), part[2]
            whole = out[:, :, rows], weights[:, :, rows, :end].tril(begin), lse[:, :, rows]
            assert_same(found, whole, f"of rows {begin} to {end}")
