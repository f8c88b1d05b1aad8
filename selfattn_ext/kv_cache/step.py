"""A step on a cache in the form of the operators: it writes the new keys and values, then attends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from .. import ops
from ..arguments import (
    AttentionOptions,
    Keywords,
    OptionalTensor,
    Tensors,
    autocast,
    checks,
    keywords_of,
    shapes,
    with_options,
)
from ..attend import aux_output, dropout_seed
from ..autograd import onnx_graphs, statistics
from ..autograd.graph_operators import arguments_of, composed
from ..aux_request import Wanted, wanted
from ..flex import formula, written
from ..flex.flex_call import Call
from ..flex.graphs import outside_of_graphs
from ..formula_steps import default_scale
from ..reference_statistics import AuxOutput
from . import cache_checks

__all__ = ["append_to_cache", "attend_to_cache", "name_in_graphs", "page_numbers"]

#: The keywords that hold tensors which have gradients elsewhere.
_WITH_GRADIENTS = ("attn_mask", "alibi_slopes", "sinks")

# Looked up once: an attribute chain costs as much as the call at its end.
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_increment_version = torch.autograd.graph.increment_version


def page_numbers(table: Tensor) -> Tensor:
    """A block_table as the operators take it: int32, with dense rows."""
    if table.dtype is torch.int64:
        # A number that int32 cannot hold is no page's, and stays so by the clamp.
        table = table.clamp(-1, 2**31 - 1).int()
    return table if table.stride(-1) == 1 else table.contiguous()


def attend_to_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    batch: int,
    options: AttentionOptions,
    keywords: Keywords,
    compute: Callable[..., shapes.Results] | None = None,
) -> Any:
    """The step in the operators' form: (out, weights if wanted, lse if wanted), and what return_aux asks for.

    Tensors are (B, H, L, E), or (1, H, total, E) if queries are packed; ``keywords`` have all options but
    the tensors among them, and seqlens_k are the lengths after the step. ``compute`` takes the place of
    :func:`_attended`.
    """
    mask, _, _, scale, _, _, _, slopes, sinks, _, want_weights, want_lse, request = options
    if _is_any_autocast_enabled():
        # A cast copy of a cache would not be written to the cache; so the others take its dtype.
        (query,) = autocast(query, dtype=key_cache.dtype)
    if mask is not None or slopes is not None or sinks is not None:
        cache_checks.no_causal_bias(mask)
        form = shapes.Canonical(query, key_cache, value_cache, (batch,), 4)
        operands, factor, _, _ = with_options(form, options, keywords)
        keywords = keywords_of(operands, keywords)
    else:
        factor = default_scale(query.size(3)) if scale is None else checks.scale(scale)
    if "dropout_p" in keywords:
        keywords["dropout_seed"] = dropout_seed(query)
    query = shapes.dense_rows(query)
    if key is None or value is None:
        if key is not value:
            raise ValueError("key without value")
    else:
        key, value = _written(key, value, key_cache.dtype)
    if request is not None:
        if _is_exporting():
            raise RuntimeError("torch.export has no statistics (return_aux) of attention to a cache")
        wants = wanted(request, want_weights, want_lse)
        step = (query, key_cache, value_cache, key, value, factor, keywords)
        out, weights, found = _attended_with_statistics(*step, wants)
        form = shapes.Canonical(query, key_cache, value_cache, (batch,), 4, "cu_seqlens_q" in keywords)
        return out, weights, found.lse if want_lse else None, aux_output(options, form, found)
    if compute is None:
        compute = _put_in_graph if _is_compiling() or _is_exporting() else _attended
    return compute(query, key_cache, value_cache, key, value, factor, keywords, want_weights, want_lse)


def _attended(
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
    """The step, once all arguments are in the operators' form."""
    _refuse_derivatives(query, key_cache, value_cache, key, value, keywords)
    given = {**keywords, "need_weights": True} if want_weights else keywords
    if key is None or value is None:
        out, row_max, row_sum, _ = ops.direct_forward(query, key_cache, value_cache, factor, **given)
    else:
        out, row_max, row_sum = ops.direct_with_cache(
            query, key_cache, value_cache, key, value, factor, **given
        )
        # It tells autograd that a cache which it has saved before has changed.
        _increment_version((key_cache, value_cache))
    weights = None
    if want_weights:
        weights = ops.attention_weights(query, key_cache, row_max, row_sum, factor, **keywords)
    return out, weights, row_max + torch.log(row_sum) if want_lse else None


def _refuse_derivatives(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    keywords: Keywords,
) -> None:
    if _is_grad_enabled():
        for tensor in (query, key_cache, value_cache, key, value, *map(keywords.get, _WITH_GRADIENTS)):
            if tensor is not None and tensor.requires_grad:
                raise ValueError("no gradients")
    if _are_transforms_active() or forward_ad._current_level >= 0:
        others = map(keywords.get, _WITH_GRADIENTS)
        cache_checks.no_derivatives((query, key_cache, value_cache, key, value, *others))


@outside_of_graphs
def _attended_with_statistics(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    factor: float,
    keywords: Keywords,
    wants: Wanted,
) -> tuple[Tensor, OptionalTensor, AuxOutput]:
    """:func:`_attended` with statistics, as (out, weights, statistics)."""
    _refuse_derivatives(query, key_cache, value_cache, key, value, keywords)
    if key is None or value is None:
        rows = statistics.forward(query, key_cache, value_cache, factor, keywords, wants, need_residual=False)
    else:
        given = {**keywords, "need_weights": True} if wants.weights else keywords
        step = ops.statistics_with_cache if wants.of_rows() else ops.attention_with_cache
        out, row_max, row_sum, *more = step(query, key_cache, value_cache, key, value, factor, **given)
        rows = statistics.Rows(out, row_max, row_sum, None, *more)
        _increment_version((key_cache, value_cache))
    weights = None
    if wants.weights:
        weights = ops.attention_weights(query, key_cache, rows.row_max, rows.row_sum, factor, **keywords)
    return rows.out, weights, statistics.of_rows(rows, query, key_cache, factor, keywords, wants)


def _put_in_graph(
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
    """The step in a graph, as one operator."""
    news = () if key is None or value is None else (key, value)
    wants = {"return_weights": want_weights, "return_lse": want_lse}
    operator = _extending if news else _reading
    results = operator(query, key_cache, value_cache, *news, factor, **wants, **keywords)
    return results[0], results[1] if want_weights else None, results[-1] if want_lse else None


def name_in_graphs(news: Sequence[Tensor]) -> str:
    """The name of the operator that computes a step in a graph, with new keys and values or without."""
    return _EXTENDING if news else _READING


def _operator(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    factor: float,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    score_function: str | None = None,
    **keywords: Any,
) -> list[Tensor]:
    others = (*map(keywords.get, _WITH_GRADIENTS), *keywords.get("captured", ()))
    cache_checks.no_derivatives((query, key_cache, value_cache, key, value, *others))
    if onnx_graphs.is_exporting():
        given = (query, key_cache, value_cache, key, value, factor, keywords, return_weights, return_lse)
        return _in_onnx(*given, score_function)
    if score_function is not None:
        keywords |= written.read(score_function)[1]
    results = _attended(
        query, key_cache, value_cache, key, value, factor, keywords, return_weights, return_lse
    )
    return [result for result in results if result is not None]


def _in_onnx(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: OptionalTensor,
    value: OptionalTensor,
    factor: float,
    keywords: Keywords,
    want_weights: bool,
    want_lse: bool,
    score_function: str | None,
) -> list[Tensor]:
    """The step as Note [ONNX] in autograd/onnx_graphs.py says."""
    if key is not None and value is not None:
        before = keywords["seqlens_k"] - key.size(2)
        onnx_graphs.append(key_cache, value_cache, key, value, before, None, keywords.get("block_table"))
    names = (*_WITH_GRADIENTS, "dropout_seed")
    tensors = Tensors(query, key_cache, value_cache, *(keywords.pop(name, None) for name in names))
    captured, _ = keywords.pop("captured", ()), keywords.pop("captured_numbers", ())
    tensors, keywords = onnx_graphs.cached(tensors, keywords)
    if score_function is None:
        return onnx_graphs.wanted(tensors, factor, keywords, want_weights, want_lse)
    wanted = Wanted(want_weights, want_lse)
    call = Call(factor, keywords, wanted, written.recorded(score_function), None, None)
    compute = functools.partial(onnx_graphs.attention, want_weights=want_weights, want_lse=want_lse)
    result = formula.of_traced(tensors, captured, call, compute)
    return onnx_graphs.chosen(result, want_weights, want_lse)


def _reading_operator(
    query: Tensor, keys: Tensor, values: Tensor, factor: float, **more: Any
) -> list[Tensor]:
    return _operator(query, keys, values, None, None, factor, **more)


# Operators that refuse gradients: see Note [Gradients in graphs] in autograd/graph_operators.py.
_READING, _EXTENDING = "attention_without_gradient", "attention_with_cache_without_gradient"
_reading = composed(
    _READING,
    arguments_of(ops.attention_forward, need_residual="return_weights", need_weights="return_lse"),
    "Tensor[]",
    _reading_operator,
)
_extending = composed(
    _EXTENDING,
    arguments_of(
        ops.attention_with_cache, **{"bool need_weights": "bool return_lse=False, bool return_weights"}
    ),
    "Tensor[]",
    _operator,
)


def _written(key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as the operators write them: under autocast in the dtype of the cache, with dense rows.

    Values that are views of features of the keys stay such views, as the operators ask of them if the caches
    are such views, too.
    """
    if _is_any_autocast_enabled():
        k, v = map(shapes.dense_rows, autocast(key, value, dtype=dtype))
    else:
        k, v = shapes.dense_rows(key), shapes.dense_rows(value)
    if (k is key and v is value) or _is_compiling():
        return k, v
    first = cache_checks.first_feature(key, value)
    return (k, v) if first is None else (k, k[..., first : first + v.size(-1)])


def append_to_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    cu_seqlens: OptionalTensor,
    block_table: OptionalTensor,
) -> None:
    """Writes keys and values after the ``lengths`` rows that the sequences have, in the operators' form."""
    key, value = _written(key, value, key_cache.dtype)
    append = _appending if _is_compiling() or _is_exporting() else _appended
    append(key_cache, value_cache, key, value, lengths, cu_seqlens=cu_seqlens, block_table=block_table)


def _appended(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any
) -> None:
    cache_checks.no_derivatives((key_cache, value_cache, key, value))
    if onnx_graphs.is_exporting():
        onnx_graphs.append(key_cache, value_cache, key, value, *more, **options)
        return
    ops.append_to_cache(key_cache, value_cache, key, value, *more, **options)
    _increment_version((key_cache, value_cache))


_appending = composed("append_to_cache_without_gradient", arguments_of(ops.append_to_cache), "()", _appended)


def _take_negative_views(operator: Any) -> None:
    """Has an operator that writes to caches refuse those that are negative views, such as ``z.conj().imag``.

    torch would hand the operator copies of them, and then fail an assertion, as nothing is returned that it
    could copy back. Calls without negative views do not come here, so it costs them nothing.
    """
    schema = operator._schema.arguments
    written = [index for index, it in enumerate(schema) if it.alias_info and it.alias_info.is_write]

    def resolved(*arguments: Any, **keywords: Any) -> Any:
        for index in written:
            if arguments[index].is_neg():
                raise ValueError(
                    f"{schema[index].name} is written to, but a negative view, whose memory has the "
                    "other sign: take resolve_neg() of it"
                )
        arguments, keywords = tree_map_only(Tensor, torch.resolve_neg, (arguments, keywords))
        return operator(*arguments, **keywords)

    _library.impl(operator, resolved, "Negative")


_library = torch.library.Library(ops.NAMESPACE, "IMPL")
for _writing in (
    ops.append_to_cache,
    ops.attention_with_cache,
    ops.statistics_with_cache,
    _appending,
    _extending,
):
    _take_negative_views(_writing)
