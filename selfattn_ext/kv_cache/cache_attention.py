"""attention_with_kvcache: attention to a cache, in slots or in pages, which it extends in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..arguments import (
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    REFUSALS,
    AttentionOptions,
    Keywords,
    KVCacheCall,
    OptionalTensor,
    call_checks,
    checks,
    explained,
    keywords_for,
    overrides,
    position,
    shapes,
    split_blocks,
)
from ..attend import results
from ..sparse.sequences import with_selection
from . import cache_checks
from .step import attend_to_cache, page_numbers
from .step_with_functions import attend_with_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.overloads import ForAny, ForAux, ForLse, ForOut, ForWeights, ForWeightsAndLse
    from ..flex.flex_call import MaskMod, ScoreMod
    from ..reference_statistics import AuxOutput

__all__ = ["attention_with_kvcache"]

#: The keywords that depend on the positions of queries.
_POSITIONAL = frozenset(("is_causal", "window_left", "window_right"))

# Looked up once: an attribute chain costs as much as the call at its end.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_overridden = torch.overrides.has_torch_function_variadic
_fits = cache_checks.fits
_known = shapes.known


@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForOut],
) -> Tensor: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeights],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForLse],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeightsAndLse],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAux],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None = ...,
    value: Tensor | None = ..., cache_seqlens: int | Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, layout: str | None = ..., query_offset: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAny],
) -> Any: ...  # fmt: skip


def attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str | None = None,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """Attention of a step of a decoder: writes the new keys and values into the cache, then attends to it.

    Every sequence of the batch has a length of its own.

    Args:
        query: (B, H, L, E), any number L of queries per sequence, float64, float32, bfloat16 or float16; see
            layout.
        key_cache: (B, Hk, capacity, E), same dtype; with a block_table pages (N, Hk, page_size, E). Written
            in place: any strides, but the last is 1, no two elements share memory (as in expanded tensors),
            and it is no negative view.
        value_cache: the same with Ev. It has no element of key_cache in its memory, unless all of it are
            some features of key_cache, and value is the same view of key.
        key, value: (B, Hk, L_new, E) and (B, Hk, L_new, Ev), the rows to write after the cache_seqlens keys
            of each sequence; or neither. These and other tensors may be views of the caches: they count as
            they were before the call.
        cache_seqlens: how many keys each sequence has before the new ones: an int, or int32 or int64 (B,).
            Needed with key. None: the whole cache. It is not updated: the caller adds L_new.
        block_table: int32 or int64 (B, pages of a sequence): key j of sequence b is row j % page_size of the
            page block_table[b, j // page_size]. Entries past the last key are not looked at.
        attn_mask: broadcastable to (B, H, L, capacity), in both layouts; the capacity of a paged sequence is
            pages of a sequence * page_size.
        dropout_p, scale: as in :func:`selfattn_ext.scaled_dot_product_attention`.
        is_causal: query i sees keys ``j <= i + query_offset``: with the default offset all that came before
            it, and itself.
        enable_gqa: accepted for compatibility with other functions, and ignored: Hk may always divide H.
        layout: "bhld" as above, or "blhd" as in FlashAttention: query, key and value (B, L, H, E), cache
            (B, capacity, Hk, E), pages (N, page_size, Hk, E). None: the one that the shapes fit; "bhld" where
            both do.
        window_size, softcap, alibi_slopes, sinks: as in :func:`selfattn_ext.scaled_dot_product_attention`.
        query_offset: position of query 0 of each sequence among its keys, an int or an integer tensor (B,).
            None counts from the end: the length with the new keys, minus L.
        score_mod: ``score_mod(score, batch, head, q_idx, kv_idx)`` returns the score to be used, as in
            :func:`selfattn_ext.flex_attention`. q_idx is the query's position among the keys, which
            query_offset moves: what was written for a whole sequence holds for each of its steps. It is
            given pages as one sequence.
        mask_mod: ``mask_mod(batch, head, q_idx, kv_idx)`` returns whether the query sees the key; not a
            BlockMask, but such a function.
        indices: (B, H, L, K), (B, Hk, L, K), (B, 1, L, K) or (B, L, K), in both layouts, int32 or int64: the
            keys that each query selects, new ones among them, numbered from the first key of its sequence
            on; it sees no others. -1 selects none, and B may be 1. See
            :func:`selfattn_ext.sparse_attention`.
        block_indices, block_size: the same for blocks of neighbouring keys. They need not be pages.
        return_weights, return_lse: also return the weights, after dropout, and the log-sum-exp.
        return_aux: an :class:`selfattn_ext.AuxRequest`: also return the statistics that it asks for.

    Returns:
        out (B, H, L, Ev) in the layout of query, or (out, weights), (out, lse), (out, weights, lse) with
        weights (B, H, L, capacity), 0 past the last key, and lse (B, H, L); for return_aux an
        :class:`selfattn_ext.AuxOutput` at the end, whose key_weights (B, H, capacity) are 0 past the last
        key.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed; among others for a
            full cache, a page that does not exist, two sequences that would write to the same row, and inputs
            that require grad while gradients are enabled: this function has none. The cache is then
            unchanged.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    On the CPU, lengths and page numbers are checked by the operator. On CUDA the check reads them, which
    waits for the GPU. There is no check while a CUDA graph records, in torch.compile and in
    :class:`selfattn_ext.KVCache`, which knows them: a page or a length out of range then reads and writes
    nothing outside the cache, and its results are undefined.

    Attention to selected keys takes time proportional to their number. What makes a mask in
    :func:`selfattn_ext.sparse_attention`, and score_mod and mask_mod, make one of (B, H, L, capacity).

    Pages are those of Kwon et al. (2023), "Efficient Memory Management for Large Language Model Serving with
    PagedAttention".

    Example:
        >>> import torch
        >>> from selfattn_ext import attention_with_kvcache
        >>> key_cache, value_cache = torch.zeros(2, 3, 4, 64, 32).unbind()  # 3 sequences, 4 heads, 64 rows
        >>> lengths = torch.tensor([5, 0, 17])  # keys that each sequence has
        >>> query, key, value = torch.randn(3, 3, 4, 1, 32).unbind()  # one new token for each
        >>> out = attention_with_kvcache(query, key_cache, value_cache, key, value, lengths, is_causal=True)
        >>> out.shape, torch.equal(key_cache[2, :, 17], key[2, :, 0])
        (torch.Size([3, 4, 1, 32]), True)
    """
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse, return_aux,
    )  # fmt: skip
    split_blocks.refuse("attention_with_kvcache")
    chosen = (indices, block_indices, block_size)
    tensors = (query, key_cache, value_cache, key, value, attn_mask, alibi_slopes, sinks)
    overriding = (*tensors, indices, block_indices)
    if _is_overridden(*overriding) and (relevant := overrides.overriding_arguments(*overriding)):
        call = KVCacheCall(
            *tensors[:5], cache_seqlens, block_table, layout, score_mod, mask_mod, options, *chosen
        )
        return overrides.call(attention_with_kvcache, relevant, call)
    transposed = False
    try:
        if not (type(is_causal) is type(enable_gqa) is type(return_weights) is type(return_lse) is bool):
            call_checks.flags(options)
        q, keys, values, k, v = query, key_cache, value_cache, key, value
        if layout is None:
            transposed = not _fits(query, key_cache, key, 1) and _fits(query, key_cache, key, 2)
        elif layout == "blhd":
            transposed = True
        elif layout != "bhld":
            raise ValueError("an unknown layout")
        if transposed:
            q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
            if k is not None and v is not None:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
        keywords = keywords_for(options, keys)
        if block_table is not None:
            keywords["block_table"] = page_numbers(block_table)
        length = _length_after(cache_seqlens, block_table, keys, k, q.size(0))
        if isinstance(length, Tensor):
            keywords["seqlens_k"] = length
        elif cache_seqlens is not None or block_table is not None:
            keywords["seqlens_k"] = torch.full((q.size(0),), length, dtype=torch.int64, device=q.device)
        if q.is_cuda and not _is_compiling():
            cache_checks.values(keys, k, keywords, query_offset)
        if query_offset is not None:
            keywords |= position(query_offset)
        elif is_causal and _known(q.size(2) == 1) and alibi_slopes is None and window_size is DEFAULT_WINDOW:
            # A query at the end sees all keys, causal or not.
            del keywords["is_causal"]
        elif is_causal or alibi_slopes is not None or window_size is not DEFAULT_WINDOW:
            _add_end(keywords, length, q.size(2), alibi_slopes is not None)
        has_functions = score_mod is not None or mask_mod is not None
        if indices is not None or block_indices is not None or block_size is not None:
            form = shapes.Canonical(q, keys, values, (q.size(0),), 4)
            options, keywords = with_selection(form, chosen, options, keywords, has_functions)
        step = (q, keys, values, k, v, q.size(0), options, keywords)
        if not has_functions:
            out, weights, lse, *aux = attend_to_cache(*step)
        else:
            first = length - q.size(2) if query_offset is None else query_offset
            out, weights, lse, *aux = attend_with_functions(*step, score_mod, mask_mod, first)
    except REFUSALS as refusal:
        call = KVCacheCall(
            query, key_cache, value_cache, key, value, cache_seqlens, block_table, layout, score_mod,
            mask_mod, options, *chosen,
        )  # fmt: skip
        raise explained(refusal, query, cache_checks.attention, call, transposed) from None
    if transposed:
        out = out.transpose(1, 2)
    return out if weights is None and lse is None and not aux else results(out, weights, lse, *aux)


def _length_after(
    before: int | Tensor | None, table: OptionalTensor, keys: Tensor, key: OptionalTensor, batch: int
) -> int | Tensor:
    """The number of keys that the sequences have with the new ones."""
    new = 0 if key is None else key.size(2)
    if isinstance(before, Tensor):
        lengths = before if before.dim() else before.expand(batch)
        if lengths.dtype is not torch.int64:
            if lengths.dtype is not torch.int32:
                raise TypeError("lengths that are no int32 or int64")
            lengths = lengths.long()
        return lengths.contiguous() if key is None else lengths + new
    if before is not None:
        return checks.integer("cache_seqlens", before) + new
    if key is not None:
        raise ValueError("new keys for a cache without lengths")
    return keys.size(2) if table is None else table.size(1) * keys.size(2)


def _add_end(keywords: Keywords, length: int | Tensor, queries: int, has_alibi: bool) -> None:
    """Adds the position of queries at the end, if a keyword depends on it."""
    if not has_alibi:
        if _known(queries == 1):
            keywords.pop("is_causal", None)
        if not len(keywords.keys() & _POSITIONAL):
            return
    keywords["query_offsets" if isinstance(length, Tensor) else "query_offset"] = length - queries
