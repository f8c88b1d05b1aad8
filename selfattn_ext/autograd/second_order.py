"""Second derivatives: the gradients of the gradients of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from . import by_formula, operator_calls
from .differentiated import COTANGENTS, SAVED, SOURCES, Inputs, fold_inputs, unfold_gradients
from .forward_levels import nestable
from .vmap import each_slice, slice_batch, unfold

__all__ = ["AttentionBackwardBackward"]

#: The inputs whose gradients the results are, in their order.
_RESULTS = (*SOURCES, "grad_out", "grad_lse")


class AttentionBackwardBackward(Function):
    """:class:`Inputs` with a direction, without a gradient of weights → the six gradients of F, and those
    with respect to grad_out and grad_lse; see Note [Second derivatives] in csrc/core/tangents.h.

    Its own derivatives, of third order, are computed by the formula.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        given = Inputs(*inputs)
        cotangents: Any = given.all_of(COTANGENTS)
        saved: Any = given.all_of(SAVED)
        return operator_calls.backward_backward(
            cotangents,
            operator_calls.dense(given.tensors()),
            saved,
            given.tangents(),
            given.scale,
            given.keywords,
            bool(given.need_mask_grad),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given = Inputs(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*given.unasked(output), *(output[-1:] if given.grad_lse is None else ()))
        given.save(ctx)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = Inputs.saved(ctx)
        named = dict(zip(_RESULTS, cotangents, strict=True))
        return tuple(
            by_formula.pull(by_formula.second_gradients, given, [named[name] for name in _computed(given)])
        )

    @staticmethod
    @nestable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given, directions = Inputs.saved_primals(ctx), Inputs(*tangents).moving()
        if not directions:
            return (None,) * len(_RESULTS)
        pushed = by_formula.push(by_formula.second_gradients, given, directions)
        named = dict(zip(_computed(given), pushed, strict=True))
        return tuple(named.get(name) for name in _RESULTS)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        given, dims, size = Inputs(*inputs), Inputs(*in_dims), info.batch_size
        if given.has_one_batch():
            return each_slice(AttentionBackwardBackward.apply, size, in_dims, inputs)
        *gradients, out, lse = AttentionBackwardBackward.apply(*fold_inputs(given, dims, size))
        unfolded, out_dims = unfold_gradients(given, dims, size, gradients)
        batch = slice_batch(given.query, dims.query)
        return (*unfolded, unfold(out, size, batch), unfold(lse, size, batch)), (*out_dims, 0, 0)


def _computed(given: Inputs) -> list[str]:
    """Returns the names of the results that the formula gives."""
    return [*given.wanted(), *given.present(COTANGENTS)]
