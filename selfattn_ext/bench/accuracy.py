"""Errors against the formula in float64, which the table shows beside each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfattn_ext import reference
from selfattn_ext.bench.cases import Case, Inputs

# Queries are taken in chunks, so that float64 scores of long sequences need no gigabytes.
_CHUNK = 512


@dataclass(frozen=True)
class Truth:
    """Exact output and gradients of the first and the last kv head (of the first and the last batch element).

    Two heads suffice to show rounding errors, which are alike in all heads, and computing them in float64
    takes less time than the measurement.
    """

    places: tuple[tuple[int, int], ...]  # (batch, kv head)
    results: tuple[tuple[Tensor, ...], ...]  # for each place: out (G, L, Ev), then grad query, key and value

    def error(self, case: Case, found: Sequence[Tensor]) -> float:
        """Returns the largest difference, relative to the largest value of its tensor, of all results."""
        worst = 0.0
        for (batch, kv_head), truths in zip(self.places, self.results, strict=True):
            for index, truth in enumerate(truths[: len(found)]):
                group = case.heads // case.kv_head_count if index < 2 else 1
                heads = slice(kv_head * group, (kv_head + 1) * group)
                result = found[index][batch, heads, : truth.shape[-2]]
                difference = (result.double() - truth).abs().max().item()
                worst = max(worst, difference / max(truth.abs().max().item(), 1e-300))
        return worst


def truth(case: Case, tensors: Inputs) -> Truth | None:
    """Computes the exact results.

    Returns None for dropout, whose pattern every implementation draws differently, and for cases that the
    formula lacks.
    """
    if case.dropout or not case.has_formula:
        return None
    places = tuple(dict.fromkeys([(0, 0), (case.batch - 1, case.kv_head_count - 1)]))
    return Truth(places, tuple(_exact(case, tensors, *place) for place in places))


def _exact(case: Case, tensors: Inputs, batch: int, kv_head: int) -> tuple[Tensor, ...]:
    group = case.heads // case.kv_head_count
    heads, kv_heads = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    case = case.element(batch)

    def taken(tensor: Tensor, heads: slice, rows: int) -> Tensor:
        return tensor[batch, heads, :rows].detach().double()

    query, grad_out = (taken(tensor, heads, case.length) for tensor in (tensors.query, tensors.grad_out))
    key, value = (taken(tensor, kv_heads, case.key_count) for tensor in (tensors.key, tensors.value))
    mask = (
        tensors.mask
        if tensors.mask is None or tensors.mask.dtype == torch.bool
        else tensors.mask.detach().double()
    )
    outs, grad_queries = [], []
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, case.length, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part, k, v = (t.detach().requires_grad_(case.backward) for t in (query[:, rows], key, value))
        out = reference.attention(
            part,
            k,
            v,
            None if mask is None else mask[rows],
            is_causal=case.causal,
            window_size=(-1 if case.window is None else case.window, -1),
            query_offset=case.query_offset + start,
        ).out
        outs.append(out.detach())
        if case.backward:
            grads = torch.autograd.grad(out, (part, k, v), grad_out[:, rows])
            grad_queries.append(grads[0])
            grad_key += grads[1]
            grad_value += grads[2]
    out = torch.cat(outs, dim=1)
    return (out, torch.cat(grad_queries, dim=1), grad_key, grad_value) if case.backward else (out,)
