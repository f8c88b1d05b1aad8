"""Contenders to time: each turns a case and its tensors into a call without arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.functional import scaled_dot_product_attention

Call = Callable[[], Tensor]


def _as_they_are(case: Case, tensors: Inputs) -> Inputs:
    return tensors


def _as_it_is(case: Case, result: Tensor) -> Tensor:
    return result


@dataclass(frozen=True)
class Contender:
    """A way to compute attention.

    ``prepare`` does what a user would do once and not at every step (build a mask, compile); the call that it
    returns is timed. It raises NotImplementedError, saying why, if the contender cannot compute a case.
    ``form`` turns the tensors of inputs() into those that the contender computes with and differentiates, and
    ``padded`` turns its output and its gradients back into tensors (B, H, L, E).
    """

    name: str
    prepare: Callable[[Case, Inputs], Call]
    form: Callable[[Case, Inputs], Inputs] = _as_they_are
    padded: Callable[[Case, Tensor], Tensor] = _as_it_is


def _prepare_ours(case: Case, tensors: Inputs) -> Call:
    options: dict[str, Any] = {}
    if case.causal:
        options["is_causal"] = True
    if case.query_offset and (case.causal or case.window is not None):
        options["query_offset"] = case.query_offset
    if case.window is not None:
        options["window_size"] = (case.window, -1)
    if case.kv_head_count != case.heads:
        options["enable_gqa"] = True
    if case.dropout:
        options["dropout_p"] = case.dropout
    if tensors.mask is not None:
        options["attn_mask"] = tensors.mask

    def call() -> Tensor:
        return scaled_dot_product_attention(tensors.query, tensors.key, tensors.value, **options)

    return call


def rules(case: Case, tensors: Inputs) -> tuple[bool, Tensor | None]:
    """Returns a case as is_causal and one mask (L, S), for contenders that have no other options."""
    if case.causal and case.query_offset == 0 and case.window is None and tensors.mask is None:
        return True, None
    seen = _visible(case, tensors)
    if seen is None or tensors.mask is None:
        return False, tensors.mask if seen is None else seen
    return False, _both(tensors.mask, seen)


def _prepare_torch(case: Case, tensors: Inputs) -> Call:
    options: dict[str, Any] = {"enable_gqa": case.kv_head_count != case.heads, "dropout_p": case.dropout}
    is_causal, mask = rules(case, tensors)
    # A mask that is being trained has to be combined with the other rules at every step.
    seen = _visible(case, tensors) if case.backward and case.mask == "gradient" else None

    def call() -> Tensor:
        current = mask if seen is None or tensors.mask is None else _both(tensors.mask, seen)
        return F.scaled_dot_product_attention(
            tensors.query, tensors.key, tensors.value, attn_mask=current, is_causal=is_causal, **options
        )

    return call


def _visible(case: Case, tensors: Inputs) -> Tensor | None:
    seen = case.visible()
    return None if seen is None else seen.to(tensors.query.device)


def _both(mask: Tensor, seen: Tensor) -> Tensor:
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


OURS = Contender("selfattn_ext", _prepare_ours)
TORCH = Contender("torch", _prepare_torch)


def runner(call: Call, case: Case, tensors: Inputs) -> Callable[[], object]:
    """Returns what the timer calls, given what a contender has prepared.

    That is the forward pass of inputs that need no gradient, forward and backward pass of all gradients, or
    the backward pass alone.
    """
    if not case.backward:
        return call
    leaves = tensors.leaves()
    if case.graph_kept:
        out = call()

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, tensors.grad_out, retain_graph=True)

        return backward

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(), leaves, tensors.grad_out)

    return forward_and_backward


def results(call: Call, case: Case, tensors: Inputs) -> list[Tensor]:
    """Computes the output, and with a backward pass the gradients of query, key, value (and mask)."""
    out = call()
    if not case.backward:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, tensors.leaves(), tensors.grad_out)]
