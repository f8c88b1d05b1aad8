"""A step on a cache with functions of scores, in the form of the operators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import AttentionOptions, Keywords, OptionalTensor, Tensors, autocast, shapes, with_options
from ..attend import aux_output, dropout_seed
from ..flex import compiler, formula, kernel_calls
from ..flex.flex_call import Functions, PythonCall, check_functions
from ..flex.graphs import CacheOperator, outside_of_graphs, traced_results
from ..flex.nodes import UnsupportedFunctionError
from ..flex.tracing import trace
from ..reference import accumulation_dtype
from ..reference_statistics import AuxOutput
from . import cache_checks
from .step import append_to_cache, attend_to_cache, name_in_graphs

__all__ = ["attend_with_functions"]


def attend_with_functions(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    batch: int,
    options: AttentionOptions,
    keywords: Keywords,
    score_mod: Any,
    mask_mod: Any,
    first: int | Tensor | None = None,
) -> Any:
    """:func:`.step.attend_to_cache` with functions of scores.

    ``first`` is the q_idx of query 0, of all sequences or of each (B,); None is 0.
    """
    check_functions(query, score_mod, mask_mod)
    given = (query, key_cache, value_cache, key, value, batch, options, keywords)
    if torch.compiler.is_exporting():
        functions = Functions(*_moved(first, query, batch, score_mod, mask_mod))
        return attend_to_cache(*given, functools.partial(_put_in_graph, functions))
    return _outside_of_graphs(*given, first, score_mod, mask_mod)


def _put_in_graph(
    functions: Functions,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    factor: float,
    keywords: Keywords,
    want_weights: bool,
    want_lse: bool,
) -> shapes.Results:
    """The call as a graph of torch.export holds it."""
    news = () if key is None or value is None else (key, value)
    tensors, wants = Tensors(query, key_cache, value_cache), (want_weights, want_lse, False)
    on_cache = CacheOperator(name_in_graphs(news), news)
    out, weights, lse, _ = traced_results(tensors, factor, keywords, wants, functions, on_cache)
    return out, weights if want_weights else None, lse if want_lse else None


@outside_of_graphs
def _outside_of_graphs(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    batch: int,
    options: AttentionOptions,
    keywords: Keywords,
    first: int | Tensor | None,
    score_mod: Any,
    mask_mod: Any,
) -> Any:
    given = (query, key_cache, value_cache, key, value, batch, options)
    score_mod, mask_mod = _moved(first, query, batch, score_mod, mask_mod)
    sizes = kernel_calls.sizes_of(query, key_cache, keywords)
    try:
        traced = trace(score_mod, mask_mod, accumulation_dtype(key_cache.dtype), query.device, False, sizes)
        if loaded := kernel_calls.loaded(traced):
            cache_checks.no_derivatives(traced.tensors)
            keywords = {**keywords, **loaded, **kernel_calls.inputs_of(traced, traced.tensors)}
    except (UnsupportedFunctionError, compiler.CompilerError) as reason:
        kernel_calls.warn(reason)
        results = _by_formula(*given, keywords, score_mod, mask_mod)
        cache_checks.no_derivatives(results[:3])  # captured tensors may require them
        return results
    return attend_to_cache(*given, keywords)


def _moved(first: int | Tensor | None, query: Tensor, batch: int, *functions: Any) -> list[Any]:
    """Functions of a query's position as functions of its number, which the operators count from 0."""
    if first is None:
        return list(functions)
    positions = torch.as_tensor(first, device=query.device).long().expand(batch)
    # With known bounds of positions, the functions need not compute with all of their bits.
    known = type(positions) is Tensor and positions.is_cpu and batch > 0 and not torch.compiler.is_exporting()
    bounds = tuple(int(bound) for bound in positions.aminmax()) if known else None

    def moved(function: Any) -> Any:
        def called(*inputs: Tensor) -> Tensor:
            *before, number, head, index, key = inputs
            position = positions[number] if bounds is None else positions[number].clamp(*bounds)
            result: Tensor = function(*before, number, head, index + position, key)
            return result

        return called

    return [None if function is None else moved(function) for function in functions]


def _by_formula(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    batch: int,
    options: AttentionOptions,
    keywords: Keywords,
    score_mod: Any,
    mask_mod: Any,
) -> Any:
    """The step by the formula, on packed sequences with a copy of the keys."""
    (query,) = autocast(query, dtype=key_cache.dtype)
    form = shapes.Canonical(query, key_cache, value_cache, (batch,), 4)
    tensors, scale, _, _ = with_options(form, options, keywords)
    if "dropout_p" in keywords:
        tensors = tensors._replace(seed=dropout_seed(query))
    table, starts_k = keywords.get("block_table"), keywords.get("cu_seqlens_k")
    capacity = kernel_calls.sizes_of(query, key_cache, keywords)[-1]
    after = keywords.get("seqlens_k", query.new_full((batch,), capacity, dtype=torch.int64))
    starts_q = keywords.get("cu_seqlens_q")
    if key is not None and value is not None:
        # Tensors that are views of the cache count as they were before the write.
        tensors = Tensors(*(None if tensor is None else tensor.clone() for tensor in tensors))  # type: ignore[arg-type]
        before = after - (key.size(2) if starts_q is None else starts_q.diff())
        append_to_cache(key_cache, value_cache, key, value, before, starts_q, table)
    rows = tensors.query
    if starts_q is None:
        starts_q = torch.arange(batch + 1, device=query.device) * query.size(2)
        rows = rows.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    first = [0] * batch if starts_k is None else starts_k.tolist()
    places = list(zip(first, after.tolist(), strict=False))
    keys, values = (
        _rows_of(cache, places, starts_k is not None, table) for cache in (key_cache, value_cache)
    )
    packing = {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": torch.tensor(
            [0, *itertools.accumulate(count for _, count in places)], device=query.device
        ),
        "max_seqlen_q": keywords.get("max_seqlen_q", query.size(2)),
        "max_seqlen_k": keywords.get("max_seqlen_k", capacity),
    }
    packed = tensors._replace(query=rows, key=keys, value=values)
    call = PythonCall(packed, scale, {**keywords, **packing}, score_mod, mask_mod, None, None)
    out, weights, lse = formula.at_once(call)
    is_packed = query.size(0) != batch or "cu_seqlens_q" in keywords

    def in_form(rows: Tensor) -> Tensor:
        return rows if is_packed else rows.squeeze(0).unflatten(1, (batch, query.size(2))).transpose(0, 1)

    results = (
        in_form(out),
        weights if options.return_weights else None,
        in_form(lse) if options.return_lse else None,
    )
    if options.return_aux is None:
        return results
    *of_rows, key_weights = formula.statistics_at_once(call)
    assert key_weights is not None
    size = (1, query.size(1), key_cache.size(2)) if starts_k is not None else (batch, query.size(1), capacity)
    of_keys = key_weights.new_zeros(size)
    for b, (part, (at, count)) in enumerate(
        zip(key_weights[0].split([count for _, count in places], 1), places, strict=True)
    ):
        of_keys[0 if starts_k is not None else b, :, at : at + count] = part
    joined: Any = [*(None if part is None else in_form(part) for part in of_rows), of_keys]
    found = AuxOutput(*joined)
    packed_form = form._replace(packed="cu_seqlens_q" in keywords)
    return *results, aux_output(options, packed_form, found)


def _rows_of(
    cache: Tensor, places: Sequence[tuple[int, int]], is_packed: bool, table: OptionalTensor
) -> Tensor:
    """The rows (1, Hk, rows, E) of all sequences. ``places`` are the first row and the count of each."""
    parts = [cache.new_empty(cache.size(1), 0, cache.size(3))]
    for b, (first, count) in enumerate(places):
        if table is not None:
            pages = cache[table[b, : -(-count // cache.size(2))].long()]
            parts.append(pages.transpose(0, 1).flatten(1, 2)[:, :count])
        else:
            parts.append(cache[0 if is_packed else b, :, first : first + count])
    return torch.cat(parts, 1).unsqueeze(0)
