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
from ..arguments import Keywords, OptionalTensor, Tensors, keywords_of, refusals
from ..autograd import operator_calls, statistics
from ..reference_statistics import AuxOutput
from . import compiler, cuda_compiler, formula
from .flex_call import Call
from .source import source_of
from .tracing import Traced

__all__ = ["all_results", "inputs_of", "loaded", "sizes_of", "warn"]

_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")


def all_results(
    tensors: Tensors, call: Call, captured: Sequence[Tensor]
) -> tuple[Tensor, OptionalTensor, AuxOutput]:
    """out, and weights and statistics as far as they are wanted.

    ``captured`` are the tensors that ``call.traced`` has, or others in their place.
    """
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and (requires_grad or any(call.traced.wanted()) or call.traced.failure):
        out, *rest = _FlexAttention.apply(*tensors, *captured, call)
        named = dict(zip(call.wanted.names(), rest, strict=True))
    else:
        rows, named = _forward(tensors, call, captured)
        out = rows.out
    return out, named.pop("weights", None), AuxOutput(**named)


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


def _forward(
    tensors: Tensors, call: Call, captured: Sequence[Tensor]
) -> tuple[statistics.Rows, dict[str, Tensor]]:
    """The numbers of each row, and the results beside out that are wanted, by their names."""
    query, key, value = tensors[:3]
    merged = _merged(tensors, call, captured)
    rows = statistics.forward(query, key, value, call.scale, merged, call.wanted)
    named = statistics.of_rows(rows, query, key, call.scale, merged, call.wanted)._asdict()
    if call.wanted.weights:
        named["weights"] = ops.attention_weights(query, key, rows.row_max, rows.row_sum, call.scale, **merged)
    return rows, {name: named[name] for name in call.wanted.names()}


class _FlexAttention(Function):
    """Takes the tensors of a call, the captured ones and the call; returns out, and what is wanted in
    the order of :class:`Wanted`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *given, call = inputs
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        rows, named = _forward(tensors, call, captured)
        weights = None if rows.out.dtype in ops.SIXTEEN_BITS else named.get("weights")
        ctx.save_for_backward(*given, *rows, weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.wanted.max_scores:
            ctx.mark_non_differentiable(named["max_scores"])
        return (rows.out, *named.values())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        if call.traced.failure is not None:
            raise RuntimeError(call.traced.failure)
        *given, weights = operator_calls.saved_tensors(ctx)
        size = len(given) - len(statistics.Rows._fields)
        rows, given = statistics.Rows(*given[size:]), given[:size]
        tensors, captured = Tensors(*given[:_TENSORS]), given[_TENSORS:]
        named = {"out": grads[0], **dict(zip(call.wanted.names(), grads[1:], strict=True))}
        named.pop("max_scores", None)
        needs = ctx.needs_input_grad
        if operator_calls.is_differentiated():
            return (*formula.gradients(tensors, captured, call, named, needs), None)
        grad_out = named.pop("out")
        cotangents = (
            torch.zeros_like(rows.out) if grad_out is None else grad_out,
            named.pop("weights", None),
            None,
        )
        saved = (rows.out, rows.row_max, rows.row_sum, rows.residual, weights)
        of_forward = _merged(tensors, call, captured)
        merged = operator_calls.backward_keywords(cotangents, tensors, saved, call.scale, of_forward)
        merged = merged | statistics.gradient_keywords(
            AuxOutput(**named), tensors, rows, call.scale, of_forward, merged
        )
        place = (cotangents[0], *tensors[:3], rows.out, rows.row_max, rows.row_sum, call.scale)
        try:
            results = ops.attention_backward(*place, need_mask_grad=needs[_MASK], **merged)
        except MemoryError as error:
            raise refusals.out_of_memory(error, tensors.query) from None
        of_captured = _captured_gradients(call, captured, needs[_TENSORS:], place, merged)
        gradients = (*results, None, *of_captured)
        return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=False)), None)


def _captured_gradients(
    call: Call, captured: Sequence[Tensor], needs: Sequence[bool], place: tuple[Any, ...], merged: Keywords
) -> list[OptionalTensor]:
    """The gradient of each captured tensor, None if it has none or is not needed.

    ``place`` and ``merged`` are the arguments of the backward.
    """
    wanted = [has and need for has, need in zip(call.traced.wanted(), needs, strict=False)]
    sizes = [tensor.numel() if want else 0 for tensor, want in zip(captured, wanted, strict=True)]
    if not any(sizes):
        return [None] * len(captured)
    joined = ops.attention_captured_gradients(
        *place, captured_sizes=sizes, exclusive=call.traced.exclusive, **merged
    )
    parts = joined.split(sizes)
    return [
        part.view(tensor.shape).to(tensor.dtype) if want else None
        for part, tensor, want in zip(parts, captured, wanted, strict=True)
    ]
