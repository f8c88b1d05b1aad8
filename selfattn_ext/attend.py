"""The steps of every attention function: compute, explain a refusal, return what was asked for.

:func:`with_gradients` computes dense, packed and nested calls; :mod:`selfattn_ext.kv_cache.step` computes
calls on a cache, which have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .arguments import (
    REFUSALS,
    AttentionCall,
    AttentionOptions,
    KVCacheCall,
    OptionalTensor,
    PackedCall,
    Prepared,
    SparseCall,
    call_checks,
    explained,
    shapes,
)
from .autograd import attention_with_gradient, statistics_with_gradient
from .aux_request import returned, wanted
from .reference_statistics import AuxOutput

__all__ = ["attend", "aux_output", "dropout_seed", "results", "with_gradients"]

Call = TypeVar("Call", AttentionCall, PackedCall, SparseCall, KVCacheCall)


def attend(call: Call, compute: Callable[[Call], Any], check: Callable[[Call], None]) -> Any:
    """Returns what a public function returns for a call: out, or a tuple of out and what else was asked for.

    ``compute`` returns (out, weights if wanted, lse if wanted) in the user's form, and what return_aux asks
    for if that is given. If it refuses, ``check`` looks for the reason.
    """
    _, _, is_causal, _, enable_gqa, *_, want_weights, want_lse, _ = call.options
    try:
        if not (type(is_causal) is type(enable_gqa) is type(want_weights) is type(want_lse) is bool):
            call_checks.flags(call.options)
        out, weights, lse, *aux = compute(call)
    except REFUSALS as refusal:
        raise explained(refusal, call.query, check, call) from None
    return results(out, weights, lse, *aux)


def results(out: Tensor, weights: OptionalTensor, lse: OptionalTensor, *aux: Any) -> Any:
    """Returns out, or a tuple of out, those of weights and lse that exist, and what return_aux gave."""
    if weights is None and lse is None and not aux:
        return out
    return (out, *(part for part in (weights, lse) if part is not None), *aux)


def with_gradients(call: Prepared, options: AttentionOptions) -> shapes.Results:
    """Computes differentiable attention: eager, in graphs of torch.compile, and under torch.func."""
    tensors, scale, keywords, form = call
    if "dropout_p" in keywords:
        tensors = tensors._replace(seed=dropout_seed(tensors.query))
    if options.return_aux is not None:
        return _with_statistics((tensors, scale, keywords, form), options)
    computed = attention_with_gradient(tensors, scale, keywords, options.return_weights, options.return_lse)
    return computed if form.rank == 4 and not form.packed else shapes.restored(form, *computed)


def _with_statistics(call: Prepared, options: AttentionOptions) -> Any:
    """The same with what return_aux asks for."""
    tensors, scale, keywords, form = call
    wants = wanted(options.return_aux, options.return_weights, options.return_lse)
    out, weights, found = statistics_with_gradient(tensors, scale, keywords, wants)
    lse = found.lse if options.return_lse else None
    return *shapes.restored(form, out, weights, lse), aux_output(options, form, found)


def aux_output(options: AttentionOptions, form: shapes.Canonical, found: AuxOutput) -> Any:
    """Returns statistics (B, H, ...), of packed sequences (1, H, ...), in the user's form."""

    def in_form(tensor: Tensor) -> Tensor:
        return tensor.squeeze(0) if form.packed else shapes.with_lead(tensor, form)

    chosen = returned(options.return_aux, found, form.key.size(1))
    return type(chosen)(*(None if part is None else in_form(part) for part in chosen))


def dropout_seed(query: Tensor) -> Tensor:
    """Draws a seed from torch's generator of the query's device."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
