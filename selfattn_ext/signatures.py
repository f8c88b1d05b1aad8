"""What the operators of the compiled library take and return, as types: one for each, with their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "AppendToCache",
    "AttentionBackward",
    "AttentionBackwardBackward",
    "AttentionCapturedGradients",
    "AttentionForward",
    "AttentionJvp",
    "AttentionRefusals",
    "AttentionScores",
    "AttentionScoresBackward",
    "AttentionWeights",
    "AttentionWithCache",
    "BasicAttention",
    "BasicAttentionBackward",
    "BasicAttentionForward",
    "MaskedSoftmax",
    "MaskedSoftmaxBackward",
]


class AttentionForward(Protocol):
    """(query (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev), scale, *, need_residual, options)
    -> (out, row_max, row_sum, out_residual).

    out_residual is what rounding out to 16 bits took away; an empty tensor for other dtypes and where not
    asked for.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class AttentionRefusals(Protocol):
    """(query, key, value, scale, *, options) -> a line per CUDA kernel: why it does not take this call."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any) -> str: ...


class AttentionWeights(Protocol):
    """(query, key, row_max, row_sum, scale, *, options) -> weights (B,H,L,S)."""

    def __call__(
        self, query: Tensor, key: Tensor, row_max: Tensor, row_sum: Tensor, scale: float, **options: Any
    ) -> Tensor: ...


class AppendToCache(Protocol):
    """(key_cache, value_cache, key, value, seqlens, *, cu_seqlens, block_table): writes key and value
    (B,Hk,L,.) behind the seqlens (B,) rows that the caches hold.
    """

    def __call__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        key: Tensor,
        value: Tensor,
        seqlens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> None: ...


class AttentionWithCache(Protocol):
    """(query, key_cache, value_cache, key, value, scale, *, options) -> (out, row_max, row_sum).

    Appends key and value, then attends to the caches; seqlens_k are their lengths afterwards.
    """

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class AttentionBackward(Protocol):
    """(grad_out, query, ..., *, out_residual, grad_row, grad_weights, need_mask_grad, options) -> six
    gradients.

    They are those of query, key, value, attn_mask, alibi_slopes and sinks; an empty tensor stands for a
    gradient that was not asked for.
    """

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class AttentionJvp(Protocol):
    """(query, key, value, scale, *, tangent_query, tangent_key, tangent_value, tangent_mask, tangent_slopes,
    tangent_sinks, need_residual, options) -> (out, row_max, row_sum, out_residual, tangent_out, tangent_lse).

    A tangent that is missing is 0.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class AttentionBackwardBackward(Protocol):
    """(grad_out, query, ..., *, the same tangents, out_residual, grad_row, need_mask_grad, options) -> (six
    gradients as of attention_backward, tangent_out, tangent_lse).

    The gradients are those of ``(grad_out * tangent_out).sum() - (grad_row * tangent_lse).sum()``; Note
    [Second derivatives] in csrc/core/tangents.h says what they are good for.
    """

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class AttentionCapturedGradients(Protocol):
    """(grad_out, query, ..., *, captured_sizes, exclusive, out_residual, grad_row, grad_weights, options) ->
    gradients (N,) of the tensors in ``captured``, in float64.

    They lie one behind the other, each with so many elements as captured_sizes says; those with 0 are not
    computed. ``exclusive`` is the sum of 1, 2 and 4 where scores of unlike batch elements, heads and queries
    read unlike elements of each of these tensors.
    """

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        scale: float,
        *,
        captured_sizes: Sequence[int],
        exclusive: int = 0,
        **options: Any,
    ) -> Tensor: ...


class AttentionScores(Protocol):
    """(query, key, scale) -> scale * query @ key^T (B,H,L,S)."""

    def __call__(self, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor: ...


class AttentionScoresBackward(Protocol):
    """(grad_scores, query, key, scale) -> (grad_query, grad_key)."""

    def __call__(
        self, grad_scores: Tensor, query: Tensor, key: Tensor, scale: float, *, kernel_name: str = ""
    ) -> tuple[Tensor, Tensor]: ...


class MaskedSoftmax(Protocol):
    """(scores (B,H,L,S), scale, *, mask, is_causal, query_offset) -> softmax(scale * scores + mask)."""

    def __call__(
        self,
        scores: Tensor,
        scale: float,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        query_offset: int = 0,
        kernel_name: str = "",
    ) -> Tensor: ...


class MaskedSoftmaxBackward(Protocol):
    """(grad_weights, weights, scale) -> scale * weights * (grad - rowsum(weights * grad))."""

    def __call__(
        self, grad_weights: Tensor, weights: Tensor, scale: float, *, kernel_name: str = ""
    ) -> Tensor: ...


class BasicAttention(Protocol):
    """(query, key, value, scale, is_causal, enable_gqa) -> out, the default scale for None."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Tensor: ...


class BasicAttentionForward(Protocol):
    """The same -> (out, statistics (2,B,H,L), out_residual).

    statistics are row_max and row_sum; out_residual is None where the dtype has none.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class BasicAttentionBackward(Protocol):
    """(grad_out, query, ..., is_causal) -> the gradients of query, key and value."""

    def __call__(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        statistics: Tensor,
        out_residual: Tensor | None,
        scale: float | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
