"""Writes recorded functions as the text that exported programs keep, and reads it.

The text lists the objects that a recording is made of, each after those that it refers to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import Keywords
from . import kernel_calls, nodes, statements, tracing
from .ranges import Ranges
from .tracing import Traced

__all__ = ["read", "recorded", "write"]

#: The classes of the objects in a recording.
_KINDS: dict[str, Any] = {
    name: kind
    for module in (nodes, statements, tracing)
    for name, kind in vars(module).items()
    if is_dataclass(kind)
}
#: The classes of values that torch has as attributes of its own.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def write(traced: Traced) -> str:
    """The text of a recorded pair of functions, without the numbers in captured tensors.

    Raises:
        UnsupportedFunctionError: a part of it has no name by which another process could know it.
    """
    tensors = {id(tensor): number for number, tensor in enumerate(traced.tensors)}
    numbers: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in tensors:
            return {"tensor": tensors[id(value)]}
        if id(value) in numbers:
            return {"object": numbers[id(value)]}
        if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, Ranges):
            return {"ranges": dict(value.largest)}
        if isinstance(value, torch._ops.OpOverload):
            return {"operator": str(value)}
        if isinstance(value, dict):
            return {"dict": {name: plain(each) for name, each in value.items()}}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise nodes.UnsupportedFunctionError(f"it uses {value}, which an exported program cannot hold")

    objects = []
    for each in _in_order(traced):
        objects.append([type(each).__name__, {it.name: plain(getattr(each, it.name)) for it in fields(each)}])
        numbers[id(each)] = len(numbers)
    forms = [[plain(tensor.dtype), *map(list, (tensor.shape, tensor.stride()))] for tensor in traced.tensors]
    return json.dumps({"tensors": forms, "objects": objects})


def _in_order(root: Any) -> Iterator[Any]:
    """An object and those that it refers to, each after those that it refers to itself."""
    seen: set[int] = set()
    waiting = [(root, False)]
    while waiting:
        each, complete = waiting.pop()
        if complete:
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting.append((each, True))
            waiting += [(part, False) for it in fields(each) for part in _objects(getattr(each, it.name))]


def _objects(value: Any) -> Iterator[Any]:
    """The objects in a field."""
    if type(value) in _KINDS.values():
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _objects(each)


@functools.lru_cache(maxsize=256)
def read(text: str, has_blocks: bool = False) -> tuple[Traced, Keywords]:
    """:func:`recorded`, and the keyword that names the functions to the operators, once they are compiled and
    loaded.

    Raises:
        ValueError: it is no text of :func:`write`.
        CompilerError: the functions cannot be compiled here.
    """
    traced = recorded(text)
    return traced, kernel_calls.loaded(traced, has_blocks)


def recorded(text: str) -> Traced:
    """The functions that :func:`write` was given, with tensors of no numbers in place of the captured ones.

    Raises:
        ValueError: it is no text of :func:`write`.
    """
    try:
        return _read(json.loads(text))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "score_function must be a function as this version of selfattn_ext writes it into exported "
            "programs, but it is not: export the program again"
        ) from error


def _read(written: Any) -> Traced:
    objects: list[Any] = []

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(restored, value))
        if not isinstance(value, dict):
            return value
        ((kind, given),) = value.items()
        if kind == "dict":
            return {name: restored(each) for name, each in given.items()}
        if kind == "torch":
            return getattr(torch, given)
        if kind == "device":
            return torch.device(given)
        if kind == "ranges":
            return Ranges(given)
        if kind == "operator":
            return functools.reduce(getattr, given.split("."), torch.ops)
        return {"tensor": tensors, "object": objects}[kind][given]

    tensors = [
        torch.empty_strided(sizes, strides, dtype=restored(dtype), device="meta")
        for dtype, sizes, strides in written["tensors"]
    ]
    for kind, parts in written["objects"]:
        objects.append(_KINDS[kind](**{name: restored(part) for name, part in parts.items()}))
    if not isinstance(objects[-1], Traced):
        raise TypeError("not a recording")
    return objects[-1]
