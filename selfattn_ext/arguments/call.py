"""The arguments of a call, as a user gave them: one value for all that is done with them.

A public function names its arguments in its signature and where it makes this value. What brings them into
the operators' form, what explains a refusal and what hands the call to another library take the value.
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
]

OptionalTensor = Tensor | None

#: The default query_offset, to be compared by identity: whether a compiler's symbol is 0 must not be asked.
DEFAULT_QUERY_OFFSET = 0
#: The same for window_size,
DEFAULT_WINDOW = (-1, -1)
#: and for softcap.
DEFAULT_SOFTCAP = 0.0


class AttentionOptions(NamedTuple):
    """What every attention function takes beside its tensors, in the order of their signatures."""

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


class AttentionCall(NamedTuple):
    """A call of :func:`selfattn_ext.scaled_dot_product_attention`, or of a step of a KVCache."""

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
