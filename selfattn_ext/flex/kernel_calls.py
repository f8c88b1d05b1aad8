"""Calls of the kernels with functions of scores that have been recorded, with gradients."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import ops
from ..arguments import Keywords, OptionalTensor, Tensors, keywords_of
from ..autograd import operator_calls
from . import compiler, cuda_compiler, formula
from .flex_call import Call
from .source import source_of
from .tracing import Traced

__all__ = ["all_results", "inputs_of", "loaded", "sizes_of", "warn"]

_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")


def all_results(
    tensors: Tensors, call: Call, captured: Sequence[Tensor]
) -> tuple[Tensor, OptionalTensor, OptionalTensor, Tensor]:
    """out, weights and lse as far as they are wanted, and row_max.

    ``captured`` are the tensors that ``call.traced`` has, or others in their place.
    """
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and (requires_grad or any(call.traced.wanted()) or call.traced.failure):
        out, row_max, *rest = _FlexAttention.apply(*tensors, *captured, call)
        return out, rest[0] if call.want_weights else None, rest[-1] if call.want_lse else None, row_max
    out, row_max, row_sum, weights, _ = _forward(tensors, call, captured)
    return out, weights, row_max + torch.log(row_sum), row_max


def sizes_of(query: Tensor, key: Tensor, keywords: Keywords) -> tuple[int, int, int, int]:
    """The largest numbers of batch elements, heads, queries and keys of a call."""
    batch, heads, queries = query.shape[:3]
    starts, table = keywords.get("cu_seqlens_q"), keywords.get("block_table")
    pages = 1 if table is None else table.size(1)
    return batch if starts is None else starts.size(0) - 1, heads, queries, pages * key.size(2)


_warned: set[str] = set()


def loaded(traced: Traced, has_blocks: bool = False) -> Keywords:
    """The keyword that names recorded functions to the operators, once they are compiled and loaded.

    Functions that do nothing have none.
    """
    if traced.device.type == "cuda":
        # Only kernels with a function know maps of blocks.
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
    """The number of frames between the caller and the call that a user wrote, which a warning names."""
    # torch's own frames are skipped too: torch.compiler.disable calls from there.
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
    """The keywords with the tensors and numbers that a loaded function reads."""
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
    """Takes the tensors of a call, the captured ones and the call; returns out, row_max, [weights], [lse]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *given, call = inputs
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        out, row_max, row_sum, weights, residual = _forward(tensors, call, captured)
        saved_weights = None if out.dtype in ops.SIXTEEN_BITS else weights
        ctx.save_for_backward(*given, out, row_max, row_sum, residual, saved_weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_max)
        lse = [row_max + torch.log(row_sum)] if call.want_lse else []
        return (out, row_max, *([] if weights is None else [weights]), *lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        if call.traced.failure is not None:
            raise RuntimeError(call.traced.failure)
        *given, out, row_max, row_sum, residual, weights = operator_calls.saved_tensors(ctx)
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        cotangents = (
            torch.zeros_like(out) if grads[0] is None else grads[0],
            grads[2] if call.want_weights else None,
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
    """The gradient of each captured tensor, None if it has none or is not needed."""
    wanted = [has and need for has, need in zip(call.traced.wanted(), needs, strict=False)]
    sizes = [tensor.numel() if want else 0 for tensor, want in zip(captured, wanted, strict=True)]
    if not any(sizes):
        return [None] * len(captured)
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
