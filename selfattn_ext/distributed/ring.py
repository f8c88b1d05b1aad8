"""Attention whose keys and values go around a ring of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import ops
from ..arguments import Keywords, OptionalTensor
from .exchange import gather_gradients, pass_around
from .gradients import OwnGradients, Rows, zeros
from .merge import RowResults
from .plan import Meeting, Plan, part_of_mask, part_of_slopes

__all__ = ["RingAttention"]

_MASK = 3


class RingAttention(Function):
    """Takes query, key, value (B, H, L, E), a mask, slopes, sinks and a plan; returns out and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        query, key, value, mask, slopes, sinks, plan = inputs
        rounds = query.dtype in ops.SIXTEEN_BITS
        results = RowResults(query, value.size(3))
        for source, (keys, values) in pass_around(plan, [key, value]):
            for meeting in plan.meetings(source):
                rows, columns = meeting.query.rows, meeting.key.rows
                results.add(
                    rows,
                    *ops.attention_forward(
                        query[:, :, rows], keys[:, :, columns], values[:, :, columns], plan.scale,
                        need_residual=rounds, **_options(plan, meeting, mask, slopes),
                    ),
                )  # fmt: skip
        if sinks is not None:
            results.add_sinks(sinks)
        out, residual = results.rounded(query.dtype)
        row_max, row_sum = results.row_max, results.row_sum
        ctx.save_for_backward(query, key, value, mask, slopes, sinks, out, row_max, row_sum, residual)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, results.lse()

    @staticmethod
    def backward(ctx: Any, grad_out: OptionalTensor, grad_lse: OptionalTensor) -> Any:  # type: ignore[override]
        query, key, value, mask, slopes, sinks, *saved = ctx.saved_tensors
        plan, of_mask = ctx.plan, bool(ctx.needs_input_grad[_MASK])
        rows = Rows(torch.zeros_like(saved[0]) if grad_out is None else grad_out, grad_lse, *saved)
        own = OwnGradients(query, mask if of_mask else None, slopes)

        def of_block(source: int, block: Sequence[Tensor]) -> list[Tensor]:
            """The gradients that this rank's queries give a rank's keys and values."""
            found = [zeros(tensor) for tensor in block]
            for meeting in plan.meetings(source):
                columns = meeting.key.rows
                options = {**_options(plan, meeting, mask, slopes), "need_mask_grad": of_mask}
                keys, values = (tensor[:, :, columns] for tensor in block)
                of_query, of_key, of_value, *others = rows.pull(
                    query, keys, values, meeting, plan.scale, options
                )
                found[0][:, :, columns] += of_key
                found[1][:, :, columns] += of_value
                own.add(meeting, of_query, *others)
            return found

        of_key, of_value = gather_gradients(plan, [key, value], of_block)
        gradients = (own.query, of_key, of_value, own.mask, own.slopes, rows.of_sinks(sinks))
        given = (query, key, value, mask, slopes, sinks)
        return *(
            None if gradient is None else _Last.apply(gradient.to(source.dtype), source, grad_out)
            for gradient, source in zip(gradients, given, strict=True)
        ), None


class _Last(Function):
    """A gradient that depends on others, and cannot be differentiated itself: torch's once_differentiable
    would take it for a constant where the gradient of out is one.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: OptionalTensor) -> Tensor:  # type: ignore[override]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("ring_attention has first derivatives only; ulysses_attention has more")


def _options(plan: Plan, meeting: Meeting, mask: OptionalTensor, slopes: OptionalTensor) -> Keywords:
    """The keyword arguments of the operators for a meeting."""
    options = plan.options(meeting)
    if mask is not None:
        options["attn_mask"] = part_of_mask(mask, meeting)
    if slopes is not None:
        options["alibi_slopes"] = part_of_slopes(slopes, meeting)
    return options
