"""Derivatives of attention by the formula of :mod:`selfattn_ext.reference`.

They hold (L, S) matrices and serve third derivatives, and second derivatives and forward mode of weights.
Each function takes :class:`Inputs` and can itself be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import formula
from .differentiated import COTANGENTS, SOURCES, TANGENTS, Inputs
from .forward_levels import pushed

__all__ = ["attention", "gradients", "pull", "pulled", "push", "second_gradients", "tangents"]

#: A function of the tensors in Inputs that are not None; each one says which results it returns.
Formula = Callable[[Inputs], tuple[Tensor, ...]]


def attention(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, weights and lse."""
    out, weights, lse = formula(given.tensors(), given.scale, given.keywords)
    return out, weights, lse


def _out_and_lse(given: Inputs) -> tuple[Tensor, Tensor]:
    out, _, lse = attention(given)
    return out, lse


def gradients(given: Inputs, names: Sequence[str] | None = None) -> tuple[Tensor, ...]:
    """Returns the gradients of the sources of these names, by default of all that are asked for."""
    incoming = given.present(COTANGENTS)

    def results(given: Inputs) -> tuple[Tensor, ...]:
        named = dict(zip(COTANGENTS, attention(given), strict=True))
        return tuple(named[name] for name in incoming)

    return pulled(results, given, given.wanted() if names is None else names, given.all_of(incoming))


def second_gradients(given: Inputs) -> tuple[Tensor, ...]:
    """Returns the results of the operator attention_backward_backward for tensors that are not None.

    They are the gradients of the sources, tangent_out and tangent_lse.
    """
    names, directions = _directions(given)

    def along(given: Inputs) -> tuple[Tensor, ...]:
        return gradients(given, names)

    return pulled(along, given, [*given.wanted(), *given.present(COTANGENTS)], directions)


def tangents(given: Inputs) -> tuple[Tensor, ...]:
    """Returns out, lse, and their tangents."""
    names, directions = _directions(given)
    return *_out_and_lse(given), *push(_out_and_lse, given, dict(zip(names, directions, strict=True)))


def _directions(given: Inputs) -> tuple[list[str], list[Tensor]]:
    """Returns the names of the sources that have a tangent, and these tangents."""
    names = [name for name in SOURCES if getattr(given, f"tangent_{name}") is not None]
    return names, [getattr(given, f"tangent_{name}") for name in names]


def _of_points(function: Formula, given: Inputs, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *points: function(given._replace(**dict(zip(names, points, strict=True))))


def pulled(
    function: Formula, given: Inputs, names: Sequence[str], cotangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the gradients of the tensors of these names, given those of a function's results."""
    return torch.func.vjp(_of_points(function, given, names), *given.all_of(names))[1](tuple(cotangents))


def pull(function: Formula, given: Inputs, cotangents: Sequence[Any]) -> Inputs:
    """Returns the gradients of all tensors that a function may depend on; a missing cotangent is 0."""
    names = [*given.present(COTANGENTS), *given.wanted(), *given.present(TANGENTS)]
    pull_back: Any
    results, pull_back = torch.func.vjp(  # type: ignore[misc]
        _of_points(function, given, names), *given.all_of(names)
    )
    pulled = pull_back(
        tuple(
            torch.zeros_like(result) if cotangent is None else cotangent
            for result, cotangent in zip(results, cotangents, strict=True)
        )
    )
    return Inputs(**dict(zip(names, pulled, strict=True)))


def push(function: Formula, given: Inputs, directions: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the tangents of a function's results, given those of its inputs by their names."""
    names = list(directions)
    return pushed(_of_points(function, given, names), given.all_of(names), list(directions.values()))
