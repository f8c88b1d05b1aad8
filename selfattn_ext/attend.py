"""The way of a call that the attention functions share, from their options to their results.

Dense, packed and nested calls go through :func:`attention`, with gradients; calls on a cache have a way of
their own in :mod:`selfattn_ext.kv_cache.attention` and take the rest from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, backends
from .arguments import OptionalTensor, Options, Prepared, checks, sequence_checks, shapes
from .autograd import attention_with_gradient

__all__ = ["add_position", "add_rules", "attention", "dropout_seed", "results"]


def add_rules(options: Options, window_size: Sequence[int], softcap: float) -> None:
    """Adds the window, the softcap and the kernel asked for to the options."""
    if window_size is not arguments.DEFAULT_WINDOW:
        arguments.add_window(options, window_size)
    if softcap is not arguments.DEFAULT_SOFTCAP and (bound := checks.softcap(softcap)):
        options["softcap"] = bound
    if backends.forcing and (kernel := backends.forced_kernel()):
        options["kernel_name"] = kernel


def add_position(options: Options, query_offset: int | Tensor) -> None:
    """Adds where query 0 stands to the options, a number for all sequences or a tensor with one for each."""
    if isinstance(query_offset, Tensor) and query_offset.dim():
        options["query_offsets"] = sequence_checks.indices("query_offset", query_offset)
    elif query_offset is not arguments.DEFAULT_QUERY_OFFSET:
        options["query_offset"] = checks.integer("query_offset", query_offset)


def dropout_seed(options: Options, dropout_p: float, query: Tensor) -> OptionalTensor:
    """Adds the probability to the options; a seed from torch's generator on that device, None for 0."""
    if type(dropout_p) is float and dropout_p == 0.0:
        return None
    probability = checks.probability("dropout_p", dropout_p)
    if not probability:
        return None
    options["dropout_p"] = probability
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=query.device)


def attention(
    call: Prepared, dropout_p: float, options: Options, want_weights: bool, want_lse: bool
) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
    """Differentiable attention, eager, compiled and transformed: (out, weights if wanted, lse if wanted).

    ``call`` and ``options`` are those of :func:`selfattn_ext.arguments.prepared.prepared`.
    """
    form, mask, slopes, sink_logits, factor = call
    seed = dropout_seed(options, dropout_p, form.query)
    tensors = (form.query, form.key, form.value, mask, slopes, sink_logits, seed)
    out, weights, lse = attention_with_gradient(tensors, factor, options, want_weights, want_lse)
    if form.rank != 4:
        out = shapes.restored(out, form)
        weights = None if weights is None else shapes.restored(weights, form)
        lse = None if lse is None else shapes.restored(lse, form)
    return out, weights, lse


def results(out: Tensor, weights: OptionalTensor, lse: OptionalTensor) -> Any:
    """What a public function returns: out, or a tuple of that and of what else was asked for."""
    if weights is None:
        return out if lse is None else (out, lse)
    return (out, weights) if lse is None else (out, weights, lse)
