"""Attention of queries to the keys that they select, as users call it.

Note [Selected keys as a mask]
    The kernels "fused", of the CPU, and "simt", of CUDA, compute forward and first derivatives from lists of
    keys. Everything else becomes a call with the mask that the lists mean, which holds (L, S) numbers: other
    kernels, weights and statistics, the gradient of a mask, torch.func, forward mode and ONNX. Higher
    derivatives take the mask in the formula. Packed sequences and caches do the same, also with functions of
    scores; see sequences.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    AttentionOptions,
    Prepared,
    SparseCall,
    call_checks,
    overrides,
    prepare,
    selected,
    shapes,
    split_blocks,
)
from ..attend import attend, with_gradients
from .selection import Selection, check, joined, needs_mask, selection_of

__all__ = ["sparse_attention"]

_is_overridden = torch.overrides.has_torch_function_variadic


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_weights: bool = False,
    return_lse: bool = False,
    return_aux: Any = None,
) -> Any:
    """Attention of each query to the keys that it selects, and to no others.

    It computes what :func:`selfattn_ext.scaled_dot_product_attention` computes with a mask that is True for
    the selected keys. Its work is proportional to the number of selected keys, forward and backward, and it
    makes no (L, S) tensor.

    Args:
        query: (..., H, L, E), float64, float32, bfloat16 or float16.
        key: (..., Hk, S, E), same dtype.
        value: (..., Hk, S, Ev), same dtype; Ev may differ from E.
        indices: (..., H, L, K), (..., Hk, L, K), (..., 1, L, K) or (..., L, K), int32 or int64: the keys that
            each query selects. -1 selects none. A key counts once, however often it is there, and the order
            does not matter. Rows of one kv head, or of all heads, serve all query heads that read it.
        block_indices: the same for blocks of neighbouring keys: number n stands for the keys ``n *
            block_size`` to ``(n + 1) * block_size - 1``, those past S left out. With ceil(L / block_size)
            rows in place of L, each row serves as many neighbouring queries.
        block_size: keys of a block; must be given with block_indices.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as in
            :func:`selfattn_ext.scaled_dot_product_attention`. A query sees the selected keys that mask,
            causal rule and window let it see.
        window_size, softcap, alibi_slopes, sinks, query_offset: likewise.
        return_weights, return_lse, return_aux: likewise.

    Returns:
        What :func:`selfattn_ext.scaled_dot_product_attention` returns, with the same derivatives. A query
        that sees no key has output 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
        MemoryError: there is no memory for the result; torch.OutOfMemoryError on CUDA.

    These make an (L, S) mask: weights and statistics, the gradient of ``attn_mask``, transforms of
    :mod:`torch.func`, forward mode, and derivatives of second and higher order.

    Blocks of keys are selected by DeepSeek's NSA (Yuan et al. 2025), "Native Sparse Attention", and by MoBA
    (Lu et al. 2025), "Mixture of Block Attention"; single keys by DeepSeek-V3.2 (2025).

    Example:
        >>> import torch
        >>> from selfattn_ext import sparse_attention
        >>> query, key, value = torch.randn(3, 1, 2, 256, 64).unbind()
        >>> blocks = torch.tensor([0, 3]).expand(1, 1, 256, 2)
        >>> sparse_attention(query, key, value, block_indices=blocks, block_size=64, is_causal=True).shape
        torch.Size([1, 2, 256, 64])
    """
    split_blocks.refuse("sparse_attention")
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse, return_aux,
    )  # fmt: skip
    call = SparseCall(query, key, value, options, indices, block_indices, block_size)
    tensors = (query, key, value, attn_mask, alibi_slopes, sinks, indices, block_indices)
    if _is_overridden(*tensors) and (relevant := overrides.overriding_arguments(*tensors)):
        return overrides.call(sparse_attention, relevant, call)
    return attend(call, _computed, _check)


def _computed(call: SparseCall) -> shapes.Results:
    prepared = prepare(call.dense())
    selection = selection_of(prepared[3], call.indices, call.block_indices, call.block_size)
    return with_gradients(_selecting(prepared, selection, call.options), call.options)


def _selecting(prepared: Prepared, selection: Selection, options: AttentionOptions) -> Prepared:
    """Adds the selection to a call, as lists or as a mask: Note [Selected keys as a mask]."""
    tensors, scale, keywords, form = prepared
    keys, on_host = form.key.size(2), tensors.query.device.type == "cpu"
    as_mask = needs_mask(tensors.query, tensors.mask, options, keywords)
    if as_mask or not on_host:
        check(selection, form, keys)  # the CPU's lists are checked as they are made
    if not as_mask:
        return tensors, scale, {**keywords, **selection.keywords(keys)}, form
    given = {"selection": selection.indices, "selection_size": selection.size}
    return tensors._replace(mask=joined(tensors.mask, selected(tensors, given))), scale, keywords, form


def _check(call: SparseCall) -> None:
    call_checks.attention(call.dense())
    form = prepare(call.dense())[3]
    check(selection_of(form, call.indices, call.block_indices, call.block_size), form, form.key.size(2))
