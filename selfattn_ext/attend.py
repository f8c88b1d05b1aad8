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
    call_checks,
    explained,
    shapes,
)
from .autograd import attention_with_gradient

__all__ = ["attend", "dropout_seed", "results", "with_gradients"]

Call = TypeVar("Call", AttentionCall, PackedCall, KVCacheCall)


def attend(call: Call, compute: Callable[[Call], shapes.Results], check: Callable[[Call], None]) -> Any:
    """Returns what a public function returns for a call: out, or a tuple of out and what else was asked for.

    ``compute`` returns (out, weights if wanted, lse if wanted) in the user's form. If it refuses, ``check``
    looks for the reason.
    """
    _, _, is_causal, _, enable_gqa, *_, want_weights, want_lse = call.options
    try:
        if not (type(is_causal) is type(enable_gqa) is type(want_weights) is type(want_lse) is bool):
            call_checks.flags(call.options)
        out, weights, lse = compute(call)
    except REFUSALS as refusal:
        raise explained(refusal, call.query, check, call) from None
    return results(out, weights, lse)


def results(out: Tensor, weights: OptionalTensor, lse: OptionalTensor) -> Any:
    """Returns out, or a tuple of out and those of weights and lse that exist."""
    if weights is None:
        return out if lse is None else (out, lse)
    return (out, weights) if lse is None else (out, weights, lse)


def with_gradients(call: Prepared, options: AttentionOptions) -> shapes.Results:
    """Computes differentiable attention: eager, in graphs of torch.compile, and under torch.func."""
    tensors, scale, keywords, form = call
    if "dropout_p" in keywords:
        tensors = tensors._replace(seed=dropout_seed(tensors.query))
    computed = attention_with_gradient(tensors, scale, keywords, options.return_weights, options.return_lse)
    return computed if form.rank == 4 and not form.packed else shapes.restored(form, *computed)


def dropout_seed(query: Tensor) -> Tensor:
    """Draws a seed from torch's generator of the query's device."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
