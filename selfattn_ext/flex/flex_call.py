"""A call with functions of scores: the functions as users give them, and as they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import Keywords, OptionalTensor, Tensors
from ..aux_request import Wanted
from .tracing import Traced

__all__ = ["Call", "Functions", "MaskMod", "PythonCall", "ScoreMod", "check_functions"]

#: Functions of a score, and of the numbers of batch element, head, query and key.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Functions(NamedTuple):
    """The functions of a call, as users give them."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    #: A BlockMask, whose function is then mask_mod.
    block_mask: Any = None


class Call(NamedTuple):
    """A call without its tensors, with functions that have been recorded."""

    scale: float
    keywords: Keywords
    wanted: Wanted
    traced: Traced
    blocks: OptionalTensor
    block_size: tuple[int, int] | None


class PythonCall(NamedTuple):
    """A call whose functions are those of Python that were given."""

    tensors: Tensors
    scale: float
    keywords: Keywords
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    blocks: OptionalTensor
    block_size: tuple[int, int] | None


def check_functions(query: Tensor, score_mod: Any, mask_mod: Any = None) -> None:
    """Raises ValueError or TypeError unless these are functions or None, and the query's device has them."""
    if hasattr(mask_mod, "kv_num_blocks"):
        raise TypeError(
            "mask_mod must be a function, but it is a BlockMask, whose blocks are those of one pair of "
            "lengths: pass its mask_mod"
        )
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, but it is {type(function).__name__}")
    if isinstance(query, Tensor) and query.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"functions of scores are computed on the CPU and on CUDA, but query is on {query.device}"
        )
