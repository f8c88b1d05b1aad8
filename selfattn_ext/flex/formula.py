"""Attention with functions of scores by the formula, in torch's own operations.

It is the judge of the kernels, it has derivatives of every order, and it computes functions that cannot be
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..arguments import Keywords, OptionalTensor, Tensors, is_packed, statistics_formula
from ..arguments import formula as plain_formula
from ..reference import AttentionResult, accumulation_dtype
from ..reference_statistics import AuxOutput
from .block_masks import visible_blocks
from .flex_call import Call, PythonCall
from .indexing import Indexing
from .nodes import Load, Node, replay
from .tracing import INDEX_DTYPE

__all__ = ["at_once", "gradients", "in_rows", "of_traced", "statistics_at_once", "statistics_in_rows"]

#: Scores that :func:`in_rows` holds at once, of all heads and batch elements.
_SCORES_AT_ONCE = 1 << 24

#: The places of scores: the indices that functions are called with, each along a dimension of its own.
Places = dict[str, Tensor]


class _OfAllScores(NamedTuple):
    """The functions of a call, for all scores of some places at once."""

    score: Callable[[Tensor, Places], Tensor] | None
    visible: Callable[[Places], Tensor] | None


def of_traced(
    tensors: Tensors,
    captured: Sequence[Tensor],
    call: Call,
    compute: Callable[..., Any] = plain_formula,
) -> Any:
    """A call whose functions have been recorded, with these captured tensors in place of the recorded.

    ``compute`` is given what :func:`selfattn_ext.arguments.formula` takes, and its result is returned.
    """
    traced, function = call.traced, call.traced.function
    position = {id(tensor): index for index, tensor in enumerate(function.tensors)}

    def known(places: Places) -> dict[Node, Tensor]:
        return {traced.inputs[name]: numbers for name, numbers in places.items()}

    def element(load: Load, values: dict[Node, Tensor]) -> Tensor:
        tensor = captured[position[id(load.tensor)]]
        at = []
        for index, size in zip(load.args, tensor.shape, strict=True):
            # As in the kernels, a hidden score may read outside the tensor.
            at.append(_replayed(index, values).long().clamp(-size, size - 1))
        return torch.ops.aten.index(tensor, at) if at else tensor.view(1, 1, 1, 1)

    def _replayed(node: Node, values: dict[Node, Tensor]) -> Tensor:
        return replay(node, values, lambda load: element(load, values), traced.device)

    def modified(scores: Tensor, places: Places) -> Tensor:
        changed = _replayed(function.score, {**known(places), traced.inputs["score"]: scores})
        if not traced.differentiable:
            changed = changed.detach()
        return changed.to(accumulation_dtype(scores.dtype)).expand_as(scores)

    def shown(places: Places) -> Tensor:
        assert function.mask is not None
        return _replayed(function.mask, known(places)).bool()

    functions = _OfAllScores(
        None if function.score.op == "score" else modified, None if function.mask is None else shown
    )
    return _attention(tensors, call, functions, compute=compute)


def gradients(
    tensors: Tensors,
    captured: Sequence[Tensor],
    call: Call,
    cotangents: Mapping[str, OptionalTensor],
    needs: Sequence[bool],
) -> list[OptionalTensor]:
    """The gradients of tensors and captured tensors where they are needed, differentiable in turn.

    ``cotangents`` are those of out, weights and statistics, by their names.

    Raises:
        RuntimeError: the function does what cannot be computed again for all scores at once.
    """
    if call.traced.cannot_repeat is not None:
        raise RuntimeError(
            "second derivatives are not available for a function of scores that uses "
            f"{call.traced.cannot_repeat}"
        )
    # Aliases cut inputs off from each other: one may have been made of another outside of this function.
    with torch.enable_grad():
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in (*tensors, *captured)]
        size = len(Tensors._fields)
        of_tensors: Any = aliases[:size]
        of_captured: Any = aliases[size:]

        def computed(compute: Callable[..., Any]) -> dict[str, Tensor]:
            found = of_traced(Tensors(*of_tensors), of_captured, call, compute)
            return dict(found._asdict())

        wanted_ends = {name: given for name, given in cotangents.items() if given is not None}
        results = computed(plain_formula)
        if wanted_ends.keys() - results.keys():
            results |= computed(statistics_formula)
        ends = [(results[name], given) for name, given in wanted_ends.items()]
        wanted = [alias for alias, need in zip(aliases, needs, strict=False) if alias is not None and need]
        found = iter(
            torch.autograd.grad(
                [end for end, _ in ends],
                wanted,
                [given for _, given in ends],
                create_graph=True,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for _, need in zip(aliases, needs, strict=False)]


def at_once(call: PythonCall) -> AttentionResult:
    """A call by the formula, differentiable in every mode and under torch.func."""
    result: AttentionResult = _attention(call.tensors, call, _python(call))
    return result


def statistics_at_once(call: PythonCall) -> AuxOutput:
    """All statistics of a call, likewise."""
    result: AuxOutput = _attention(call.tensors, call, _python(call), compute=statistics_formula)
    return result


def statistics_in_rows(call: PythonCall) -> AuxOutput:
    """All statistics of a call, some queries at a time as in :func:`in_rows`."""
    parts = _parts(call.tensors, call.keywords)
    if len(parts) == 1:
        return statistics_at_once(call)
    results: Any = [
        checkpoint(_rows, call, first, count, statistics_formula, use_reentrant=False)
        for first, count in parts
    ]
    *of_rows, of_keys = zip(*results, strict=True)
    joined: Any = [*(torch.cat(parts, 2) for parts in of_rows), sum(of_keys)]
    return AuxOutput(*joined)


def in_rows(call: PythonCall) -> AttentionResult:
    """A call by the formula, some queries at a time; gradients compute them again.

    With dropout, whose pattern counts queries, all are computed at once; packed sequences, one after the
    other.
    """
    parts = _parts(call.tensors, call.keywords)
    if len(parts) == 1:
        return at_once(call)
    results = [checkpoint(_rows, call, first, count, use_reentrant=False) for first, count in parts]
    return AttentionResult(*(torch.cat(each, 2) for each in zip(*results, strict=True)))


def _parts(tensors: Tensors, keywords: Keywords) -> list[tuple[int, int]]:
    """First and count of the queries that are computed at once."""
    batch, heads, length = tensors.query.shape[:3]
    at_a_time = max(_SCORES_AT_ONCE // max(batch * heads * tensors.key.size(2), 1), 1)
    if "dropout_p" in keywords or length <= at_a_time or is_packed(keywords):
        return [(0, length)]
    return [(first, min(at_a_time, length - first)) for first in range(0, length, at_a_time)]


def _rows(call: PythonCall, first: int, count: int, compute: Callable[..., Any] = plain_formula) -> Any:
    """Queries first .. first + count - 1."""
    part, keywords = _of_rows(call.tensors, call.keywords, first, count)
    return _attention(part, call._replace(keywords=keywords), _python(call), first, compute)


def _of_rows(tensors: Tensors, keywords: Keywords, first: int, count: int) -> tuple[Tensors, Keywords]:
    """The tensors and keywords of a call with these queries alone."""
    if first == 0 and count == tensors.query.size(2):
        return tensors, keywords
    mask = tensors.mask
    if mask is not None and mask.size(2) > 1:
        mask = mask[:, :, first : first + count]
    part = tensors._replace(query=tensors.query[:, :, first : first + count], mask=mask)
    return part, {**keywords, "query_offset": keywords.get("query_offset", 0) + first}


def _python(call: PythonCall) -> _OfAllScores:
    score_mod, mask_mod = call.score_mod, call.mask_mod

    def modified(scores: Tensor, places: Places) -> Tensor:
        assert score_mod is not None
        if scores.numel() == 0:
            return scores  # vmap takes no empty dimension
        with Indexing():
            changed = _mapped(score_mod, True)(scores, *(index.flatten() for index in places.values()))
        if changed.shape != scores.shape:
            raise ValueError(
                "a function of scores must return one number for one score, but it returned a tensor of "
                f"shape {tuple(changed.shape[4:])}"
            )
        return changed.to(scores.dtype)

    def shown(places: Places) -> Tensor:
        assert mask_mod is not None
        sizes = [index.numel() for index in places.values()]
        if 0 in sizes:
            return torch.ones(sizes, dtype=torch.bool, device=places["batch"].device)
        with Indexing():
            return _mapped(mask_mod, False)(*(index.flatten() for index in places.values()))

    return _OfAllScores(None if score_mod is None else modified, None if mask_mod is None else shown)


def _attention(
    tensors: Tensors,
    call: Call | PythonCall,
    functions: _OfAllScores,
    first: int = 0,
    compute: Callable[..., Any] = plain_formula,
) -> Any:
    """Attention of a batch, whose query 0 is number ``first``, or of packed sequences one after the other."""
    query, key = tensors.query, tensors.key
    batch, heads, length = query.shape[:3]

    def visible(places: Places) -> OptionalTensor:
        shown = None if functions.visible is None else functions.visible(places)
        if call.blocks is None:
            return shown
        assert call.block_size is not None
        rows, columns = places["q_idx"].flatten(), places["kv_idx"].flatten()
        seen, full = visible_blocks(call.blocks, call.block_size, rows, columns)
        return seen if shown is None else seen & (full | shown)

    if not is_packed(call.keywords):
        places = _places(0, batch, heads, first, length, key.size(2), query.device)
        score = functions.score
        modify = None if score is None else lambda scores: score(scores, places)
        return compute(tensors, call.scale, call.keywords, modify, visible(places))

    def of_sequence(number: int, length: int, keys: int) -> Places:
        return _places(number, 1, heads, 0, length, keys, query.device)

    def modified(number: int, scores: Tensor) -> Tensor:
        assert functions.score is not None
        return functions.score(scores.unsqueeze(0), of_sequence(number, *scores.shape[1:])).squeeze(0)

    def shown(number: int, length: int, keys: int) -> Tensor:
        assert functions.visible is not None
        return functions.visible(of_sequence(number, length, keys)).squeeze(0)

    return compute(
        tensors, call.scale, call.keywords, functions.score and modified, functions.visible and shown
    )


def _places(
    first_batch: int, batch: int, heads: int, first: int, length: int, keys: int, device: torch.device
) -> Places:
    ranges = {
        "batch": (first_batch, batch),
        "head": (0, heads),
        "q_idx": (first, length),
        "kv_idx": (0, keys),
    }
    result = {}
    for dimension, (name, (begin, size)) in enumerate(ranges.items()):
        shape = [1, 1, 1, 1]
        shape[dimension] = size
        result[name] = torch.arange(begin, begin + size, dtype=INDEX_DTYPE, device=device).view(shape)
    return result


def _mapped(function: Callable[..., Any], has_score: bool) -> Callable[..., Any]:
    """A function of one score as one of all scores (B, H, L, S), or of indices alone."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*((0,) if has_score else ()), *dims))
    return function
