"""The arguments of a call as the user gave them, in one value.

A public function names its arguments in its signature and where it makes this value. The code that brings
them into the operators' form, explains a refusal, or hands the call to another library takes the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "DEFAULT_QUERY_OFFSET",
    "DEFAULT_SOFTCAP",
    "DEFAULT_WINDOW",
    "AttentionCall",
    "AttentionOptions",
    "KVCacheCall",
    "OptionalTensor",
    "PackedCall",
    "SparseCall",
]

OptionalTensor = Tensor | None

#: The default query_offset. It is compared by identity, as asking a compiler's symbol ties the graph to it.
DEFAULT_QUERY_OFFSET = 0
#: The default window_size, compared by identity as well.
DEFAULT_WINDOW = (-1, -1)
#: The default softcap, compared by identity as well.
DEFAULT_SOFTCAP = 0.0


class AttentionOptions(NamedTuple):
    """The arguments of every attention function beside its tensors, in the order of the signatures."""

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window_size: Sequence[int] = DEFAULT_WINDOW
    softcap: float = DEFAULT_SOFTCAP
    alibi_slopes: OptionalTensor = None
    sinks: OptionalTensor = None
    query_offset: int | Tensor | None = DEFAULT_QUERY_OFFSET
    return_weights: bool = False
    return_lse: bool = False
    return_aux: Any = None


class AttentionCall(NamedTuple):
    """A call of :func:`selfattn_ext.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions


class PackedCall(NamedTuple):
    """A call of :func:`selfattn_ext.varlen_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: OptionalTensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: OptionalTensor
    block_table: OptionalTensor
    score_mod: Any
    mask_mod: Any
    options: AttentionOptions
    indices: OptionalTensor = None
    block_indices: OptionalTensor = None
    block_size: Any = None


class SparseCall(NamedTuple):
    """A call of :func:`selfattn_ext.sparse_attention`, or of a step of a KVCache."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions
    indices: OptionalTensor
    block_indices: OptionalTensor
    block_size: Any

    def dense(self) -> AttentionCall:
        """Returns the call that sees all keys."""
        return AttentionCall(*self[:4])


class KVCacheCall(NamedTuple):
    """A call of :func:`selfattn_ext.attention_with_kvcache`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    key: OptionalTensor
    value: OptionalTensor
    cache_seqlens: int | Tensor | None
    block_table: OptionalTensor
    layout: str | None
    score_mod: Any
    mask_mod: Any
    options: AttentionOptions
    indices: OptionalTensor = None
    block_indices: OptionalTensor = None
    block_size: Any = None
