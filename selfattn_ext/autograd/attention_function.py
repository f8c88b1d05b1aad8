"""Differentiable attention: autograd.Function classes over the operators, also under torch.func.

Note [Two forms of one function]
    torch.func needs the setup_context form of autograd.Function, which costs an ordinary training step
    several times the call overhead of the form with the context in forward. So attention has both:
    ``_Attention`` for eager mode (and ``_BasicAttention``, the same with fewer arguments) and
    ``_TransformedAttention``, used while a torch.func transform is active.

Note [Second derivatives]
    The first-order gradient is a function of its own, :class:`AttentionBackward`, whose forward is the fused
    backward operator. So are the gradients of that, :class:`AttentionBackwardBackward`, and attention with
    its tangents, :class:`AttentionTangents`. The derivatives of each are computed by the others. Only those
    of third order, and those that depend on weights, use the formula of :mod:`selfattn_ext.reference`, with
    its (L, S) matrices. The formula is differentiable any number of times, hence so is attention.

Note [Gradient of weights and lse]
    With P the softmax, W the weights after dropout and dW, dl the gradients of W and lse, the score gradient
    is ``dS = P * (dropout(grad_out @ value^T + dW) - delta)``, where ``delta = rowsum(grad_out * out) +
    rowsum(W * dW) - dl``. The operator computes the first term of delta; ``grad_row`` carries the other two.

Note [Threads of a backward]
    torch computes gradients of CUDA tensors in threads of its own, which do not see the caller's context
    variables. A gradient therefore takes the forced kernel and the precision of float32 products from the
    forward's call.

Note [Rounded outputs]
    delta needs the output and the weights as they were before they were rounded to 16 bits. If a backward is
    to come, the forward operator returns what rounding took away from out as out_residual. Weights that get a
    gradient are computed again, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import Keywords, OptionalTensor, Tensors, is_packed, keywords_of, refusals
from ..arguments.shapes import of_packed
from ..formula_steps import default_scale
from . import by_formula, operator_calls
from .differentiated import SOURCES, Inputs
from .first_order import AttentionBackward
from .forward_levels import nestable, primals
from .forward_mode import AttentionTangents, attention_of_duals
from .vmap import each_slice, fold, fold_optional, slice_batch, unfold

__all__ = ["CAUSAL", "attention", "basic_attention", "packed_attention", "vmapped"]

#: The number of tensors of a call, and the index of the mask among them.
_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")

#: The arguments after value of a basic call that has nothing but the causal rule, compared by identity.
CAUSAL = (None, None, True, False)


def attention(
    tensors: Tensors, scale: float, keywords: Keywords, want_weights: bool, want_lse: bool
) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
    """Computes differentiable attention of four-dimensional tensors.

    ``keywords`` are further keyword arguments of the operators; those at their default are left out.
    Returns (out, weights if wanted, lse if wanted).
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        duals = attention_of_duals(tensors, scale, keywords, want_weights)
        if duals is not None:
            return *duals[:2], duals[2] if want_lse else None
        out, lse, _, _, *rest = _TransformedAttention.apply(*tensors, scale, keywords, want_weights)
        return out, rest[-1] if want_weights else None, lse if want_lse else None
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        results = _eager_attention(*tensors, scale, keywords, want_weights, want_lse)
        if not want_weights and not want_lse:
            return results, None, None
        return results[0], results[1] if want_weights else None, results[-1] if want_lse else None
    query, key, value = tensors[:3]
    merged = keywords_of(tensors, keywords)
    weights = None
    if want_weights:
        out, row_max, row_sum, _ = ops.attention_forward(
            query, key, value, scale, need_weights=True, **merged
        )
        weights = ops.attention_weights(query, key, row_max, row_sum, scale, **merged)
    else:
        out, row_max, row_sum, _ = ops.attention_forward(query, key, value, scale, **merged)
    return out, weights, row_max + torch.log(row_sum) if want_lse else None


def _any_requires_grad(tensors: Tensors) -> bool:
    # any() of a generator would make a call on tiny tensors slower by a twentieth.
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _BasicAttention(Function):
    """The cheapest form of a call, for eager mode: (query, key, value, rest, keywords) → out.

    Without keywords it calls the operators that have none. ``rest`` are then their arguments after value,
    (attn_mask, scale, is_causal, enable_gqa), or nothing if all are at their default. With keywords there is
    no mask, the scale is a number, and is_causal is also among the keywords. The mask gets no gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rest: tuple[Any, ...] = (),
        keywords: Keywords | None = None,
    ) -> Tensor:
        statistics: Any
        if not rest:
            out, statistics, residual = ops.basic_attention_forward(query, key, value)
        elif rest is CAUSAL:
            out, statistics, residual = ops.causal_attention_forward(query, key, value)
        elif keywords is None:
            out, statistics, residual = ops.masked_attention_forward(query, key, value, *rest)
        else:
            out, *statistics, residual = operator_calls.forward(query, key, value, rest[1], keywords)
        attn_mask, rules = (rest[0], rest[1:3]) if rest else (None, ())
        ctx.save_for_backward(query, key, value, out, residual, attn_mask)
        # The statistics are neither inputs nor results, so the context may simply hold them, which is cheap.
        ctx.call = (statistics, rules, keywords)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, residual, attn_mask = operator_calls.saved_tensors(ctx)
        statistics, rules, keywords = ctx.call
        scale: Any
        scale, is_causal = rules or (None, False)
        grads: tuple[Tensor, ...]
        if operator_calls.is_differentiated():
            scale = default_scale(query.size(3)) if scale is None else scale
            merged = {**(keywords or {}), **({"is_causal": True} if is_causal else {})}
            if attn_mask is not None:
                attn_mask = attn_mask.view((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
            tensors = Tensors(query, key, value, attn_mask)
            saved: operator_calls.Saved = (out, *statistics, residual, None)
            inputs = _of_backward((grad_out, None, None), tensors, saved, scale, merged, False)
            grads = AttentionBackward.apply(*inputs)[:3]
        else:
            try:
                if keywords is not None:
                    merged = keywords if residual is None else {**keywords, "out_residual": residual}
                    row_max, row_sum = statistics
                    grads = ops.direct_backward(
                        grad_out, query, key, value, out, row_max, row_sum, scale, **merged
                    )[:3]
                elif residual is None and attn_mask is None and scale is None:
                    compute = ops.causal_attention_backward if is_causal else ops.basic_attention_backward
                    grads = compute(grad_out, query, key, value, out, statistics)
                else:
                    grads = ops.masked_attention_backward(
                        grad_out, query, key, value, out, statistics, residual, attn_mask, scale, is_causal
                    )
            except MemoryError as error:
                raise refusals.out_of_memory(error, query) from None
        # rest and keywords have no gradients.
        if not rules:
            return grads
        return (*grads, None) if keywords is None else (*grads, None, None)


class _PackedAttention(Function):
    """The same of packed rows as users have them: (query, key, value, rest) → out. ``rest`` are the arguments
    of ``ops.packed_attention`` after value.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rest: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        out, statistics, residual, offsets = ops.packed_attention_forward(query, key, value, *rest)
        ctx.save_for_backward(query, key, value, out, residual)
        ctx.call = (statistics, offsets, rest[2:6])
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, residual = operator_calls.saved_tensors(ctx)
        statistics, offsets, (max_seqlen_q, max_seqlen_k, scale, is_causal) = ctx.call
        if not operator_calls.is_differentiated():
            try:
                grads = ops.packed_attention_backward(
                    grad_out, query, key, value, out, statistics, residual, offsets, max_seqlen_q,
                    max_seqlen_k, scale, is_causal,
                )  # fmt: skip
            except MemoryError as error:
                raise refusals.out_of_memory(error, query) from None
            return (*grads, None)
        keywords = {
            "cu_seqlens_q": offsets[0],
            "cu_seqlens_k": offsets[1],
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            **({"is_causal": True} if is_causal else {}),
        }
        grad_out, query, key, value, out = map(of_packed, (grad_out, query, key, value, out))
        residual = None if residual is None else of_packed(residual)
        saved: operator_calls.Saved = (out, *statistics, residual, None)
        scale = default_scale(query.size(3)) if scale is None else scale
        inputs = _of_backward(
            (grad_out, None, None), Tensors(query, key, value), saved, scale, keywords, False
        )
        grads = AttentionBackward.apply(*inputs)[:3]
        return (*(grad.squeeze(0).transpose(0, 1) for grad in grads), None)


# Function.apply looks for the wrappers of torch.func in every argument. This name and _eager_attention skip
# that, as their callers have made sure that no transform is active.
basic_attention = super(Function, _BasicAttention).apply
# The engine calls the context's apply, which searches for backward in Python. Without this search, a step on
# tiny tensors is faster by a fiftieth.
_BasicAttention._backward_cls.apply = _BasicAttention.backward  # type: ignore[attr-defined]
packed_attention = super(Function, _PackedAttention).apply
_PackedAttention._backward_cls.apply = _PackedAttention.backward  # type: ignore[attr-defined]


class _Attention(Function):
    """The form for eager mode: (tensors of a call, scale, keywords, want_weights, want_lse) → out, or
    (out, [weights], [lse]).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *given, scale, keywords, want_weights, want_lse = inputs
        tensors = Tensors(*given)
        query, key, value = given[:3]
        merged = keywords_of(tensors, keywords)
        statistics = operator_calls.forward(query, key, value, scale, merged, want_weights)
        out, row_max, row_sum, _ = statistics
        weights = None
        if want_weights:
            weights = ops.attention_weights(query, key, row_max, row_sum, scale, **merged)
        # Note [Rounded outputs] says why 16-bit weights do not help the backward.
        saved_weights = None if query.dtype in ops.SIXTEEN_BITS else weights
        ctx.save_for_backward(*tensors, *statistics, saved_weights)
        ctx.call = (scale, keywords, want_weights, want_lse)
        if not want_weights and not want_lse:
            return out
        ctx.set_materialize_grads(False)
        results = [out]
        if weights is not None:
            results.append(weights)
        if want_lse:
            results.append(row_max + torch.log(row_sum))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = operator_calls.saved_tensors(ctx)
        tensors, saved = given[:_TENSORS], given[_TENSORS:]
        scale, keywords, want_weights, want_lse = ctx.call
        need_mask_grad = ctx.needs_input_grad[_MASK]
        cotangents = (
            torch.zeros_like(saved[0]) if grads[0] is None else grads[0],
            grads[1] if want_weights else None,
            grads[-1] if want_lse else None,
        )
        if operator_calls.is_differentiated():
            results = AttentionBackward.apply(
                *_of_backward(cotangents, tensors, saved, scale, keywords, need_mask_grad)
            )
        else:
            results = operator_calls.backward(cotangents, tensors, saved, scale, keywords, need_mask_grad)
        return _of_inputs(results, ctx.needs_input_grad)


_eager_attention = super(Function, _Attention).apply


def _of_inputs(results: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[OptionalTensor, ...]:
    """Returns what a backward returns: the needed ones of the six gradients, None for all other inputs."""
    gradients = [result if needed else None for result, needed in zip(results, needs, strict=False)]
    return (*gradients, *(None,) * (len(needs) - len(gradients)))


def _of_backward(
    cotangents: operator_calls.Cotangents,
    tensors: Sequence[OptionalTensor],
    saved: Any,
    scale: float,
    keywords: Keywords,
    need_mask_grad: bool,
) -> Inputs:
    """Returns the inputs of :class:`AttentionBackward`."""
    given: list[Any] = [*cotangents, *tensors, *saved, *(None,) * len(SOURCES)]
    return Inputs._make([*given, scale, keywords, need_mask_grad]).counted_through_inputs()


class _TransformedAttention(Function):
    """The form for torch.func: (tensors of a call, scale, keywords, want_weights) → (out, lse, row_max,
    row_sum, [out_residual], [weights]).
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        *given, scale, keywords, want_weights = inputs
        tensors = operator_calls.dense(Tensors(*given))
        query, key, value = tensors[:3]
        merged = keywords_of(tensors, keywords)
        out, row_max, row_sum, residual = operator_calls.forward(
            query, key, value, scale, merged, want_weights
        )
        results: tuple[Tensor, ...] = (out, row_max + torch.log(row_sum), row_max, row_sum)
        if residual is not None:
            results = (*results, residual)
        if not want_weights:
            return results
        return (*results, ops.attention_weights(query, key, row_max, row_sum, scale, **merged))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        out, _, row_max, row_sum, *rest = output
        residual = rest.pop(0) if out.dtype in ops.SIXTEEN_BITS else None
        ctx.mark_non_differentiable(row_max, row_sum, *([] if residual is None else [residual]))
        weights = rest[0] if rest else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_TENSORS], out, row_max, row_sum, residual, weights)
        ctx.save_for_forward(*inputs[:_TENSORS])
        ctx.call = inputs[_TENSORS:]
        ctx.results = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale, keywords, want_weights = ctx.call
        kept = operator_calls.saved_tensors(ctx)
        given, saved = kept[:_TENSORS], kept[_TENSORS:]
        grad_out, grad_lse, grad_weights = grads[0], grads[1], grads[-1] if want_weights else None
        cotangents = (torch.zeros_like(saved[0]) if grad_out is None else grad_out, grad_weights, grad_lse)
        need_mask_grad = ctx.needs_input_grad[_MASK]
        inputs = _of_backward(cotangents, given, saved, scale, keywords, need_mask_grad)
        return _of_inputs(AttentionBackward.apply(*inputs), ctx.needs_input_grad)

    @staticmethod
    @nestable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        scale, keywords, want_weights = ctx.call
        given = Inputs(
            **dict(zip(Tensors._fields, primals(ctx), strict=True)), scale=scale, keywords=keywords
        )
        results: list[OptionalTensor] = [None] * ctx.results
        if want_weights:
            moving = {n: t for n, t in zip(SOURCES, tangents, strict=False) if t is not None}
            results[0], results[-1], results[1] = by_formula.push(by_formula.attention, given, moving)
        else:
            results[:2] = AttentionTangents.apply(*given.along(tangents[: len(SOURCES)]))[2:4]
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return vmapped(_TransformedAttention.apply, info, in_dims, *inputs)


def vmapped(
    apply: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: tuple[Any, ...], *inputs: Any
) -> tuple[tuple[Tensor, ...], Any]:
    """Returns the results of ``apply`` for all slices of a vmap, and their mapped dimensions.

    ``inputs`` are the tensors of a call, its scale, its keywords, and further arguments of ``apply``.
    """
    given, call = Tensors(*inputs[:_TENSORS]), inputs[_TENSORS:]
    dims: Any = Tensors(*in_dims[:_TENSORS])
    if given.seed is not None or is_packed(call[1]):
        # The dropout pattern counts the batch of one slice, which folding would change; packed sequences
        # have no batch to fold into.
        return each_slice(apply, info.batch_size, in_dims, inputs)
    size, batch = info.batch_size, slice_batch(given.query, dims.query)
    results = apply(
        fold(given.query, dims.query, size),
        fold(given.key, dims.key, size),
        fold(given.value, dims.value, size),
        fold_optional(given.mask, dims.mask, size, batch),
        fold_optional(given.slopes, dims.slopes, size, batch),
        fold_optional(given.sinks, dims.sinks, size, batch),
        given.seed,
        *call,
    )
    return tuple(unfold(result, size, batch) for result in results), (0,) * len(results)
