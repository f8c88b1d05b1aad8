"""First derivatives: the gradients of attention as a function that can be differentiated again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from . import by_formula, operator_calls
from .differentiated import COTANGENTS, SAVED, SOURCES, Inputs, fold_inputs, unfold_gradients
from .forward_levels import nestable
from .second_order import AttentionBackwardBackward
from .vmap import each_slice

__all__ = ["AttentionBackward"]


class AttentionBackward(Function):
    """The six gradients of :class:`Inputs`; see Note [Second derivatives] in attention_function.py.

    They are differentiable in the cotangents and in the six inputs of attention. out, the row statistics and
    the weights only save the operator their recomputation; dependence on them is counted through the inputs.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        given = Inputs(*inputs)
        cotangents: Any = given.all_of(COTANGENTS)
        saved: Any = given.all_of(SAVED)
        return operator_calls.backward(
            cotangents,
            operator_calls.dense(given.tensors()),
            saved,
            given.scale,
            given.keywords,
            given.need_mask_grad,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given = Inputs(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*given.unasked(output))
        given.save(ctx)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = Inputs.saved(ctx)
        if given.has_formula_alone():
            named = dict(zip(SOURCES, cotangents, strict=True))
            wanted = [named[name] for name in given.wanted()]
            return tuple(by_formula.pull(by_formula.gradients, given, wanted))
        second = AttentionBackwardBackward.apply(*given.along(cotangents))
        *of_sources, grad_out, grad_lse = second
        found = dict(zip(SOURCES, of_sources, strict=True))
        result = Inputs(**{name: found[name] for name in given.wanted()}, grad_out=grad_out)
        return tuple(result if given.grad_lse is None else result._replace(grad_lse=grad_lse))

    @staticmethod
    @nestable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given, moving = Inputs.saved_primals(ctx), Inputs(*tangents)
        if given.has_formula_alone() or moving.grad_weights is not None:
            pushed = by_formula.push(by_formula.gradients, given, moving.moving())
            named = dict(zip(given.wanted(), pushed, strict=True))
            return tuple(named.get(name) for name in SOURCES)
        parts = []
        directions = moving.all_of(SOURCES)
        if any(direction is not None for direction in directions):
            parts.append(AttentionBackwardBackward.apply(*given.along(directions))[: len(SOURCES)])
        if moving.grad_out is not None or moving.grad_lse is not None:
            parts.append(AttentionBackward.apply(*given.with_cotangents(moving.grad_out, moving.grad_lse)))
        sums = [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]
        named = dict(zip(SOURCES, sums, strict=False))
        return tuple(named.get(name) if name in given.wanted() else None for name in SOURCES)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        given, dims, size = Inputs(*inputs), Inputs(*in_dims), info.batch_size
        if given.has_one_batch():
            return each_slice(AttentionBackward.apply, size, in_dims, inputs)
        gradients = AttentionBackward.apply(*fold_inputs(given, dims, size))
        unfolded, out_dims = unfold_gradients(given, dims, size, gradients)
        return tuple(unfolded), tuple(out_dims)
