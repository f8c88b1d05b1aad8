"""Attention with functions that users write: torch's flex_attention on the fused kernels, with gradients.

Note [Three ways]
    A function that is made of operations on single numbers is recorded (:mod:`.tracing`), written as C++
    (:mod:`.source`), compiled (:mod:`.compiler`) and called by the kernels for tiles of scores. Where nothing
    can be compiled, and for other functions, torch computes the same in rows of tiles (:mod:`.formula`).
    Second derivatives, forward mode and torch.func go through the formula with its (L, S) matrices.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import (
    AttentionCall,
    AttentionOptions,
    Keywords,
    OptionalTensor,
    Prepared,
    Tensors,
    call_checks,
    keywords_of,
    prepare,
    shapes,
)
from ..attend import attend, dropout_seed
from ..autograd import operator_calls
from ..reference import accumulation_dtype
from . import block_masks, compiler, cuda_compiler, formula
from .graphs import outside_of_graphs
from .recorder import UnsupportedFunctionError
from .source import source_of
from .tracing import Traced, trace

__all__ = ["flex_attention"]

_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")


@outside_of_graphs
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = 0,
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
            int32. It may use any of torch's operations on single numbers, and elements of other tensors
            (captured ones) that it indexes. -inf hides a key from a query. It must not decide by a value in
            Python (``if q_idx > kv_idx``): torch.where does that.
        block_mask: a :class:`torch.nn.attention.flex_attention.BlockMask` of any block size. Blocks of scores
            that it leaves out are not computed.
        scale: factor of the scores before score_mod, ``1 / sqrt(E)`` by default.
        enable_gqa: allows H query heads against Hk kv heads where Hk divides H.
        return_lse: also return the log-sum-exp of the scores (B, H, L).
        kernel_options: those of torch's kernels; they change no result and are ignored.
        return_aux: a :class:`torch.nn.attention.flex_attention.AuxRequest`: also return an AuxOutput with the
            log-sum-exp and the largest score of each query (B, H, L), in float32 (float64).
        attn_mask, dropout_p, is_causal, window_size, softcap, alibi_slopes, sinks, query_offset,
            return_weights: as there. softcap and ALiBi come before score_mod, masks behind it.

    Returns:
        out (B, H, L, Ev) in the query's dtype, or a tuple with what else was asked for: (out, weights, lse),
        (out, AuxOutput). Differentiable in query, key, value, attn_mask, alibi_slopes, sinks and every
        captured tensor that requires a gradient; gradients have the same bits in each run. A query that sees
        no key has output 0, lse -inf and gradient 0.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed, or the line of the
            function that decides by a value.
        IndexError: a function reads beside a captured tensor, for a score that it does not hide. On CUDA such
            a score is NaN instead.

    A function is compiled when it is first met, in a second or two, and kept on disk for other processes
    (SELFATTN_FUNCTION_CACHE names the folder). Constants in it are no reason to compile again. Where there is
    no compiler, or a function is more than operations on single numbers, torch computes the same in parts: a
    warning says so. Second derivatives go through the formula with its (L, S) matrices.

    The language is that of Dong et al. (2024), "Flex Attention: A Programming Model for Generating Optimized
    Attention Kernels".
    """
    wants_lse = return_lse or bool(return_aux is not None and return_aux.lse)
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, wants_lse,
    )  # fmt: skip
    _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    functions = Functions(score_mod, None if block_mask is None else block_mask.mask_mod, block_mask)
    call = AttentionCall(query, key, value, options)
    results = attend(
        call, lambda given: with_functions(prepare(given), options, functions), call_checks.attention
    )
    if return_aux is None:
        return results
    out, *rest = results if isinstance(results, tuple) else (results,)
    largest = _largest_scores(call, functions) if return_aux.max_scores else None
    from torch.nn.attention.flex_attention import AuxOutput

    aux = AuxOutput(lse=rest[-1] if wants_lse else None, max_scores=largest)
    return (out, *rest[:1], aux) if return_weights else (out, aux)


class Functions(NamedTuple):
    """What a call has beside the options."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    block_mask: Any = None


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


def check_functions(query: Tensor, score_mod: Any, mask_mod: Any = None) -> None:
    """Raises ValueError or TypeError unless these are functions, or None, and are computed there."""
    if hasattr(mask_mod, "kv_num_blocks"):
        raise TypeError(
            "mask_mod must be a function, but it is a BlockMask, whose blocks are those of one pair of "
            "lengths: pass its mask_mod"
        )
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, but it is {type(function).__name__}")
    if isinstance(query, Tensor) and query.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"functions of scores are computed on the CPU and on CUDA, but query is on {query.device}"
        )


class Call(NamedTuple):
    """What a call is beside its tensors."""

    scale: float
    keywords: Keywords
    want_weights: bool
    want_lse: bool
    traced: Traced
    blocks: OptionalTensor
    block_size: tuple[int, int] | None


def with_functions(prepared: Prepared, options: AttentionOptions, functions: Functions) -> shapes.Results:
    """Differentiable attention of a batch or of packed sequences."""
    out, weights, lse, _ = _all_results(prepared, options, functions)
    form = prepared[3]
    results = out, weights if options.return_weights else None, lse if options.return_lse else None
    return shapes.restored(form, *results) if form.packed else results


def _all_results(prepared: Prepared, options: AttentionOptions, functions: Functions) -> tuple[Any, ...]:
    """out, and what there is of weights, lse and row_max."""
    tensors, scale, keywords, _ = prepared
    if "dropout_p" in keywords:
        tensors = tensors._replace(seed=dropout_seed(tensors.query))
    blocks = size = None
    if functions.block_mask is not None:
        blocks = block_masks.block_map(functions.block_mask)
        size = tuple(functions.block_mask.BLOCK_SIZE)
    dtype, device = accumulation_dtype(tensors.query.dtype), tensors.query.device
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    in_python = formula.PythonCall(tensors, scale, keywords, *functions[:2], blocks, size)
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return (*formula.at_once(in_python), None)
    try:
        traced = trace(*functions[:2], dtype, device, requires_grad)
        wants = options.return_weights, options.return_lse
        whole = Call(scale, keywords, *wants, traced, blocks, size)
        keywords |= loaded(traced, blocks is not None)
    except (UnsupportedFunctionError, compiler.CompilerError) as reason:
        warn(reason)
        return (*formula.in_rows(in_python), None)
    if torch.is_grad_enabled() and (requires_grad or any(traced.wanted())):
        results = _FlexAttention.apply(*tensors, *traced.tensors, whole)
        return results[0], results[1] if wants[0] else None, results[-1], None
    out, row_max, row_sum, weights, _ = _forward(tensors, whole, traced.tensors)
    return out, weights, row_max + torch.log(row_sum), row_max


_warned: set[str] = set()


def loaded(traced: Traced, has_blocks: bool = False) -> Keywords:
    """The keyword that names recorded functions to the operators, compiled and loaded.

    None for those that do nothing.
    """
    if traced.device.type == "cuda":
        # With it come maps of blocks, which other kernels do not know.
        if not has_blocks and traced.does_nothing():
            return {}
        return {"score_function": cuda_compiler.load(traced.function)}
    return {} if traced.does_nothing() else {"score_function": compiler.load(source_of(traced.function))}


def warn(reason: Exception) -> None:
    text = str(reason)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(
            f"selfattn_ext does not compile this function: {text.rstrip('.')}. torch computes "
            "it in parts, which takes longer",
            stacklevel=_frames_of_this_package(),
        )


def _frames_of_this_package() -> int:
    """How many frames are between the caller and the call that a user wrote, for a warning that names it."""
    # torch's own too: torch.compiler.disable calls from there.
    folders = tuple(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), torch.__file__))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        level, frame = level + 1, frame.f_back
    return level


def _merged(tensors: Tensors, call: Call, captured: Sequence[Tensor]) -> Keywords:
    merged = dict(keywords_of(tensors, call.keywords))
    if "score_function" in merged:
        merged |= inputs_of(call.traced, captured)
    if call.blocks is not None:
        merged["block_map"], merged["block_size"] = call.blocks, list(call.block_size or ())
    return merged


def inputs_of(traced: Traced, captured: Sequence[Tensor]) -> Keywords:
    """The keywords of what a loaded function reads, beside scores."""
    given = {"captured": list(captured), "captured_numbers": traced.numbers}
    return {name: read for name, read in given.items() if read}


def _forward(tensors: Tensors, call: Call, captured: Sequence[Tensor]) -> tuple[Any, ...]:
    """out, row_max, row_sum, weights if wanted, out_residual."""
    query, key, value = tensors[:3]
    merged = _merged(tensors, call, captured)
    out, row_max, row_sum, residual = operator_calls.forward(
        query, key, value, call.scale, merged, call.want_weights
    )
    weights = None
    if call.want_weights:
        weights = ops.attention_weights(query, key, row_max, row_sum, call.scale, **merged)
    return out, row_max, row_sum, weights, residual


class _FlexAttention(Function):
    """Of the tensors of a call, the captured ones and the call; returns (out, [weights], [lse])."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *given, call = inputs
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        out, row_max, row_sum, weights, residual = _forward(tensors, call, captured)
        saved_weights = None if out.dtype in ops.SIXTEEN_BITS else weights
        ctx.save_for_backward(*given, out, row_max, row_sum, residual, saved_weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        lse = [row_max + torch.log(row_sum)] if call.want_lse else []
        return (out, *([] if weights is None else [weights]), *lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        *given, out, row_max, row_sum, residual, weights = ctx.saved_tensors
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        cotangents = (
            torch.zeros_like(out) if grads[0] is None else grads[0],
            grads[1] if call.want_weights else None,
            grads[-1] if call.want_lse else None,
        )
        needs = ctx.needs_input_grad
        if operator_calls.is_differentiated():
            return (*formula.gradients(tensors, captured, call, cotangents, needs), None)
        saved = (out, row_max, row_sum, residual, weights)
        merged = _merged(tensors, call, captured)
        results = operator_calls.backward(cotangents, tensors, saved, call.scale, merged, needs[_MASK])
        of_captured = _captured_gradients(call, captured, needs[_TENSORS:], tensors, cotangents, saved)
        gradients = (*results, None, *of_captured)
        return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=False)), None)


def _captured_gradients(
    call: Call,
    captured: Sequence[Tensor],
    needs: Sequence[bool],
    tensors: Tensors,
    cotangents: operator_calls.Cotangents,
    saved: operator_calls.Saved,
) -> list[OptionalTensor]:
    """The gradient of each captured tensor, None where it has none or is not needed."""
    wanted = [has and need for has, need in zip(call.traced.wanted(), needs, strict=False)]
    sizes = [tensor.numel() if want else 0 for tensor, want in zip(captured, wanted, strict=True)]
    if not any(sizes):
        return [None] * len(captured)
    if cotangents[0].device.type == "cuda":  # whose kernels do not have them
        found = formula.captured_gradients(tensors, captured, call, cotangents, wanted)
        return [None if gradient is None else gradient.detach() for gradient in found]
    query, key, value = tensors[:3]
    out, row_max, row_sum = saved[:3]
    merged = operator_calls.backward_keywords(
        cotangents, tensors, saved, call.scale, _merged(tensors, call, captured)
    )
    joined = ops.attention_captured_gradients(
        cotangents[0], query, key, value, out, row_max, row_sum, call.scale,
        captured_sizes=sizes, exclusive=call.traced.exclusive, **merged,
    )  # fmt: skip
    parts = joined.split(sizes)
    return [
        part.view(tensor.shape).to(tensor.dtype) if want else None
        for part, tensor, want in zip(parts, captured, wanted, strict=True)
    ]


def _largest_scores(call: AttentionCall, functions: Functions) -> Tensor:
    """(B, H, L), the largest score of each query. 16-bit kernels need not know it: those of float32 do."""
    dtype = accumulation_dtype(call.query.dtype)
    query, key, value = (tensor.detach().to(dtype) for tensor in (call.query, call.key, call.value[..., :0]))
    options = call.options._replace(dropout_p=0.0, sinks=None, return_weights=False)
    with torch.no_grad():
        _, weights, lse, largest = _all_results(
            prepare(AttentionCall(query, key, value, options)), options, functions
        )
        if largest is None:
            largest = lse + torch.log(weights.amax(-1))
    return largest
