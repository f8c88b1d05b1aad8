"""Attention with statistics of its softmax, which are differentiable.

Note [Gradients of statistics]
    A forward gives four numbers of each row: row_max m and row_sum z, the largest score row_top, and row_mean
    R, the sum of p (s - m) over keys and sink. With P the weight of the sink t, and 0 where there is none::

        lse = m + log z      entropy = log z - R      mean_score = m + R - P t

    A gradient of these goes to the scores as ``dS_j = p_j (a + b (s_j - m))`` with ``b = g_mean - g_entropy``
    and ``a = g_lse + g_mean (1 + m - mean_score) + g_entropy R``, and to the sink as ``P (a + c)`` with
    ``c = -g_mean (1 + m) - g_entropy (t - m)``. A gradient g_j of key_weights adds ``p_j (g_j - sum_k p_k
    g_k)``. So the backward gets -a and that sum in grad_row, b as grad_mean, c as grad_sink and g as
    grad_keys: Note [Statistics of scores] in csrc/core/attention_params.h. No cancellation takes place in
    them, as m is the maximum and not some other number.

Forward mode, torch.func and derivatives of higher order go through the formula with its (L, S) matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import ops
from ..arguments import (
    Keywords,
    OptionalTensor,
    Tensors,
    formula,
    keywords_of,
    refusals,
    statistics_formula,
)
from ..aux_request import Wanted
from ..reference_statistics import AuxOutput
from . import by_formula, operator_calls
from .differentiated import SOURCES, Inputs

__all__ = [
    "Rows",
    "attention_and_statistics",
    "forward",
    "gradient_keywords",
    "of_rows",
    "results_by_formula",
]

_TENSORS = len(Tensors._fields)
_MASK = Tensors._fields.index("mask")

#: out, weights if they are wanted, and the statistics that are wanted.
Results = tuple[Tensor, OptionalTensor, AuxOutput]


class Rows(NamedTuple):
    """The results of a forward: out, and numbers of each row (B, H, L); the last two if they are wanted."""

    out: Tensor
    row_max: Tensor
    row_sum: Tensor
    residual: OptionalTensor = None
    row_top: OptionalTensor = None
    row_mean: OptionalTensor = None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    merged: Keywords,
    wanted: Wanted,
    need_residual: bool = True,
) -> Rows:
    """Runs the operator that gives what is wanted; ``merged`` are its keyword arguments."""
    if wanted.weights:
        merged = {**merged, "need_weights": True}
    rounds = need_residual and query.dtype in ops.SIXTEEN_BITS
    if rounds:
        merged = {**merged, "need_residual": True}
    operator = ops.attention_statistics if wanted.of_rows() else ops.attention_forward
    out, row_max, row_sum, residual, *more = operator(query, key, value, scale, **merged)
    return Rows(out, row_max, row_sum, residual if rounds else None, *more)


def of_rows(
    rows: Rows, query: Tensor, key: Tensor, scale: float, merged: Keywords, wanted: Wanted
) -> AuxOutput:
    """Returns the statistics that are wanted; ``merged`` are the keyword arguments of the forward."""
    lse = max_scores = entropy = mean_score = key_weights = None
    if wanted.lse:
        lse = rows.row_max + torch.log(rows.row_sum)
    if wanted.max_scores:
        assert rows.row_top is not None
        # Rows of no sequence have a sum of 0, too.
        max_scores = torch.where(rows.row_sum == 0, -torch.inf, rows.row_top)
    if wanted.entropy:
        assert rows.row_mean is not None
        entropy = torch.where(rows.row_sum == 0, 0.0, torch.log(rows.row_sum) - rows.row_mean)
    if wanted.mean_score:
        mean_score = _mean_score(rows, merged)
    if wanted.key_weights:
        key_weights = ops.attention_weight_sums(query, key, rows.row_max, rows.row_sum, scale, **merged)
    return AuxOutput(lse, max_scores, entropy, mean_score, key_weights)


def _shift(row_max: Tensor) -> Tensor:
    """The number that scores are counted from: the maximum, 0 in a row without scores."""
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def _mean_score(rows: Rows, merged: Keywords) -> Tensor:
    assert rows.row_mean is not None
    shift = _shift(rows.row_max)
    mean = torch.where(rows.row_sum == 0, 0.0, shift + rows.row_mean)
    sink = _sink(rows, shift, merged)
    return mean if sink is None else mean - sink.weight * sink.score


class _Sink(NamedTuple):
    """Each row's sink: its weight, its score, and that less the maximum. All are 0 for a sink of -inf."""

    weight: Tensor
    score: Tensor
    below: Tensor


def _sink(rows: Rows, shift: Tensor, merged: Keywords) -> _Sink | None:
    sinks = merged.get("sinks")
    if sinks is None:
        return None
    sink = _sinks_of_rows(sinks, merged, rows.row_max)
    exists = sink != -torch.inf
    sink = torch.where(exists, sink, 0.0)
    below = torch.where(exists, sink - shift, 0.0)
    return _Sink(torch.where(exists & (rows.row_sum != 0), torch.exp(below) / rows.row_sum, 0.0), sink, below)


def _sinks_of_rows(sinks: Tensor, merged: Keywords, row_max: Tensor) -> Tensor:
    """The sinks (B | 1, H) as numbers that broadcast to row statistics (B, H, L) or (1, H, rows)."""
    starts = merged.get("cu_seqlens_q")
    if starts is None or sinks.size(0) == 1:
        return sinks.unsqueeze(-1)
    row = torch.arange(row_max.size(-1), device=starts.device)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, sinks.size(0) - 1)
    return sinks[sequence].T.unsqueeze(0)


def row_gradients(grads: AuxOutput, rows: Rows, keywords: Keywords) -> Keywords:
    """Returns grad_row, grad_mean and grad_sink of Note [Gradients of statistics], without what key_weights
    add to grad_row. ``keywords`` are those of the forward.
    """
    found: Keywords = {}
    g_mean, g_entropy = grads.mean_score, grads.entropy
    if grads.lse is not None:
        found["grad_row"] = -grads.lse
    if g_mean is None and g_entropy is None:
        return found
    assert rows.row_mean is not None
    shift = _shift(rows.row_max)
    sink = _sink(rows, shift, keywords)
    slope = own = of_rows = torch.zeros_like(shift)
    if g_mean is not None:
        of_rows = of_rows - g_mean * (1.0 + shift - _mean_score(rows, keywords))
        slope, own = slope + g_mean, own - g_mean * (1.0 + shift)
    if g_entropy is not None:
        of_rows = of_rows - g_entropy * rows.row_mean
        slope = slope - g_entropy
        if sink is not None:
            own = own - g_entropy * sink.below
    found["grad_row"] = of_rows + found["grad_row"] if "grad_row" in found else of_rows
    found["grad_mean"] = slope
    if sink is not None:
        found["grad_sink"] = own
    return found


def gradient_keywords(
    grads: AuxOutput, tensors: Tensors, rows: Rows, scale: float, keywords: Keywords, merged: Keywords
) -> Keywords:
    """Returns the keyword arguments of a backward by Note [Gradients of statistics].

    ``keywords`` are those of the forward, and ``merged`` those that the backward has already.
    """
    found = row_gradients(grads, rows, keywords)
    terms = [more["grad_row"] for more in (merged, found) if "grad_row" in more]
    if grads.key_weights is not None:
        found["grad_keys"] = grads.key_weights
        statistics = (*tensors[:2], rows.row_max, rows.row_sum, scale)
        terms.append(ops.attention_weight_sums(*statistics, per_key=grads.key_weights, **keywords))
    if terms:
        found["grad_row"] = functools.reduce(torch.add, terms)
    return found


def attention_and_statistics(tensors: Tensors, scale: float, keywords: Keywords, wanted: Wanted) -> Results:
    """Computes differentiable attention of four-dimensional tensors, and the statistics that are wanted.

    ``keywords`` are further keyword arguments of the operators; those at their default are left out.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        given = Inputs(**tensors._asdict(), scale=scale, keywords=keywords)
        return _arranged(results_by_formula(given, wanted), wanted)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _arranged(_AttentionAndStatistics.apply(*tensors, scale, keywords, wanted), wanted)
    query, key, value = tensors[:3]
    merged = keywords_of(tensors, keywords)
    rows = forward(query, key, value, scale, merged, wanted, need_residual=False)
    weights = None
    if wanted.weights:
        weights = ops.attention_weights(query, key, rows.row_max, rows.row_sum, scale, **merged)
    return rows.out, weights, of_rows(rows, query, key, scale, merged, wanted)


def _arranged(results: Sequence[Tensor], wanted: Wanted) -> Results:
    """Gives names to results: out, and what is wanted in the order of :class:`Wanted`."""
    named = dict(zip(wanted.names(), results[1:], strict=True))
    return results[0], named.pop("weights", None), AuxOutput(**named)


def results_by_formula(given: Inputs, wanted: Wanted) -> tuple[Tensor, ...]:
    """Returns out, and what is wanted in the order of :class:`Wanted`, by the formula."""
    out, weights, _ = formula(given.tensors(), given.scale, given.keywords)
    found = statistics_formula(given.tensors(), given.scale, given.keywords)._asdict()
    named = {"weights": weights, **found}
    return out, *(named[name] for name in wanted.names())


class _AttentionAndStatistics(Function):
    """Takes the tensors of a call, scale, keywords and Wanted; returns out, and what is wanted."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *given, scale, keywords, wanted = inputs
        tensors = Tensors(*given)
        query, key, value = given[:3]
        merged = keywords_of(tensors, keywords)
        rows = forward(query, key, value, scale, merged, wanted)
        found = of_rows(rows, query, key, scale, merged, wanted)
        named = found._asdict()
        if wanted.weights:
            named["weights"] = ops.attention_weights(query, key, rows.row_max, rows.row_sum, scale, **merged)
        # Note [Rounded outputs] in attention_function.py says why 16-bit weights do not help the backward.
        kept = None if query.dtype in ops.SIXTEEN_BITS else named.get("weights")
        ctx.save_for_backward(*tensors, *rows, kept)
        ctx.call = (scale, keywords, wanted)
        ctx.set_materialize_grads(False)
        if found.max_scores is not None:
            ctx.mark_non_differentiable(found.max_scores)
        return rows.out, *(named[name] for name in wanted.names())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *given, weights = operator_calls.saved_tensors(ctx)
        tensors, rows = Tensors(*given[:_TENSORS]), Rows(*given[_TENSORS:])
        scale, keywords, wanted = ctx.call
        need_mask_grad = ctx.needs_input_grad[_MASK]
        named = dict(zip(wanted.names(), grads[1:], strict=True))
        if operator_calls.is_differentiated():
            inputs = Inputs(
                **tensors._asdict(), scale=scale, keywords=keywords, need_mask_grad=need_mask_grad
            )
            gradients: Sequence[Any] = _differentiable_gradients(inputs, wanted, grads)
        else:
            named.pop("max_scores", None)
            gradients = _gradients(named, grads[0], tensors, rows, weights, scale, keywords, need_mask_grad)
        needed = [
            gradient if need else None
            for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False)
        ]
        return (*needed, *(None,) * (len(ctx.needs_input_grad) - len(needed)))


def _gradients(
    named: dict[str, OptionalTensor],
    grad_out: OptionalTensor,
    tensors: Tensors,
    rows: Rows,
    weights: OptionalTensor,
    scale: float,
    keywords: Keywords,
    need_mask_grad: bool,
) -> tuple[Tensor, ...]:
    """The six gradients of the operator."""
    query, key, value = tensors[:3]
    grad_out = torch.zeros_like(rows.out) if grad_out is None else grad_out
    cotangents = (grad_out, named.pop("weights", None), None)
    saved = (rows.out, rows.row_max, rows.row_sum, rows.residual, weights)
    try:
        merged = operator_calls.backward_keywords(cotangents, tensors, saved, scale, keywords)
        of_forward = keywords_of(tensors, keywords)
        merged = merged | gradient_keywords(AuxOutput(**named), tensors, rows, scale, of_forward, merged)
        if need_mask_grad:
            merged["need_mask_grad"] = True
        return ops.attention_backward(
            grad_out, query, key, value, rows.out, rows.row_max, rows.row_sum, scale, **merged
        )
    except MemoryError as error:
        raise refusals.out_of_memory(error, query) from None


def _differentiable_gradients(given: Inputs, wanted: Wanted, grads: Sequence[OptionalTensor]) -> list[Any]:
    """The gradients of SOURCES by the formula, with derivatives of their own; None for those not wanted."""
    places = [place for place, grad in enumerate(grads) if grad is not None]

    def results(inputs: Inputs) -> tuple[Tensor, ...]:
        found = results_by_formula(inputs, wanted)
        return tuple(found[place] for place in places)

    cotangents: Any = [grads[place] for place in places]
    found = dict(
        zip(given.wanted(), by_formula.pulled(results, given, given.wanted(), cotangents), strict=True)
    )
    return [found.get(name) for name in SOURCES]
