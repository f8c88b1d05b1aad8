"""Recorded functions as text, as exported programs keep them, and back."""

from __future__ import annotations

import functools
import json
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..arguments import Keywords
from . import calls
from .recorder import Load, Node, Number
from .statements import Function
from .tracing import Traced, all_of

__all__ = ["read", "write"]

_KINDS = {kind.__name__: kind for kind in (Node, Number, Load, Function, Traced)}
#: What torch has by name, as its own attributes.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def write(traced: Traced) -> str:
    """All of a recorded pair of functions but the numbers in the tensors that they capture."""
    function = traced.function
    tensors = {id(tensor): number for number, tensor in enumerate(function.tensors)}
    numbers: dict[int, int] = {}  # of objects, each behind those that it refers to

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": tensors[id(value)]}
        if isinstance(value, tuple(_KINDS.values())):
            return {"object": numbers[id(value)]}
        if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, dict):
            return {"dict": {name: plain(each) for name, each in value.items()}}
        return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

    of_gradients = [node for _, *nodes in function.grad_loads for node in nodes]
    nodes = all_of([function.score, function.mask, function.grad_score, *of_gradients])
    objects = []
    each: Any
    for each in (*nodes, function, traced):
        objects.append([type(each).__name__, {it.name: plain(getattr(each, it.name)) for it in fields(each)}])
        numbers[id(each)] = len(numbers)
    forms = [
        [plain(tensor.dtype), *map(list, (tensor.shape, tensor.stride()))] for tensor in function.tensors
    ]
    return json.dumps({"tensors": forms, "objects": objects})


@functools.lru_cache(maxsize=256)
def read(text: str, has_blocks: bool = False) -> tuple[Traced, Keywords]:
    """What :func:`write` was given, with tensors of no numbers in place of the captured ones, and the
    keyword that names it to the operators, compiled and loaded.

    Raises:
        ValueError: it is no such text.
        CompilerError: it cannot be compiled here.
    """

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(restored, value))
        if not isinstance(value, dict):
            return value
        ((kind, of_kind),) = value.items()
        if kind == "dict":
            return {name: restored(each) for name, each in of_kind.items()}
        return {
            "tensor": lambda: tensors[of_kind],
            "object": lambda: objects[of_kind],
            "torch": lambda: getattr(torch, of_kind),
            "device": lambda: torch.device(of_kind),
        }[kind]()

    objects: list[Any] = []
    try:
        written = json.loads(text)
        tensors = [
            torch.empty_strided(sizes, strides, dtype=restored(dtype), device="meta")
            for dtype, sizes, strides in written["tensors"]
        ]
        for kind, parts in written["objects"]:
            objects.append(_KINDS[kind](**{name: restored(part) for name, part in parts.items()}))
        traced = objects[-1]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "score_function must be a function as this version of selfattn_ext writes it into exported "
            "programs, but it is not: export the program again"
        ) from error
    return traced, calls.loaded(traced, has_blocks)
