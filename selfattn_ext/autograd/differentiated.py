"""The inputs of a derivative of attention, by name, and how vmap folds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Keywords, OptionalTensor, Tensors, is_packed
from .forward_levels import primals
from .vmap import fold, fold_optional, slice_batch, unfold_gradient

__all__ = ["COTANGENTS", "SAVED", "SOURCES", "TANGENTS", "Inputs", "fold_inputs", "unfold_gradients"]


class Inputs(NamedTuple):
    """The inputs of a derivative of attention, or one value (a gradient, a mapped dimension) for each.

    They are the cotangents of attention's results, the tensors of the call, what its forward saved, a
    direction, and the rest of the call.
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
    tangent_query: Any = None
    tangent_key: Any = None
    tangent_value: Any = None
    tangent_mask: Any = None
    tangent_slopes: Any = None
    tangent_sinks: Any = None
    scale: Any = None
    keywords: Any = None
    need_mask_grad: Any = None

    @classmethod
    def saved(cls, ctx: Any) -> Inputs:
        """Returns, in a backward, the inputs that :meth:`save` has saved."""
        return cls(*ctx.saved_tensors, *ctx.call).counted_through_inputs()

    @classmethod
    def saved_primals(cls, ctx: Any) -> Inputs:
        """Returns, in a jvp, the inputs that :meth:`save` has saved."""
        return cls(*primals(ctx), *ctx.call)

    def counted_through_inputs(self) -> Inputs:
        """Returns the same inputs, with what the forward saved detached from the forward's graph.

        Derivatives through saved tensors are counted through the inputs, so the engine would visit the
        forward's node for nothing.
        """
        saved = self.present(SAVED)
        return self._replace(**{name: getattr(self, name).detach() for name in saved})

    def save(self, ctx: Any) -> None:
        """Saves the inputs for a backward and for forward mode."""
        tensors, ctx.call = self[:_CALL], self[_CALL:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def all_of(self, names: Iterable[str]) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in names)

    def present(self, names: Iterable[str]) -> list[str]:
        """Returns those of the names whose tensor is not None."""
        return [name for name in names if getattr(self, name) is not None]

    def moving(self) -> dict[str, Tensor]:
        """Returns the tangents that are not None of the inputs that derivatives depend on."""
        names = self.present((*COTANGENTS, *SOURCES, *TANGENTS))
        return dict(zip(names, self.all_of(names), strict=True))

    def along(self, directions: Sequence[OptionalTensor]) -> Inputs:
        """Returns the same inputs with a direction: a tangent or None for each of SOURCES."""
        return self._replace(**dict(zip(TANGENTS, directions, strict=True)))

    def with_cotangents(self, grad_out: OptionalTensor, grad_lse: OptionalTensor) -> Inputs:
        """Returns the same inputs with other cotangents, one of which is not None."""
        grad_out = torch.zeros_like(self.out) if grad_out is None else grad_out
        return self._replace(grad_out=grad_out, grad_weights=None, grad_lse=grad_lse)

    def wanted(self) -> list[str]:
        """Returns the names of the sources whose gradients are asked for."""
        return [name for name in self.present(SOURCES) if name != "mask" or self.need_mask_grad]

    def unasked(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the gradients of SOURCES that are not asked for, which are empty tensors."""
        wanted = self.wanted()
        return [gradient for name, gradient in zip(SOURCES, gradients, strict=False) if name not in wanted]

    def tangents(self) -> Keywords:
        """Returns the tangents that are not None as the operators' keyword arguments.

        The operators make those of four dimensions dense themselves.
        """
        found = ((name, getattr(self, name)) for name in self.present(TANGENTS))
        return {name: tensor if tensor.dim() == 4 else tensor.contiguous() for name, tensor in found}

    def tensors(self) -> Tensors:
        return Tensors(*self.all_of(Tensors._fields))

    def has_formula_alone(self) -> bool:
        """Tells whether derivatives of gradients are computed by the formula, as no operator has them."""
        return self.grad_weights is not None or "selection" in self.keywords

    def has_one_batch(self) -> bool:
        """Tells whether slices of vmap must be computed one by one.

        The dropout pattern counts the batch of one slice, which folding would change; packed sequences have
        no batch to fold into.
        """
        return self.seed is not None or is_packed(self.keywords)


#: The index of the first input that is not a tensor.
_CALL = Inputs._fields.index("scale")

COTANGENTS = ("grad_out", "grad_weights", "grad_lse")
#: The inputs that get a gradient.
SOURCES = ("query", "key", "value", "mask", "slopes", "sinks")
SAVED = ("out", "row_max", "row_sum", "out_residual", "weights")
#: A direction: one tangent for each of SOURCES. A missing one is 0.
TANGENTS = tuple(f"tangent_{name}" for name in SOURCES)

_DENSE = (*COTANGENTS, "query", "key", "value", *SAVED, "tangent_query", "tangent_key", "tangent_value")
_BROADCAST = ("mask", "slopes", "sinks")


def _has_own_gradient(given: Inputs, name: str) -> bool:
    """Tells whether an input that may be broadcast over the batch has a gradient or a tangent per slice."""
    return name != "mask" or given.need_mask_grad or given.tangent_mask is not None


def fold_inputs(given: Inputs, dims: Inputs, size: int) -> Inputs:
    """Folds the inputs of all slices to those of one call, whose batch is V * B."""
    batch = slice_batch(given.query, dims.query)
    folded: dict[str, OptionalTensor] = {
        name: fold(getattr(given, name), getattr(dims, name), size) for name in given.present(_DENSE)
    }
    for name in _BROADCAST:
        # A gradient per slice needs an input per slice, and a tangent has its input's shape.
        expand = _has_own_gradient(given, name)
        for part in (name, f"tangent_{name}"):
            folded[part] = fold_optional(
                getattr(given, part), getattr(dims, part), size, batch, expand=expand
            )
    return given._replace(**folded)


def unfold_gradients(
    given: Inputs, dims: Inputs, size: int, results: Sequence[Tensor]
) -> tuple[list[Tensor], list[int | None]]:
    """Unfolds one call's gradients of SOURCES to those of every slice, and gives their mapped dimensions."""
    batch = slice_batch(given.query, dims.query)
    unfolded: list[Tensor] = []
    out_dims: list[int | None] = []
    for name, result in zip(SOURCES, results, strict=True):
        if name not in given.wanted():
            unfolded.append(result)
            out_dims.append(None)
        else:
            original = slice_batch(getattr(given, name), getattr(dims, name))
            unfolded.append(unfold_gradient(result, size, batch, original))
            out_dims.append(0)
    return unfolded, out_dims
