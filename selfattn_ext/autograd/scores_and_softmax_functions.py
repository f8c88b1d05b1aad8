"""Differentiable halves of attention, the scores and their softmax, also under torch.func.

As in :mod:`.attention_function`, each gradient is a function of its own whose forward is an
operator, so that it can be differentiated any number of times, and each function has a cheaper form for
eager mode.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import Keywords, OptionalTensor, refusals
from ..arguments.shapes import dense_rows
from ..reference import accumulation_dtype
from . import operator_calls
from .forward_levels import nestable, primals, pushed
from .vmap import fold, fold_optional, slice_batch, unfold

__all__ = ["attention_scores", "masked_softmax"]


def _eager_form(function: Any) -> Any:
    """Returns a function's eager form: Note [Two forms of one function] in attention_function.py says why."""

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(function.backward)

    Eager.__name__ = Eager.__qualname__ = function.__name__
    return Eager


def _has_transforms() -> bool:
    """Tells whether forward mode or torch.func may be active, for which the eager form is not made."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _sum(*terms: OptionalTensor) -> OptionalTensor:
    """Returns the sum of the terms that are not None, None if there is none."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def attention_scores(query: Tensor, key: Tensor, scale: float, kernel: str = "") -> Tensor:
    """Computes differentiable ``scale * query @ key^T`` of four-dimensional tensors."""
    if _has_transforms():
        return _Scores.apply(query, key, scale, kernel)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return _EagerScores.apply(query, key, scale, kernel)
    return ops.attention_scores(query, key, scale, kernel_name=kernel)


class _Scores(Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, scale: float, kernel: str) -> Tensor:  # type: ignore[override]
        return ops.attention_scores(dense_rows(query), dense_rows(key), scale, kernel_name=kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, key, *call = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key)
        ctx.save_for_forward(query, key)
        ctx.call = call

    @staticmethod
    def backward(ctx: Any, grad: OptionalTensor) -> Any:  # type: ignore[override]
        if grad is None:
            return (None,) * 4
        if operator_calls.is_differentiated():
            grads = _ScoresBackward.apply(grad, *ctx.saved_tensors, *ctx.call)
        else:
            grads = _ScoresBackward.forward(grad, *ctx.saved_tensors, *ctx.call)
        return (*grads, None, None)

    @staticmethod
    @nestable
    def jvp(ctx: Any, of_query: OptionalTensor, of_key: OptionalTensor, *rest: Any) -> Any:
        query, key = primals(ctx)
        return _sum(
            None if of_query is None else _Scores.apply(of_query, key, *ctx.call),
            None if of_key is None else _Scores.apply(query, of_key, *ctx.call),
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], query: Tensor, key: Tensor, scale: float, kernel: str
    ) -> Any:
        size, batch = info.batch_size, slice_batch(query, in_dims[0])
        scores = _Scores.apply(fold(query, in_dims[0], size), fold(key, in_dims[1], size), scale, kernel)
        return unfold(scores, size, batch), 0


_EagerScores = _eager_form(_Scores)


class _ScoresBackward(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        grad: Tensor, query: Tensor, key: Tensor, scale: float, kernel: str
    ) -> tuple[Tensor, Tensor]:
        try:
            return ops.attention_scores_backward(
                grad, dense_rows(query), dense_rows(key), scale, kernel_name=kernel
            )
        except MemoryError as error:
            raise refusals.out_of_memory(error, query) from None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grad, query, key, *ctx.call = inputs
        ctx.save_for_backward(grad, query, key)
        ctx.save_for_forward(grad, query, key)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> Any:  # type: ignore[override]
        """Uses that the scores of (query, key) and their gradients are parts of one trilinear function."""
        grad, query, key = ctx.saved_tensors
        of_grad = _Scores.apply(of_query, key, *ctx.call) + _Scores.apply(query, of_key, *ctx.call)
        return (of_grad, *_ScoresBackward.apply(grad, of_query, of_key, *ctx.call), None, None)

    @staticmethod
    @nestable
    def jvp(ctx: Any, of_grad: Tensor, of_query: Tensor, of_key: Tensor, *rest: Any) -> Any:
        grad, query, key = primals(ctx)
        first = _ScoresBackward.apply(of_grad, query, key, *ctx.call)
        second = _ScoresBackward.apply(grad, of_query, of_key, *ctx.call)
        return tuple(a + b for a, b in zip(first, second, strict=True))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad: Tensor, query: Tensor, key: Tensor, *call: Any
    ) -> Any:
        size, batch = info.batch_size, slice_batch(query, in_dims[1])
        tensors = (fold(tensor, dim, size) for tensor, dim in zip((grad, query, key), in_dims, strict=False))
        grads = _ScoresBackward.apply(*tensors, *call)
        return tuple(unfold(result, size, batch) for result in grads), (0, 0)


def masked_softmax(scores: Tensor, mask: OptionalTensor, scale: float, keywords: Keywords) -> Tensor:
    """Computes differentiable ``softmax(scale * scores + mask)`` over the last of four dimensions."""
    if _has_transforms():
        return _MaskedSoftmax.apply(scores, mask, scale, keywords)
    if torch.is_grad_enabled() and (scores.requires_grad or (mask is not None and mask.requires_grad)):
        return _EagerMaskedSoftmax.apply(scores, mask, scale, keywords)
    return ops.masked_softmax(scores, scale, mask=mask, **keywords)


class _MaskedSoftmax(Function):
    @staticmethod
    def forward(scores: Tensor, mask: OptionalTensor, scale: float, keywords: Keywords) -> Tensor:  # type: ignore[override]
        return ops.masked_softmax(scores, scale, mask=mask, **keywords)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, mask, scale, keywords = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        ctx.call = (scale, keywords.get("kernel_name", ""))
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)

    @staticmethod
    def backward(ctx: Any, grad: OptionalTensor) -> Any:  # type: ignore[override]
        if grad is None:
            return (None,) * 4
        (weights,) = ctx.saved_tensors
        scale, kernel = ctx.call
        run = _MaskedSoftmaxBackward.forward
        if operator_calls.is_differentiated():
            run = _MaskedSoftmaxBackward.apply
        grad_scores = run(grad, weights, scale, kernel) if ctx.needs_input_grad[0] else None
        grad_mask = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.mask
            unscaled = (
                grad_scores if grad_scores is not None and scale == 1.0 else run(grad, weights, 1.0, kernel)
            )
            grad_mask = unscaled.sum_to_size(shape).to(dtype)
        return grad_scores, grad_mask, None, None

    @staticmethod
    @nestable
    def jvp(ctx: Any, of_scores: OptionalTensor, of_mask: OptionalTensor, *rest: Any) -> Any:
        """Calls the backward, as the matrix of derivatives is symmetric."""
        weights: Any = primals(ctx)[0]
        scale, kernel = ctx.call
        run = _MaskedSoftmaxBackward.apply
        if of_mask is not None:
            of_mask = of_mask.to(weights.dtype).expand_as(weights)
        return _sum(
            None if of_scores is None else run(of_scores, weights, scale, kernel),
            None if of_mask is None else run(of_mask, weights, 1.0, kernel),
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        scores: Tensor,
        mask: OptionalTensor,
        scale: float,
        keywords: Keywords,
    ) -> Any:
        size, batch = info.batch_size, slice_batch(scores, in_dims[0])
        folded = fold_optional(mask, in_dims[1], size, batch)
        weights = _MaskedSoftmax.apply(fold(scores, in_dims[0], size), folded, scale, keywords)
        return unfold(weights, size, batch), 0


_EagerMaskedSoftmax = _eager_form(_MaskedSoftmax)


class _MaskedSoftmaxBackward(Function):
    """The gradient of the scores, as a function of the cotangent and the weights.

    The weights are an output of :class:`_MaskedSoftmax`, so their dependence on the scores is counted there.
    """

    @staticmethod
    def forward(grad: Tensor, weights: Tensor, scale: float, kernel: str) -> Tensor:  # type: ignore[override]
        try:
            return ops.masked_softmax_backward(grad, weights, scale, kernel_name=kernel)
        except MemoryError as error:
            raise refusals.out_of_memory(error, weights) from None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, weights, ctx.scale, _ = inputs
        ctx.save_for_backward(grad, weights)
        ctx.save_for_forward(grad, weights)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        function = functools.partial(_softmax_gradient, ctx.scale)
        return (*torch.func.vjp(function, *ctx.saved_tensors)[1]((cotangent,)), None, None)

    @staticmethod
    @nestable
    def jvp(ctx: Any, of_grad: Tensor, of_weights: Tensor, *rest: Any) -> Any:
        function = functools.partial(_softmax_gradient, ctx.scale)
        points: Any = primals(ctx)
        return pushed(function, points, (of_grad, of_weights))[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad: Tensor, weights: Tensor, scale: float, kernel: str
    ) -> Any:
        size, batch = info.batch_size, slice_batch(weights, in_dims[1])
        result = _MaskedSoftmaxBackward.apply(
            fold(grad, in_dims[0], size), fold(weights, in_dims[1], size), scale, kernel
        )
        return unfold(result, size, batch), 0


def _softmax_gradient(scale: float, grad: Tensor, weights: Tensor) -> tuple[Tensor]:
    """Computes what :class:`_MaskedSoftmaxBackward` computes, in torch's operations."""
    dtype = accumulation_dtype(weights.dtype)
    g, p = grad.to(dtype), weights.to(dtype)
    products = torch.where(p == 0, 0.0, p * g)
    return ((scale * (products - p * products.sum(-1, keepdim=True))).to(weights.dtype),)
