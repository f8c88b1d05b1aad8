"""flex_attention: attention with functions that users write, on the fused kernels, with gradients.

Note [Three ways]
    A function that is made of operations on single numbers is recorded (:mod:`.tracing`), written as C++
    (:mod:`.source`), compiled (:mod:`.compiler`) and called by the kernels for tiles of scores. If nothing
    can be compiled, and for other functions, torch computes the same, some queries at a time
    (:mod:`.formula`). Second derivatives, forward mode and torch.func go through the formula with its (L, S)
    matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..arguments import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    AttentionCall,
    AttentionOptions,
    Keywords,
    Prepared,
    Tensors,
    call_checks,
    prepare,
    shapes,
    split_blocks,
)
from ..attend import attend, aux_output, dropout_seed
from ..autograd.graph_operators import is_exporting_vmap, is_tracing_graph
from ..aux_request import Wanted, wanted
from ..reference import accumulation_dtype
from ..reference_statistics import AuxOutput
from . import block_masks, compiler, formula, graphs, kernel_calls
from .flex_call import Call, Functions, PythonCall, ScoreMod, check_functions
from .nodes import UnsupportedFunctionError
from .tracing import trace

__all__ = ["flex_attention", "with_functions"]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_weights: bool = False,
) -> Any:
    """Attention whose scores go through a function of yours, without holding the (L, S) matrix.

    The arguments up to ``return_aux`` are those of :func:`torch.nn.attention.flex_attention.flex_attention`,
    in meaning and order; the others are those of :func:`selfattn_ext.scaled_dot_product_attention`.

    Args:
        query: (B, H, L, E), float64, float32, bfloat16 or float16, on the CPU or on CUDA.
        key: (B | 1, Hk, S, E), same dtype.
        value: (B | 1, Hk, S, Ev), same dtype.
        score_mod: ``score_mod(score, batch, head, q_idx, kv_idx)`` returns the score to be used. It is called
            once, with tensors of no dimensions: score in float32 (float64 for float64 inputs), the indices in
            int64. It may use any of torch's operations on single numbers, and elements of other tensors
            (captured ones) that it indexes. -inf hides a key from a query, a bool is 0 or 1. It must not
            decide by a value in Python (``if q_idx > kv_idx``), which torch.where does, nor hand one to
            NumPy.
        block_mask: a :class:`torch.nn.attention.flex_attention.BlockMask` of any block size. Blocks of scores
            that it leaves out are not computed.
        scale: factor of the scores before score_mod, ``1 / sqrt(E)`` by default.
        enable_gqa: allows H query heads against Hk kv heads where Hk divides H.
        return_lse: also return the log-sum-exp of the scores (B, H, L).
        kernel_options: those of torch's kernels; they change no result and are ignored.
        return_aux: an :class:`selfattn_ext.AuxRequest`, or that of
            :mod:`torch.nn.attention.flex_attention`: also return an AuxOutput with the statistics that it
            asks for.
        attn_mask, dropout_p, is_causal: as :func:`selfattn_ext.scaled_dot_product_attention` takes them.
        window_size, softcap, alibi_slopes, sinks, query_offset: likewise. softcap and ALiBi come before
            score_mod, masks after it.
        return_weights: also return the weights (B, H, L, S), after dropout.

    Returns:
        out (B, H, L, Ev) in the query's dtype, or a tuple with what else was asked for, as (out, lse) or
        (out, weights, AuxOutput). Differentiable in query, key, value, attn_mask, alibi_slopes, sinks and
        every captured tensor that requires a gradient; gradients have the same bits in each run. A query that
        sees no key has output 0, lse -inf and gradient 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed, or the line of the
            function that decides by a value.
        RuntimeError: in the backward, torch has no derivative of what a function does; or it is
            differentiated twice and uses a torch.autograd.Function or hooks.
        IndexError: a function reads outside a captured tensor, for a score that it does not hide. On CUDA
            such a score is NaN instead.

    A function is compiled when it is first called, in a second or two, and kept on disk for other processes
    (SELFATTN_FUNCTION_CACHE names the folder). Constants in it are no reason to compile again. If there is no
    compiler, or a function is more than operations on single numbers, torch computes the same in parts: a
    warning says so. Second derivatives go through the formula with its (L, S) matrices.

    The language is that of Dong et al. (2024), "Flex Attention: A Programming Model for Generating Optimized
    Attention Kernels".

    Example:
        >>> import torch
        >>> from selfattn_ext import flex_attention
        >>> slopes = torch.full((2,), 0.5, requires_grad=True)
        >>> def distance(score, batch, head, q_idx, kv_idx):
        ...     return score - slopes[head] * (q_idx - kv_idx).abs()
        >>> query, key, value = torch.randn(3, 1, 2, 16, 8).unbind()
        >>> flex_attention(query, key, value, distance, is_causal=True).square().sum().backward()
        >>> slopes.grad.shape
        torch.Size([2])
    """
    _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    functions = Functions(score_mod, None if block_mask is None else block_mask.mask_mod, block_mask)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse, return_aux,
    )  # fmt: skip
    call = AttentionCall(query, key, value, options)
    return attend(
        call, lambda given: with_functions(prepare(given), options, functions), call_checks.attention
    )


def _in_graph(query: Tensor) -> bool:
    """Tells whether a call becomes a step of a graph."""
    return is_tracing_graph() and (query.is_cpu or torch.compiler.is_exporting())


def _leaves_graph(wants: Wanted) -> bool:
    """Tells whether a call has results that steps of a graph do not have.

    Raises:
        RuntimeError: torch.export traces the call, which cannot leave its graph.
    """
    leaves = wants.entropy or wants.mean_score or wants.key_weights
    if leaves and torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export has the statistics lse and max_scores of flex_attention alone, not entropy, "
            "mean_score and key_weights"
        )
    return leaves


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: bool,
    return_lse: bool,
    return_aux: Any,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{name} must be a tensor of four dimensions, (batch, heads, rows, dim), but it is {given}"
            )
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(
            f"query has {query.size(1)} heads and key has {key.size(1)}: enable_gqa=True lets heads share"
            " them"
        )
    check_functions(query, score_mod)
    if return_lse and return_aux is not None:
        raise ValueError(
            "return_lse and return_aux must not be given both; return_aux=AuxRequest(lse=True) asks for it"
        )
    if block_mask is not None:
        if not hasattr(block_mask, "kv_num_blocks"):
            raise TypeError(
                "block_mask must be a BlockMask, as create_block_mask makes it, but it is "
                f"{type(block_mask).__name__}"
            )
        block_masks.check_size(block_mask, query, key)


def with_functions(prepared: Prepared, options: AttentionOptions, functions: Functions) -> Any:
    """Differentiable attention of a batch or of packed sequences: (out, weights, lse), and what return_aux
    asks for.
    """
    form, request = prepared[3], options.return_aux
    wants = Wanted(options.return_weights, options.return_lse)
    if request is not None:
        wants = wanted(request, *wants[:2])
    out, weights, found = _all_results(prepared, wants, functions)
    results = out, weights if options.return_weights else None, found.lse if options.return_lse else None
    in_form = shapes.restored(form, *results) if form.packed else results
    return in_form if request is None else (*in_form, aux_output(options, form, found))


def _all_results(prepared: Prepared, wants: Wanted, functions: Functions) -> tuple[Any, ...]:
    """out, and weights and statistics as far as they are computed."""
    split_blocks.refuse("flex_attention")
    tensors, scale, keywords, _ = prepared
    if "dropout_p" in keywords:
        tensors = tensors._replace(seed=dropout_seed(tensors.query))
    if _in_graph(tensors.query) and not _leaves_graph(wants):
        out, weights, *more = graphs.traced_results(tensors, scale, keywords, wants[:3], functions)
        return out, weights, AuxOutput(*more)
    return _outside_of_graphs(tensors, scale, keywords, wants, functions)


@graphs.outside_of_graphs
def _outside_of_graphs(
    tensors: Tensors, scale: float, keywords: Keywords, wants: Wanted, functions: Functions
) -> tuple[Any, ...]:
    blocks = size = None
    if functions.block_mask is not None:
        blocks = block_masks.block_map(functions.block_mask)
        size = tuple(functions.block_mask.BLOCK_SIZE)
    dtype, device = accumulation_dtype(tensors.query.dtype), tensors.query.device
    in_python = PythonCall(tensors, scale, keywords, *functions[:2], blocks, size)
    has_statistics = wants.of_rows() or wants.key_weights
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        is_exporting_vmap()  # raises for derivatives
        out, weights, lse = formula.at_once(in_python)
        return out, weights, formula.statistics_at_once(in_python) if has_statistics else AuxOutput(lse)
    try:
        requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        sizes = kernel_calls.sizes_of(*tensors[:2], keywords)
        traced = trace(*functions[:2], dtype, device, requires_grad, sizes)
        keywords = {**keywords, **kernel_calls.loaded(traced, blocks is not None)}
    except (UnsupportedFunctionError, compiler.CompilerError) as reason:
        kernel_calls.warn(reason)
        out, weights, lse = formula.in_rows(in_python)
        return out, weights, formula.statistics_in_rows(in_python) if has_statistics else AuxOutput(lse)
    return kernel_calls.all_results(
        tensors, Call(scale, keywords, wants, traced, blocks, size), traced.tensors
    )
