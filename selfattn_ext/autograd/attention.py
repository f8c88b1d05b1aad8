"""Gradients of attention: autograd.Function classes over the operators, of any order and under torch.func.

Note [Two forms of one function]
    torch.func needs the setup_context form of autograd.Function, which costs an ordinary training step
    several times the call overhead of the form with the context in forward. So attention has both:
    ``_Attention`` for eager mode (and ``_PlainAttention``, the same with fewer arguments) and
    ``_TransformedAttention``, used while a torch.func transform is active.

Note [Second derivatives]
    The first-order gradient is a function of its own, ``_AttentionBackward``, whose forward is the fused
    backward operator. So ``create_graph=True`` and ``torch.func.grad`` run the kernels. Only differentiating
    that gradient goes through the formula of :mod:`selfattn_ext.reference`, with its (L, S) matrices. The
    formula is differentiable any number of times, hence so is attention.

Note [Gradient of weights and lse]
    With P the softmax, W the weights after dropout and dW, dl the gradients of W and lse, the score gradient
    is ``dS = P * (dropout(grad_out @ value^T + dW) - delta)``, where ``delta = rowsum(grad_out * out) +
    rowsum(W * dW) - dl``. The operator computes the first term of delta; ``grad_row`` carries the other two.

Note [Threads of a backward]
    torch computes gradients of CUDA tensors in threads of its own, where context variables of the caller do
    not hold. What a gradient depends on beside tensors, the kernel asked for and the precision of float32
    products, therefore comes from the forward's call.

Note [Rounded outputs]
    delta wants the output and the weights as they were before they were rounded to 16 bits. The forward
    operator gives what rounding took away from out as out_residual, where a backward is to come; weights that
    get a gradient are computed again, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import OptionalTensor, Options, Tensors, checks, formula, is_packed, keywords_of
from ..reference import default_scale
from . import operator_calls
from .vmap import each_slice, fold, fold_optional, slice_batch, unfold, unfold_gradient

__all__ = ["attention", "plain_attention"]


def attention(
    tensors: Tensors, scale: float, options: Options, want_weights: bool, want_lse: bool
) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
    """Differentiable attention on four-dimensional tensors: (out, weights if wanted, lse if wanted).

    ``options`` are the operators' keyword arguments that are no tensors, those at their default left out.
    """
    if forward_ad._current_level >= 0:
        # Forward-mode derivatives go through the formula, which has them for every option.
        result = formula(tensors, scale, options)
        return result.out, result.weights if want_weights else None, result.lse if want_lse else None
    if torch._C._are_functorch_transforms_active():
        out, lse, _, _, *rest = _TransformedAttention.apply(*tensors, scale, options, want_weights)
        return out, rest[-1] if want_weights else None, lse if want_lse else None
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        results = _eager_attention(*tensors, scale, options, want_weights, want_lse)
        if not want_weights and not want_lse:
            return results, None, None
        return results[0], results[1] if want_weights else None, results[-1] if want_lse else None
    query, key, value = tensors[:3]
    keywords = keywords_of(tensors, options)
    weights = None
    if want_weights:
        out, row_max, row_sum, _ = ops.attention_forward(
            query, key, value, scale, need_weights=True, **keywords
        )
        weights = ops.attention_weights(query, key, row_max, row_sum, scale, **keywords)
    else:
        out, row_max, row_sum, _ = ops.attention_forward(query, key, value, scale, **keywords)
    return out, weights, row_max + torch.log(row_sum) if want_lse else None


def _any_requires_grad(tensors: Tensors) -> bool:
    # Not any() of a generator, which costs a call on tiny tensors a twentieth.
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _PlainAttention(Function):
    """Eager mode with no tensor but query, key and value, returning out: the least that a call can cost.

    Without options (beside the causal rule) it takes the operators that know none, and None for the default
    scale.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: tuple[Any, bool, bool, Options]
    ) -> Tensor:
        scale, is_causal, enable_gqa, options = call
        statistics: Any
        if options:
            out, *statistics, residual = operator_calls.forward(query, key, value, scale, options)
        else:
            out, statistics, residual = ops.plain_attention_forward(
                query, key, value, scale, is_causal, enable_gqa
            )
        ctx.save_for_backward(query, key, value, out, residual)
        # Neither an input nor a result, so that the context may simply hold it, which is cheaper.
        ctx.call = (statistics, scale, is_causal, options)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, residual = ctx.saved_tensors
        statistics, scale, is_causal, options = ctx.call
        if operator_calls.is_differentiated():
            scale = default_scale(query.size(3)) if scale is None else scale
            if is_causal:
                options = {**options, "is_causal": True}
            tensors: Tensors = (query, key, value, None, None, None, None)
            saved: operator_calls.Saved = (out, *statistics, residual, None)
            grads = _AttentionBackward.apply(grad_out, None, None, *tensors, *saved, scale, options, False)
            return grads[0], grads[1], grads[2], None
        try:
            if options:
                if residual is not None:
                    options = {**options, "out_residual": residual}
                row_max, row_sum = statistics
                grads = ops.direct_backward(
                    grad_out, query, key, value, out, row_max, row_sum, scale, **options
                )
            else:
                grads = ops.plain_attention_backward(
                    grad_out, query, key, value, out, statistics, residual, scale, is_causal
                )
        except MemoryError as error:
            raise checks.out_of_memory(error, query) from None
        return grads[0], grads[1], grads[2], None


# Function.apply looks for the wrappers of torch.func in every argument; who calls this, and _eager_attention,
# has made sure that no transform is active.
plain_attention = super(Function, _PlainAttention).apply
# The engine calls apply of the context, which looks for backward in Python: spared the search, a step on tiny
# tensors is faster by a fiftieth.
_PlainAttention._backward_cls.apply = _PlainAttention.backward  # type: ignore[attr-defined]


class _Attention(Function):
    """Eager mode: of the tensors of a call, scale, options, want_weights and want_lse; returns out, or
    (out, [weights], [lse]).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        tensors: Any = inputs[:7]
        query, key, value = inputs[:3]
        scale, options, want_weights, want_lse = inputs[7:]
        keywords = keywords_of(tensors, options)
        statistics = operator_calls.forward(query, key, value, scale, keywords, want_weights)
        out, row_max, row_sum, _ = statistics
        weights = None
        if want_weights:
            weights = ops.attention_weights(query, key, row_max, row_sum, scale, **keywords)
        # See Note [Rounded outputs] for why 16-bit weights are of no use to the backward.
        saved_weights = None if query.dtype in ops.SIXTEEN_BITS else weights
        ctx.save_for_backward(*tensors, *statistics, saved_weights)
        ctx.call = (scale, options, want_weights, want_lse)
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
        given = ctx.saved_tensors
        tensors, saved = given[:7], given[7:]
        scale, options, want_weights, want_lse = ctx.call
        needs = ctx.needs_input_grad
        cotangents = (
            torch.zeros_like(saved[0]) if grads[0] is None else grads[0],
            grads[1] if want_weights else None,
            grads[-1] if want_lse else None,
        )
        if operator_calls.is_differentiated():
            results = _AttentionBackward.apply(*cotangents, *given, scale, options, needs[3])
        else:
            results = operator_calls.backward(cotangents, tensors, saved, scale, options, needs[3])
        if not (needs[3] or needs[4] or needs[5]):
            return (*results[:3], None, None, None, None, None, None, None, None)
        return (*_only_needed(results, needs), None, None, None, None, None)


_eager_attention = super(Function, _Attention).apply


def _only_needed(results: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[OptionalTensor, ...]:
    return tuple(result if needed else None for result, needed in zip(results, needs, strict=False))


class _TransformedAttention(Function):
    """Under torch.func: of the tensors of a call, scale, options and want_weights; returns (out, lse,
    row_max, row_sum, [out_residual], [weights]).
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        tensors = operator_calls.dense(inputs[:7])
        query, key, value = tensors[:3]
        scale, options, want_weights = inputs[7:]
        keywords = keywords_of(tensors, options)
        out, row_max, row_sum, residual = operator_calls.forward(
            query, key, value, scale, keywords, want_weights
        )
        results: tuple[Tensor, ...] = (out, row_max + torch.log(row_sum), row_max, row_sum)
        if residual is not None:
            results = (*results, residual)
        if not want_weights:
            return results
        return (*results, ops.attention_weights(query, key, row_max, row_sum, scale, **keywords))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        out, _, row_max, row_sum, *rest = output
        residual = rest.pop(0) if out.dtype in ops.SIXTEEN_BITS else None
        ctx.mark_non_differentiable(row_max, row_sum, *([] if residual is None else [residual]))
        ctx.save_for_backward(*inputs[:7], out, row_max, row_sum, residual, rest[0] if rest else None)
        ctx.call = inputs[7:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale, options, want_weights = ctx.call
        grad_out, grad_lse, grad_weights = grads[0], grads[1], grads[-1] if want_weights else None
        needs = ctx.needs_input_grad
        results = _AttentionBackward.apply(
            grad_out, grad_weights, grad_lse, *ctx.saved_tensors, scale, options, needs[3]
        )
        return (*_only_needed(results, needs), None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        query, key, value, mask, slopes, sinks, seed, *rest = inputs
        if seed is not None or is_packed(rest[1]):
            # The dropout pattern counts the batch of one slice, which folding would change; packed sequences
            # have no batch to fold into.
            return each_slice(_TransformedAttention.apply, info.batch_size, in_dims, inputs)
        size, batch = info.batch_size, slice_batch(query, in_dims[0])
        results = _TransformedAttention.apply(
            *(fold(tensor, dim, size) for tensor, dim in zip((query, key, value), in_dims, strict=False)),
            *(
                fold_optional(tensor, dim, size, batch)
                for tensor, dim in zip((mask, slopes, sinks), in_dims[3:], strict=False)
            ),
            seed,
            *rest,
        )
        return tuple(unfold(result, size, batch) for result in results), (0,) * len(results)


class _AttentionBackward(Function):
    """The gradient of attention as a function of its own; see Note [Second derivatives].

    Inputs: the cotangents (0 to 2), the tensors of the call (3 to 9), what its forward saved (10 to 14),
    scale, options and need_mask_grad. Differentiable in the cotangents and in the six inputs of attention.
    out, the row statistics and the weights only spare the operator their recomputation: what depends on them
    is counted through the inputs.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        tensors = operator_calls.dense(inputs[3:10])
        return operator_calls.backward(inputs[:3], tensors, inputs[10:15], *inputs[15:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.call = inputs[15:]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        scale, options, need_mask_grad = ctx.call
        saved = list(ctx.saved_tensors)
        incoming = [index for index in range(3) if saved[index] is not None]
        sources = [
            index for index in range(3, 9) if saved[index] is not None and (index != 6 or need_mask_grad)
        ]

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            grads, points = tensors[: len(incoming)], tensors[len(incoming) :]

            def outputs(*points: Tensor) -> tuple[Tensor, ...]:
                inputs = dict(zip(sources, points, strict=True))
                every: Any = tuple(inputs.get(index, saved[index]) for index in range(3, 10))
                result = formula(every, scale, options)
                return tuple(result[index] for index in incoming)

            return torch.func.vjp(outputs, *points)[1](grads)

        pull = torch.func.vjp(gradients, *(saved[index] for index in incoming + sources))[1]
        pulled = pull(tuple(cotangents[index - 3] for index in sources))
        results: list[OptionalTensor] = [None] * 18
        for index, gradient in zip(incoming + sources, pulled, strict=True):
            results[index] = gradient
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        if inputs[9] is not None or is_packed(inputs[16]):
            return each_slice(_AttentionBackward.apply, info.batch_size, in_dims, inputs)
        size, batch = info.batch_size, slice_batch(inputs[3], in_dims[3])
        need_mask_grad = inputs[17]
        folded = list(inputs)
        for index in (0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14):
            if inputs[index] is not None:
                folded[index] = fold(inputs[index], in_dims[index], size)
        for index, expand in ((6, need_mask_grad), (7, True), (8, True)):
            # Each slice has a gradient of its own, which needs an input of its own to be the gradient of.
            folded[index] = fold_optional(inputs[index], in_dims[index], size, batch, expand=expand)
        results = _AttentionBackward.apply(*folded)
        unfolded = [
            unfold(result, size, slice_batch(inputs[index], in_dims[index]))
            for index, result in zip((3, 4, 5), results, strict=False)
        ]
        dims: list[int | None] = [0, 0, 0]
        for index, result, wanted in zip((6, 7, 8), results[3:], (need_mask_grad, True, True), strict=True):
            if wanted and inputs[index] is not None:
                unfolded.append(
                    unfold_gradient(result, size, batch, slice_batch(inputs[index], in_dims[index]))
                )
                dims.append(0)
            else:
                unfolded.append(result)
                dims.append(None)
        return tuple(unfolded), tuple(dims)
