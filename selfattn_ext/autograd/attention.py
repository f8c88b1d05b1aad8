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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import Keywords, OptionalTensor, Tensors, formula, is_packed, keywords_of, refusals
from ..reference import default_scale
from . import operator_calls
from .vmap import each_slice, fold, fold_optional, slice_batch, unfold, unfold_gradient

__all__ = ["attention", "plain_attention"]

#: How many tensors a call has, and which is the mask.
_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")


def attention(
    tensors: Tensors, scale: float, keywords: Keywords, want_weights: bool, want_lse: bool
) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
    """Differentiable attention on four-dimensional tensors: (out, weights if wanted, lse if wanted).

    ``keywords`` are the operators' keyword arguments that are no tensors, those at their default left out.
    """
    if forward_ad._current_level >= 0:
        # Forward-mode derivatives go through the formula, which has them for every option.
        result = formula(tensors, scale, keywords)
        return result.out, result.weights if want_weights else None, result.lse if want_lse else None
    if torch._C._are_functorch_transforms_active():
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
    # Not any() of a generator, which costs a call on tiny tensors a twentieth.
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _PlainAttention(Function):
    """Eager mode with no tensor but query, key and value, returning out: the least that a call can cost.

    Without keywords (beside the causal rule) it takes the operators that know none, and None for the default
    scale.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: tuple[Any, bool, bool, Keywords]
    ) -> Tensor:
        scale, is_causal, enable_gqa, keywords = call
        statistics: Any
        if keywords:
            out, *statistics, residual = operator_calls.forward(query, key, value, scale, keywords)
        else:
            out, statistics, residual = ops.plain_attention_forward(
                query, key, value, scale, is_causal, enable_gqa
            )
        ctx.save_for_backward(query, key, value, out, residual)
        # Neither an input nor a result, so that the context may simply hold it, which is cheaper.
        ctx.call = (statistics, scale, is_causal, keywords)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, residual = ctx.saved_tensors
        statistics, scale, is_causal, keywords = ctx.call
        if operator_calls.is_differentiated():
            scale = default_scale(query.size(3)) if scale is None else scale
            if is_causal:
                keywords = {**keywords, "is_causal": True}
            tensors = Tensors(query, key, value)
            saved: operator_calls.Saved = (out, *statistics, residual, None)
            grads = _AttentionBackward.apply(grad_out, None, None, *tensors, *saved, scale, keywords, False)
            return grads[0], grads[1], grads[2], None
        try:
            if keywords:
                if residual is not None:
                    keywords = {**keywords, "out_residual": residual}
                row_max, row_sum = statistics
                grads = ops.direct_backward(
                    grad_out, query, key, value, out, row_max, row_sum, scale, **keywords
                )
            else:
                grads = ops.plain_attention_backward(
                    grad_out, query, key, value, out, statistics, residual, scale, is_causal
                )
        except MemoryError as error:
            raise refusals.out_of_memory(error, query) from None
        return grads[0], grads[1], grads[2], None


# Function.apply looks for the wrappers of torch.func in every argument; who calls this, and _eager_attention,
# has made sure that no transform is active.
plain_attention = super(Function, _PlainAttention).apply
# The engine calls apply of the context, which looks for backward in Python: spared the search, a step on tiny
# tensors is faster by a fiftieth.
_PlainAttention._backward_cls.apply = _PlainAttention.backward  # type: ignore[attr-defined]


class _Attention(Function):
    """Eager mode: of the tensors of a call, scale, keywords, want_weights and want_lse; returns out, or
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
        # See Note [Rounded outputs] for why 16-bit weights are of no use to the backward.
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
        given = ctx.saved_tensors
        tensors, saved = given[:_TENSORS], given[_TENSORS:]
        scale, keywords, want_weights, want_lse = ctx.call
        need_mask_grad = ctx.needs_input_grad[_MASK]
        cotangents = (
            torch.zeros_like(saved[0]) if grads[0] is None else grads[0],
            grads[1] if want_weights else None,
            grads[-1] if want_lse else None,
        )
        if operator_calls.is_differentiated():
            results = _AttentionBackward.apply(*cotangents, *given, scale, keywords, need_mask_grad)
        else:
            results = operator_calls.backward(cotangents, tensors, saved, scale, keywords, need_mask_grad)
        return _of_inputs(results, ctx.needs_input_grad)


_eager_attention = super(Function, _Attention).apply


def _of_inputs(results: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[OptionalTensor, ...]:
    """What a backward returns: of the six gradients those that are needed, and None for all other inputs."""
    gradients = [result if needed else None for result, needed in zip(results, needs, strict=False)]
    return (*gradients, *(None,) * (len(needs) - len(gradients)))


class _TransformedAttention(Function):
    """Under torch.func: of the tensors of a call, scale, keywords and want_weights; returns (out, lse,
    row_max, row_sum, [out_residual], [weights]).
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
        ctx.save_for_backward(*inputs[:_TENSORS], out, row_max, row_sum, residual, weights)
        ctx.call = inputs[_TENSORS:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale, keywords, want_weights = ctx.call
        grad_out, grad_lse, grad_weights = grads[0], grads[1], grads[-1] if want_weights else None
        results = _AttentionBackward.apply(
            grad_out, grad_weights, grad_lse, *ctx.saved_tensors, scale, keywords, ctx.needs_input_grad[_MASK]
        )
        return _of_inputs(results, ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *tensors, scale, keywords, want_weights = inputs
        given = Tensors(*tensors)
        dims: Any = Tensors(*in_dims[:_TENSORS])
        if given.seed is not None or is_packed(keywords):
            # The dropout pattern counts the batch of one slice, which folding would change; packed sequences
            # have no batch to fold into.
            return each_slice(_TransformedAttention.apply, info.batch_size, in_dims, inputs)
        size, batch = info.batch_size, slice_batch(given.query, dims.query)
        results = _TransformedAttention.apply(
            fold(given.query, dims.query, size),
            fold(given.key, dims.key, size),
            fold(given.value, dims.value, size),
            fold_optional(given.mask, dims.mask, size, batch),
            fold_optional(given.slopes, dims.slopes, size, batch),
            fold_optional(given.sinks, dims.sinks, size, batch),
            given.seed,
            scale,
            keywords,
            want_weights,
        )
        return tuple(unfold(result, size, batch) for result in results), (0,) * len(results)


class _BackwardInputs(NamedTuple):
    """The inputs of :class:`_AttentionBackward`, or one thing for each: the cotangents, the tensors of the
    call, what its forward saved, and the rest of the call.
    """

    grad_out: Any = None
    grad_weights: Any = None
    grad_lse: Any = None
    query: Any = None
    key: Any = None
    value: Any = None
    mask: Any = None
    slopes: Any = None
    sinks: Any = None
    seed: Any = None
    out: Any = None
    row_max: Any = None
    row_sum: Any = None
    out_residual: Any = None
    weights: Any = None
    scale: Any = None
    keywords: Any = None
    need_mask_grad: Any = None


_COTANGENTS = ("grad_out", "grad_weights", "grad_lse")
_SAVED = ("out", "row_max", "row_sum", "out_residual", "weights")
#: What has a gradient.
_SOURCES = ("query", "key", "value", "mask", "slopes", "sinks")


def _named(given: _BackwardInputs, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(given, name) for name in names)


class _AttentionBackward(Function):
    """The gradient of attention as a function of its own; see Note [Second derivatives].

    Differentiable in the cotangents and in the six inputs of attention. out, the row statistics and the
    weights only spare the operator their recomputation: what depends on them is counted through the inputs.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        given = _BackwardInputs(*inputs)
        tensors = operator_calls.dense(Tensors(*_named(given, Tensors._fields)))
        cotangents: Any = _named(given, _COTANGENTS)
        saved: Any = _named(given, _SAVED)
        return operator_calls.backward(
            cotangents, tensors, saved, given.scale, given.keywords, given.need_mask_grad
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given = _BackwardInputs(*inputs)
        ctx.save_for_backward(*_named(given, _COTANGENTS), *_named(given, Tensors._fields))
        ctx.call = (given.scale, given.keywords, given.need_mask_grad)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        scale, keywords, need_mask_grad = ctx.call
        saved = dict(zip(_COTANGENTS + Tensors._fields, ctx.saved_tensors, strict=True))
        incoming = [name for name in _COTANGENTS if saved[name] is not None]
        sources = [
            name for name in _SOURCES if saved[name] is not None and (name != "mask" or need_mask_grad)
        ]

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            grads, points = tensors[: len(incoming)], tensors[len(incoming) :]

            def outputs(*points: Tensor) -> tuple[Tensor, ...]:
                given = {**saved, **dict(zip(sources, points, strict=True))}
                result = formula(Tensors(*(given[name] for name in Tensors._fields)), scale, keywords)
                return tuple(
                    of_result
                    for name, of_result in zip(_COTANGENTS, result, strict=True)
                    if saved[name] is not None
                )

            return torch.func.vjp(outputs, *points)[1](grads)

        pull = torch.func.vjp(gradients, *(saved[name] for name in incoming + sources))[1]
        given = dict(zip(_SOURCES, cotangents, strict=True))
        pulled = pull(tuple(given[name] for name in sources))
        return tuple(_BackwardInputs(**dict(zip(incoming + sources, pulled, strict=True))))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        given, dims = _BackwardInputs(*inputs), _BackwardInputs(*in_dims)
        if given.seed is not None or is_packed(given.keywords):
            return each_slice(_AttentionBackward.apply, info.batch_size, in_dims, inputs)
        size, batch = info.batch_size, slice_batch(given.query, dims.query)
        folded: dict[str, OptionalTensor] = {
            name: fold(getattr(given, name), getattr(dims, name), size)
            for name in (*_COTANGENTS, "query", "key", "value", *_SAVED)
            if getattr(given, name) is not None
        }
        has_gradient = {"mask": given.need_mask_grad, "slopes": True, "sinks": True}
        for name, expand in has_gradient.items():
            # Each slice has a gradient of its own, which needs an input of its own to be the gradient of.
            tensor, dim = getattr(given, name), getattr(dims, name)
            folded[name] = fold_optional(tensor, dim, size, batch, expand=expand)
        results = _AttentionBackward.apply(*given._replace(**folded))
        unfolded: list[Tensor] = []
        out_dims: list[int | None] = []
        for name, result in zip(_SOURCES, results, strict=True):
            source = getattr(given, name)
            if source is None or not has_gradient.get(name, True):
                unfolded.append(result)
                out_dims.append(None)
            else:
                original = slice_batch(source, getattr(dims, name))
                unfolded.append(unfold_gradient(result, size, batch, original))
                out_dims.append(0)
        return tuple(unfolded), tuple(out_dims)
