"""Attention with functions of scores in torch's own operations: the judge of the kernels, all of whose
derivatives exist, and the way where a function cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..arguments import Keywords, OptionalTensor, Tensors
from ..arguments import formula as plain_formula
from ..reference import AttentionResult, accumulation_dtype
from .block_masks import visible_blocks
from .recorder import Indexing, Load, Node, replay

if TYPE_CHECKING:
    from .attention import Call

__all__ = ["PythonCall", "at_once", "gradients", "in_rows"]

#: Scores that :func:`in_rows` holds at once, of all heads and batch elements.
_SCORES_AT_ONCE = 1 << 24

ScoreMod = Callable[..., Any]


def _of_traced(tensors: Tensors, captured: Sequence[Tensor], call: Call) -> AttentionResult:
    """A call whose functions have been recorded, with these captured tensors in place of the recorded."""
    function = call.traced.function
    batch, heads, length = tensors.query.shape[:3]
    keys = tensors.key.size(2)
    indices = _indices(batch, heads, length, keys, tensors.query.device)
    position = {id(tensor): index for index, tensor in enumerate(function.tensors)}
    values: dict[Node, Tensor] = {}
    for node in call.traced.inputs():
        if node.op in indices:
            values[node] = indices[node.op]

    def element(load: Load) -> Tensor:
        tensor = captured[position[id(load.tensor)]]
        places = []
        for index, size in zip(load.args, tensor.shape, strict=True):
            # As in the kernels: what a hidden score reads is nobody's business.
            places.append(replay(index, values, element).long().clamp(-size, size - 1))
        return torch.ops.aten.index(tensor, places) if places else tensor

    def modified(scores: Tensor) -> Tensor:
        known = {node: scores for node in call.traced.inputs() if node.op == "score"}
        return _full(replay(function.score, {**values, **known}, element), scores)

    visible = None
    if function.mask is not None:
        visible = replay(function.mask, dict(values), element).bool()
    if call.blocks is not None:
        assert call.block_size is not None
        seen, full = visible_blocks(call.blocks, call.block_size, length, keys)
        visible = seen if visible is None else seen & (full | visible)
    modify = None if function.score.op == "score" else modified
    return _attention(tensors, call.scale, call.keywords, modify, visible)


def gradients(
    tensors: Tensors,
    captured: Sequence[Tensor],
    call: Call,
    cotangents: Sequence[OptionalTensor],
    needs: Sequence[bool],
) -> list[OptionalTensor]:
    """The gradients of tensors and captured tensors where they are needed, differentiable in turn."""
    # Aliases: an input may have been made of another one, which is none of this function's business.
    with torch.enable_grad():
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in (*tensors, *captured)]
        size = len(Tensors._fields)
        result = _of_traced(Tensors(*aliases[:size]), aliases[size:], call)  # type: ignore[arg-type]
        ends = [(end, given) for end, given in zip(result, cotangents, strict=True) if given is not None]
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


class PythonCall(NamedTuple):
    """A call whose functions are Python's as they were given."""

    tensors: Tensors
    scale: float
    keywords: Keywords
    score_mod: ScoreMod | None
    mask_mod: ScoreMod | None
    blocks: OptionalTensor
    block_size: tuple[int, int] | None


def at_once(call: PythonCall) -> AttentionResult:
    """A call by the formula, differentiable in every mode and under torch.func."""
    return _rows(call, 0, call.tensors.query.size(2))


def in_rows(call: PythonCall) -> AttentionResult:
    """The same, some queries at a time; gradients compute them again.

    With dropout, whose pattern counts queries, all at once.
    """
    batch, heads, length = call.tensors.query.shape[:3]
    at_a_time = max(_SCORES_AT_ONCE // max(batch * heads * call.tensors.key.size(2), 1), 1)
    if "dropout_p" in call.keywords or length <= at_a_time:
        return at_once(call)
    parts = [
        checkpoint(_rows, call, first, min(at_a_time, length - first), use_reentrant=False)
        for first in range(0, length, at_a_time)
    ]
    return AttentionResult(*(torch.cat(each, 2) for each in zip(*parts, strict=True)))


def _rows(call: PythonCall, first: int, count: int) -> AttentionResult:
    """Queries first .. first + count - 1."""
    tensors, score_mod, mask_mod = call.tensors, call.score_mod, call.mask_mod
    batch, heads, length = tensors.query.shape[:3]
    keys = tensors.key.size(2)
    at = [index.flatten() for index in _indices(batch, heads, length, keys, tensors.query.device).values()]
    at[2] = at[2][first : first + count]

    def modified(scores: Tensor) -> Tensor:
        assert score_mod is not None
        changed = _mapped(score_mod, True)(scores, *at)
        if changed.shape != scores.shape:
            raise ValueError(
                "a function of scores must return one number for one score, but it returned a tensor of "
                f"shape {tuple(changed.shape[4:])}"
            )
        return changed.to(scores.dtype)

    with Indexing():
        visible = None if mask_mod is None else _mapped(mask_mod, False)(*at)
        if call.blocks is not None:
            assert call.block_size is not None
            of_blocks = visible_blocks(call.blocks, call.block_size, length, keys)
            seen, full = (each[..., first : first + count, :] for each in of_blocks)
            visible = seen if visible is None else seen & (full | visible)
        mask = tensors.mask
        if mask is not None and mask.size(2) > 1:
            mask = mask[:, :, first : first + count]
        part = tensors._replace(query=tensors.query[:, :, first : first + count], mask=mask)
        moved = {**call.keywords, "query_offset": call.keywords.get("query_offset", 0) + first}
        return _attention(part, call.scale, moved, None if score_mod is None else modified, visible)


def _attention(
    tensors: Tensors, scale: float, keywords: Keywords, modify: ScoreMod | None, visible: OptionalTensor
) -> AttentionResult:
    if visible is not None:
        mask = tensors.mask
        if mask is None or mask.dtype == torch.bool:
            tensors = tensors._replace(mask=visible if mask is None else mask & visible)
        else:
            tensors = tensors._replace(mask=torch.where(visible, mask, -torch.inf))
    return plain_formula(tensors, scale, keywords, modify)


def _indices(batch: int, heads: int, length: int, keys: int, device: torch.device) -> dict[str, Tensor]:
    """The indices that functions are called with, each along a dimension of its own."""
    sizes = {"batch": batch, "head": heads, "q_idx": length, "kv_idx": keys}
    result = {}
    for dimension, (name, size) in enumerate(sizes.items()):
        shape = [1, 1, 1, 1]
        shape[dimension] = size
        result[name] = torch.arange(size, dtype=torch.int32, device=device).view(shape)
    return result


def _full(changed: Tensor, scores: Tensor) -> Tensor:
    return changed.to(accumulation_dtype(scores.dtype)).expand_as(scores)


def _mapped(function: Callable[..., Any], has_score: bool) -> ScoreMod:
    """A function of one score as one of all scores (B, H, L, S), or of indices alone."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*((0,) if has_score else ()), *dims))
    return function
