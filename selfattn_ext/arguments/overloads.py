"""Keyword arguments that attention functions share, per kind of result, for type checkers.

Each overload of a public function names its other arguments and takes one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor
from typing_extensions import Required

from ..aux_request import AuxRequest

__all__ = ["ForAny", "ForAux", "ForLse", "ForOut", "ForWeights", "ForWeightsAndLse", "Rules"]


class Rules(TypedDict, total=False):
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class ForOut(Rules, total=False):
    """The flags of a call that returns out."""

    return_weights: Literal[False]
    return_lse: Literal[False]


class ForWeights(Rules, total=False):
    """The flags of a call that returns (out, weights)."""

    return_weights: Required[Literal[True]]
    return_lse: Literal[False]


class ForLse(Rules, total=False):
    """The flags of a call that returns (out, lse)."""

    return_weights: Literal[False]
    return_lse: Required[Literal[True]]


class ForWeightsAndLse(Rules, total=False):
    """The flags of a call that returns (out, weights, lse)."""

    return_weights: Required[Literal[True]]
    return_lse: Required[Literal[True]]


class ForAux(Rules, total=False):
    """The flags of a call that returns (out, AuxOutput)."""

    return_weights: Literal[False]
    return_lse: Literal[False]
    return_aux: Required[AuxRequest]


class ForAny(Rules, total=False):
    """Flags whose values are known only when the program runs."""

    return_weights: bool
    return_lse: bool
    return_aux: Any
