"""Forward mode: attention together with the tangents of out and of the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import Function

from ..arguments import Keywords, OptionalTensor, Tensors
from . import by_formula, operator_calls
from .differentiated import SAVED, SOURCES, TANGENTS, Inputs, fold_inputs
from .first_order import AttentionBackward
from .forward_levels import make_dual, nestable, unpack_dual
from .second_order import AttentionBackwardBackward
from .vmap import each_slice, slice_batch, unfold

__all__ = ["AttentionTangents", "attention_of_duals"]


def attention_of_duals(
    tensors: Tensors, scale: float, keywords: Keywords, want_weights: bool
) -> tuple[Tensor, OptionalTensor, Tensor] | None:
    """Computes (out, weights if wanted, lse) with tangents by one operator; None if no input has a tangent.

    It returns None, too, if the functions' ``jvp`` has to compute them. That is so if another transform lies
    on top of forward mode; if this level records gradients, which have tangents themselves and so need the
    inputs with theirs; or if tangents are batched as in torch.autograd.gradcheck, for which there are no
    duals.
    """
    if torch._C._are_functorch_transforms_active() and peek_interpreter_stack().key() != TransformType.Jvp:
        return None
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return None
    pairs = [(None, None) if tensor is None else unpack_dual(tensor) for tensor in tensors]
    tangents = dict(zip(TANGENTS, [tangent for _, tangent in pairs], strict=False))
    given = [tangent for tangent in tangents.values() if tangent is not None]
    if not given or any(map(is_legacy_batchedtensor, given)):
        return None
    if want_weights:
        # The formula's (L, S) matrices do no harm, as the weights are such a matrix themselves.
        out, weights, lse = by_formula.attention(Inputs(**tensors._asdict(), scale=scale, keywords=keywords))
        return out, weights, lse
    of_call: Any = [primal for primal, _ in pairs]
    primals = Tensors(*of_call)
    out, lse, tangent_out, tangent_lse, *_ = AttentionTangents.apply(
        *Inputs(**primals._asdict(), **tangents, scale=scale, keywords=keywords)
    )
    return make_dual(out, tangent_out), None, make_dual(lse, tangent_lse)


class AttentionTangents(Function):
    """:class:`Inputs` with a direction → out, lse, their tangents, row_max, row_sum, [out_residual]."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        given = Inputs(*inputs)
        out, row_max, row_sum, residual, tangent_out, tangent_lse = operator_calls.jvp(
            operator_calls.dense(given.tensors()), given.tangents(), given.scale, given.keywords
        )
        lse = row_max + torch.log(row_sum)
        results = (out, lse, tangent_out, tangent_lse, row_max, row_sum)
        return results if residual is None else (*results, residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        out, _, _, _, *statistics = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*statistics)
        Inputs(*inputs)._replace(**dict(zip(SAVED, (out, *statistics), strict=False))).save(ctx)
        ctx.results = len(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Uses that tangents are linear in the direction: csrc/core/tangents.h, Note [Second derivatives]."""
        given, needs = Inputs.saved(ctx), Inputs(*ctx.needs_input_grad)
        grad_out, grad_lse, grad_tangent_out, grad_tangent_lse = cotangents[:4]
        of_mask, of_direction = needs.mask, needs.all_of(TANGENTS)
        of_sources: list[tuple[Tensor, ...]] = []
        found: dict[str, OptionalTensor] = {}
        if grad_out is not None or grad_lse is not None:
            first = given.along((None,) * len(TANGENTS)).with_cotangents(grad_out, grad_lse)
            of_sources.append(AttentionBackward.apply(*first._replace(need_mask_grad=of_mask)))
        if grad_tangent_out is not None or grad_tangent_lse is not None:
            second = given.with_cotangents(grad_tangent_out, grad_tangent_lse)
            if any(needs.all_of(SOURCES)):
                results = AttentionBackwardBackward.apply(*second._replace(need_mask_grad=of_mask))
                of_sources.append(results[: len(SOURCES)])
            if any(of_direction):
                linear = second.along((None,) * len(TANGENTS))
                results = AttentionBackward.apply(*linear._replace(need_mask_grad=needs.tangent_mask))
                found |= zip(TANGENTS, results, strict=True)
        for name, terms in zip(SOURCES, zip(*of_sources, strict=True), strict=False):
            found[name] = sum(terms[1:], terms[0])
        needed = {name: gradient for name, gradient in found.items() if getattr(needs, name)}
        return tuple(Inputs(**needed))

    @staticmethod
    @nestable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        pushed = by_formula.push(by_formula.tangents, Inputs.saved_primals(ctx), Inputs(*tangents).moving())
        return (*pushed, *(None,) * (ctx.results - len(pushed)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        given, dims, size = Inputs(*inputs), Inputs(*in_dims), info.batch_size
        if given.has_one_batch():
            return each_slice(AttentionTangents.apply, size, in_dims, inputs)
        results = AttentionTangents.apply(*fold_inputs(given, dims, size))
        batch = slice_batch(given.query, dims.query)
        return tuple(unfold(result, size, batch) for result in results), (0,) * len(results)
