"""varlen_attention: attention over sequences of different lengths that are packed end to end.

It calls and explains refusals as :mod:`selfattn_ext.functional` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import autograd, ops
from ..arguments import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    REFUSALS,
    AttentionOptions,
    Keywords,
    PackedCall,
    autocast,
    batch_invariance,
    checks,
    forced_kernel,
    joined_masks,
    keywords_for,
    overrides,
    position,
    precision,
    sequence_checks,
    shapes,
    split_blocks,
    with_options,
)
from ..attend import attend, with_gradients
from ..flex.attention_with_functions import with_functions
from ..flex.flex_call import Functions, check_functions
from ..sparse.sequences import check_sequences, with_selection
from . import cached_keys

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.overloads import ForAny, ForAux, ForLse, ForOut, ForWeights, ForWeightsAndLse
    from ..flex.flex_call import MaskMod, ScoreMod
    from ..reference_statistics import AuxOutput

__all__ = ["packed_attention", "varlen_attention"]

# Looked up once: an attribute chain costs as much as the call at its end.
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_is_overridden = torch.overrides.has_torch_function_variadic
_precision_for = precision.current_for
_FLOAT32 = torch.float32
Masks = Tensor | Sequence[Tensor]


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForOut],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeights],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForLse],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeightsAndLse],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAux],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, attn_mask: Masks | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    query_offset: int | Tensor = ..., seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
    block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAny],
) -> Any: ...  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Masks | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int | Tensor = DEFAULT_QUERY_OFFSET,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """:func:`selfattn_ext.scaled_dot_product_attention` of B packed sequences, each with itself alone.

    Sequence b has the query rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the key rows
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``, and gets the bits that a call of its own gives. Nothing is
    padded: time and memory are those of the sequences. The packing is that of FlashAttention's
    ``flash_attn_varlen_func`` and of :func:`torch.nn.attention.varlen.varlen_attn`; causal rules and windows
    are aligned to the upper left as everywhere in this package, see ``query_offset``.

    Args:
        query: (total_q, H, E), float64, float32, bfloat16 or float16, of any strides: ``qkv.unbind(1)`` of a
            packed (total, 3, H, E) is not copied.
        key: (total_k, Hk, E), same dtype; one kv head serves all query heads.
        value: (total_k, Hk, Ev), same dtype; Ev may differ from E.
        cu_seqlens_q: (B + 1,), int32 or int64, on the query's device: from 0 on, never decreasing, at most
            total_q. Sequences may be empty. Rows beyond the last offset belong to no sequence.
        cu_seqlens_k: (B + 1,), the same for key and value. None if seqused_k and block_table are given.
        max_seqlen_q: length of the longest query sequence, or more.
        max_seqlen_k: length of the longest key sequence, or more.
        attn_mask: broadcastable to (B, H, max_seqlen_q, max_seqlen_k), of which sequence b takes the upper
            left part of element b; or a list of B masks, each broadcastable to the (H, L, S) of its sequence.
            A list is copied into one buffer, each mask in its own shape. bool: True = attend. Any floating
            dtype: added to the scores, -inf hides; gets a gradient if it requires one.
        dropout_p: probability with which each weight is dropped, whenever it is not 0. For one seed,
            sequence b drops what element b of a padded batch drops.
        is_causal: query i of a sequence sees its keys ``j <= i + query_offset``.
        scale: factor of the scores, ``1 / sqrt(E)`` by default.
        enable_gqa: allows H query heads against Hk kv heads where Hk divides H.
        window_size: (left, right), query i sees keys from ``i + query_offset - left`` to
            ``i + query_offset + right``; -1 is unbounded.
        softcap: replaces scores s by ``softcap * tanh(s / softcap)``, before masks; 0 is off.
        alibi_slopes: (H,) or (B, H), adds ``-slope * |i + query_offset - j|`` to the scores; gets a gradient
            if it requires one.
        sinks: (H,) or (B, H), a logit per head that takes part in the softmax without a value; gets a
            gradient if it requires one.
        query_offset: position of each sequence's query 0 among its keys, an int for all or an int32 or int64
            tensor (B,). ``cu_seqlens_k.diff() - cu_seqlens_q.diff()`` is the lower-right alignment that
            FlashAttention's ``causal=True`` and windows have; with seqused_k, take that in place of
            ``cu_seqlens_k.diff()``.
        seqused_k: (B,), int32 or int64: how many keys of each sequence count, from its first on, for caches
            with rows to spare. With this or block_table there are no gradients and no lists of masks, and
            autocast gives query the dtype of key and value.
        block_table: (B, pages of a sequence), int32 or int64: key j of sequence b is row j % page_size of the
            page block_table[b, j // page_size]. key and value are then pages, (N, page_size, Hk, E) and
            (N, page_size, Hk, Ev); the lengths are seqused_k, or without it ``cu_seqlens_k.diff()``. Masks
            and weights have pages of a sequence * page_size keys in place of max_seqlen_k.
        score_mod: ``score_mod(score, batch, head, q_idx, kv_idx)`` returns the score to be used, as in
            :func:`selfattn_ext.flex_attention`. batch is the number of the sequence; q_idx and kv_idx count
            its queries and its keys from 0 on, whatever query_offset is.
        mask_mod: ``mask_mod(batch, head, q_idx, kv_idx)`` returns whether the query sees the key; not a
            BlockMask, but such a function. Tensors that either function reads get gradients if they require
            them.
        indices: (H, total_q, K), (Hk, total_q, K), (1, total_q, K) or (total_q, K), int32 or int64: the keys
            that each query selects, numbered from the first key of its own sequence on; it sees no others.
            -1 selects none, and repeated numbers count once, as in :func:`selfattn_ext.sparse_attention`.
        block_indices, block_size: the same for blocks of neighbouring keys of a sequence.
        return_weights: also return the weights (B, H, max_seqlen_q, max_seqlen_k), after dropout, in the
            query's dtype, 0 outside of the sequences. They are padded: for tests and pictures.
        return_lse: also return the log-sum-exp of the scores (H, total_q), sinks included, float64 for
            float64 inputs, else float32.
        return_aux: an :class:`selfattn_ext.AuxRequest`, or that of torch's flex_attention: also return an
            :class:`selfattn_ext.AuxOutput`, with key_weights (H, total_k) and all others (H, total_q).

    Returns:
        out (total_q, H, Ev), or (out, weights), (out, lse), (out, weights, lse), with an AuxOutput at the end
        for return_aux, differentiable as those of
        :func:`selfattn_ext.scaled_dot_product_attention`. A row that sees no key or belongs to no sequence
        has output 0, lse -inf and gradient 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed. Offsets are checked
            before anything reads by them.
        IndexError: a function reads outside a captured tensor, for a score that it does not hide.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    On CUDA the check of offsets waits for the GPU once per tensor: it remembers tensors that it has seen and
    that have not changed since. A block_table with its lengths is checked each time. While a CUDA graph
    records, and in code of torch.compile, there is no check: the kernels then limit what they read to the
    tensors. Second derivatives and forward mode are passes of the kernels, too; those of weights, and
    with score_mod or mask_mod, go through the formula, sequence by sequence, with its matrices.

    The time of a call with indices is proportional to the number of selected keys, forward and backward. What
    makes a mask in :func:`selfattn_ext.sparse_attention`, and score_mod and mask_mod, make one of (B, H,
    max_seqlen_q, max_seqlen_k).

    The packing is that of Dao (2023), "FlashAttention-2".

    Example:
        >>> import torch
        >>> from selfattn_ext import varlen_attention
        >>> lengths = torch.tensor([5, 0, 11])
        >>> starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # 0, 5, 5, 16
        >>> query, key, value = torch.randn(16, 3, 4, 32).unbind(1)  # packed (total, 3, heads, head dim)
        >>> varlen_attention(query, key, value, starts, starts, 11, 11, is_causal=True).shape
        torch.Size([16, 4, 32])
    """
    if (
        attn_mask is None
        and alibi_slopes is None
        and sinks is None
        and seqused_k is None
        and block_table is None
        and score_mod is None
        and mask_mod is None
        and indices is None
        and block_indices is None
        and block_size is None
        and window_size is DEFAULT_WINDOW
        and softcap is DEFAULT_SOFTCAP
        and query_offset is DEFAULT_QUERY_OFFSET
        and return_weights is False
        and return_lse is False
        and return_aux is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not _is_compiling()
        and not _is_overridden(query, key, value, cu_seqlens_q, cu_seqlens_k)
    ):
        rest = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, enable_gqa)
        out = basic_packed_attention(query, key, value, rest)
        if out is not None:
            return out
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse, return_aux,
    )  # fmt: skip
    call = PackedCall(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table,
        score_mod, mask_mod, options, indices, block_indices, block_size,
    )  # fmt: skip
    if _is_compiling():
        split_blocks.refuse("varlen_attention in a function that is compiled")
    masks = attn_mask if isinstance(attn_mask, (list, tuple)) else (attn_mask,)
    tensors = (*call[:5], *masks, alibi_slopes, sinks, query_offset, seqused_k, block_table, *call[-3:-1])
    if _is_overridden(*tensors) and (relevant := overrides.overriding_arguments(*tensors)):
        return overrides.call(varlen_attention, relevant, call)
    return packed_attention(call)


def basic_packed_attention(query: Tensor, key: Tensor, value: Tensor, rest: tuple[Any, ...]) -> Tensor | None:
    """Returns out of a call without options: the cheapest way, for CPU tensors in eager mode.

    ``rest`` are the arguments of ``ops.packed_attention`` after value, as a user has given them. None says
    that the general way must compute the call, or explain a mistake.
    """
    _, _, max_seqlen_q, max_seqlen_k, scale, is_causal, enable_gqa = rest
    try:
        if (
            type(max_seqlen_q) is int
            and type(max_seqlen_k) is int
            and (scale is None or type(scale) is float)
            and (is_causal is False or is_causal is True)
            and (enable_gqa is False or enable_gqa is True)
            and query.is_cpu
            and not forced_kernel.forcing
            and not batch_invariance.asked
            and not _is_exporting()
            and not _is_any_autocast_enabled()
            and not _are_transforms_active()
            and forward_ad._current_level < 0
            and (query.dtype is not _FLOAT32 or _precision_for(query) == "highest")
        ):
            if _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                return autograd.packed_attention(query, key, value, rest)
            return ops.packed_attention(query, key, value, *rest)
    except REFUSALS:
        pass
    return None


def packed_attention(call: PackedCall) -> Any:
    """:func:`varlen_attention` with arguments that override no function of torch."""
    if call.seqused_k is not None or call.block_table is not None:
        return attend(call, cached_keys.computed, cached_keys.check)
    return attend(call, _computed, _check)


def _check(call: PackedCall) -> None:
    sequence_checks.packed_attention(call)
    form = shapes.packed(call[:3], call.cu_seqlens_q.shape[0] - 1, call.options.enable_gqa)
    check_sequences(form, call[-3:], _lengths(call))


def _lengths(call: PackedCall) -> Keywords:
    return {
        "cu_seqlens_q": sequence_checks.indices("cu_seqlens_q", call.cu_seqlens_q),
        "cu_seqlens_k": sequence_checks.indices("cu_seqlens_k", call.cu_seqlens_k),
        "max_seqlen_q": checks.integer("max_seqlen_q", call.max_seqlen_q, 0),
        "max_seqlen_k": checks.integer("max_seqlen_k", call.max_seqlen_k, 0),
    }


def _computed(call: PackedCall) -> shapes.Results:
    options = call.options
    if call.cu_seqlens_k is None:
        raise TypeError("packed keys without offsets")
    keywords = _lengths(call)
    if call.query.is_cuda:
        sequence_checks.check_offsets_on_cuda(call)
    keywords |= position(options.query_offset)
    if isinstance(options.attn_mask, (list, tuple)):
        sequence_checks.mask_list(call)
        numbers, sizes = joined_masks(options.attn_mask)
        keywords |= sizes
        options = options._replace(attn_mask=numbers)
    elif checks.is_causal_bias(options.attn_mask):
        raise TypeError("a CausalBias is for one length")
    form = shapes.packed(autocast(*call[:3]), call.cu_seqlens_q.shape[0] - 1, options.enable_gqa)
    keywords |= keywords_for(options, form.query)
    has_functions = call.score_mod is not None or call.mask_mod is not None
    options, keywords = with_selection(form, call[-3:], options, keywords, has_functions)
    prepared = with_options(form, options, keywords)
    if not has_functions:
        return with_gradients(prepared, options)
    check_functions(call.query, call.score_mod, call.mask_mod)
    return with_functions(prepared, options, Functions(call.score_mod, call.mask_mod))
