"""Attention whose keys and values go around a ring of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import ops
from ..arguments import Keywords, OptionalTensor
from ..autograd import statistics
from ..reference_statistics import AuxOutput
from .exchange import gather_gradients, pass_around
from .gradients import OwnGradients, Rows, zeros
from .merge import RowResults
from .plan import Meeting, Plan, part_of_mask, part_of_slopes

__all__ = ["RingAttention"]

_MASK = 3


class RingAttention(Function):
    """Takes query, key, value (B, H, L, E), a mask, slopes, sinks, a plan and what is wanted beside out.

    Returns out, and what is wanted in its order; key_weights are those of this rank's keys, (B, H, S).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        query, key, value, mask, slopes, sinks, plan, wanted = inputs
        results = RowResults(query, value.size(3))
        for source, (keys, values) in pass_around(plan, [key, value]):
            for meeting in plan.meetings(source):
                rows, columns = meeting.query.rows, meeting.key.rows
                options = _options(plan, meeting, mask, slopes)
                operands = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
                results.add(rows, *statistics.forward(*operands, plan.scale, options, wanted))
        if sinks is not None:
            results.add_sinks(sinks)
        out, residual = results.rounded(query.dtype)
        rows_of_all = statistics.Rows(
            out, results.row_max, results.row_sum, residual, results.row_top, results.row_mean
        )
        own = {} if sinks is None else {"sinks": sinks}
        found = statistics.of_rows(
            rows_of_all, query, key, plan.scale, own, wanted._replace(key_weights=False)
        )
        if wanted.key_weights:
            found = found._replace(key_weights=_key_weights(query, key, mask, slopes, plan, rows_of_all))
        ctx.save_for_backward(query, key, value, mask, slopes, sinks, *rows_of_all)
        ctx.plan, ctx.wanted = plan, wanted
        ctx.set_materialize_grads(False)
        if found.max_scores is not None:
            ctx.mark_non_differentiable(found.max_scores)
        return out, *(getattr(found, name) for name in wanted.names())

    @staticmethod
    def backward(ctx: Any, grad_out: OptionalTensor, *grads: OptionalTensor) -> Any:  # type: ignore[override]
        query, key, value, mask, slopes, sinks, *saved = ctx.saved_tensors
        plan, of_mask = ctx.plan, bool(ctx.needs_input_grad[_MASK])
        rows_of_all = statistics.Rows(*saved)
        named = dict(zip(ctx.wanted.names(), grads, strict=True)) | {"max_scores": None}
        own_sinks = {} if sinks is None else {"sinks": sinks}
        of_rows = statistics.row_gradients(AuxOutput(**named), rows_of_all, own_sinks)
        block_of_rank = [key, value]
        if ctx.wanted.key_weights:
            # Every rank sends its part, as no rank knows whether the losses of others depend on theirs.
            of_keys = named["key_weights"]
            if of_keys is None:
                of_keys = rows_of_all.row_max.new_zeros(*query.shape[:2], key.size(2))
            block_of_rank.append(of_keys.unsqueeze(-1))
            of_rows["grad_row"] = of_rows.get("grad_row", 0.0) + _weighted_sums(
                query, key, block_of_rank[2], mask, slopes, plan, rows_of_all
            )
        rows = Rows(torch.zeros_like(saved[0]) if grad_out is None else grad_out, rows_of_all, of_rows)
        own = OwnGradients(query, mask if of_mask else None, slopes)

        def of_block(source: int, block: Sequence[Tensor]) -> list[Tensor]:
            """The gradients that this rank's queries give a rank's keys and values."""
            found = [zeros(tensor) for tensor in block[:2]]
            for meeting in plan.meetings(source):
                columns = meeting.key.rows
                options = {**_options(plan, meeting, mask, slopes), "need_mask_grad": of_mask}
                keys, values, *of_weights = (tensor[:, :, columns] for tensor in block)
                if of_weights:
                    options["grad_keys"] = of_weights[0].squeeze(-1)
                of_query, of_key, of_value, *others = rows.pull(
                    query, keys, values, meeting, plan.scale, options
                )
                found[0][:, :, columns] += of_key
                found[1][:, :, columns] += of_value
                own.add(meeting, of_query, *others)
            return found

        of_key, of_value = gather_gradients(plan, block_of_rank, of_block)
        gradients = (own.query, of_key, of_value, own.mask, own.slopes, rows.of_sinks(sinks))
        given = (query, key, value, mask, slopes, sinks)
        return (
            *(
                None if gradient is None else _Last.apply(gradient.to(source.dtype), source, grad_out, *grads)
                for gradient, source in zip(gradients, given, strict=True)
            ),
            None,
            None,
        )


def _key_weights(
    query: Tensor,
    key: Tensor,
    mask: OptionalTensor,
    slopes: OptionalTensor,
    plan: Plan,
    rows_of_all: statistics.Rows,
) -> Tensor:
    """The weights (B, H, S) that this rank's keys receive from the queries of all ranks."""

    def of_block(source: int, block: Sequence[Tensor]) -> list[Tensor]:
        (keys,) = block
        sums = rows_of_all.row_max.new_zeros(*query.shape[:2], keys.size(2))
        for meeting in plan.meetings(source):
            columns = meeting.key.rows
            sums[:, :, columns] += _sums_of_weights(query, keys, mask, slopes, plan, rows_of_all, meeting)
        return [sums.unsqueeze(-1)]

    return gather_gradients(plan, [key], of_block)[0].squeeze(-1)


def _weighted_sums(
    query: Tensor,
    key: Tensor,
    numbers: Tensor,
    mask: OptionalTensor,
    slopes: OptionalTensor,
    plan: Plan,
    rows_of_all: statistics.Rows,
) -> Tensor:
    """Each query's weights times the numbers (B, H, S, 1) of the keys of all ranks, added up: (B, H, L)."""
    sums = torch.zeros_like(rows_of_all.row_max)
    for source, (keys, of_keys) in pass_around(plan, [key, numbers]):
        for meeting in plan.meetings(source):
            per_key = of_keys[:, :, meeting.key.rows, 0].contiguous()
            sums[:, :, meeting.query.rows] += _sums_of_weights(
                query, keys, mask, slopes, plan, rows_of_all, meeting, per_key
            )
    return sums


def _sums_of_weights(
    query: Tensor,
    keys: Tensor,
    mask: OptionalTensor,
    slopes: OptionalTensor,
    plan: Plan,
    rows_of_all: statistics.Rows,
    meeting: Meeting,
    per_key: OptionalTensor = None,
) -> Tensor:
    """The operator attention_weight_sums for the queries and keys of a meeting."""
    rows, options = meeting.query.rows, _options(plan, meeting, mask, slopes)
    row_max, row_sum = (each[:, :, rows].contiguous() for each in rows_of_all[1:3])
    operands = query[:, :, rows], keys[:, :, meeting.key.rows], row_max, row_sum, plan.scale
    return ops.attention_weight_sums(*operands, per_key=per_key, **options)


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
