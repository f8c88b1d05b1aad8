"""Loads of neighbouring elements.

Where an index of a captured tensor grows or falls by 1 with the query, as in ``bias[q_idx - kv_idx + n]``,
the queries of a vector read a run of memory. That is a pointer and one load for all of them, if the run lies
inside the tensor, which is asked once for a key and its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .operations import cast
from .recorder import Load, Node
from .statements import KEY, PAIR, QUERY, Body

__all__ = ["StraightBody"]

_INTEGERS = (torch.int32, torch.int64)


class _Run(NamedTuple):
    """The dimension along which the queries of a key read neighbours, and by what its index grows."""

    dimension: int
    slope: int


class StraightBody(Body):
    """A body whose loads are of runs, under ``conditions``."""

    LETTERS = "TKQP"  # its statements stand beside those of a Body

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.conditions: list[str] = []

    def _load(self, load: Load) -> str:
        tensor = self.position[id(load.tensor)]
        run = self._run_of(load)
        if run is None:
            return super()._load(load)
        self.conditions.append(f"stride{tensor}_{run.dimension} == 1")
        strides = [f"stride{tensor}_{dimension}" for dimension in range(len(load.args))]
        return self.element(load, run, f"data{tensor}", strides)

    def run_of_last_dimension(self, load: Load) -> _Run | None:
        run = self._run_of(load)
        return run if run is not None and run.dimension == len(load.args) - 1 else None

    def element(self, load: Load, run: _Run, data: str, strides: Sequence[str]) -> str:
        """The element of a query, by a pointer that a key has."""
        tensor = self.position[id(load.tensor)]
        self.count += 1
        name = f"{self.LETTERS[KEY]}{self.count}"
        index = load.args[run.dimension]
        start = cast(self._at_first_query(index), index.dtype, self.index_dtype)
        size = f"size{tensor}_{run.dimension}"
        parts = [f"{name}_start * {strides[run.dimension]}"]
        for dimension, other in enumerate(load.args):
            if dimension != run.dimension:
                parts.append(f"{self._limited(other, tensor, dimension, KEY)} * {strides[dimension]}")
        if run.slope > 0:
            inside = f"{name}_start >= 0 && {name}_start + count <= {size}"
        else:
            inside = f"{name}_start >= count - 1 && {name}_start < {size}"
        self.statements[KEY] += [
            f"const int64_t {name}_start = {start};",
            f"const bool {name}_inside = {inside};",
            f"auto* const {name} = {data} + ({name}_inside ? {' + '.join(parts)} : 0);",
        ]
        self.conditions.append(f"{name}_inside")
        return f"{name}[{'' if run.slope > 0 else '-'}i]"

    def _run_of(self, load: Load) -> _Run | None:
        if self.level(load) != PAIR:
            return None
        slopes = [self._slope(index) for index in load.args]
        runs = [_Run(at, slope) for at, slope in enumerate(slopes) if slope in (1, -1)]
        return runs[0] if len(runs) == 1 and slopes.count(0) == len(slopes) - 1 else None

    def _slope(self, node: Node) -> int | None:
        """By how much a number grows from a query to the next; None if that is not known."""
        if node.op == "q_idx":
            return 1
        if not self.level(node) & QUERY:
            return 0
        if _is_conversion(node):
            return self._slope(node.args[0])
        if not _is_sum(node):
            return None
        first, second = (self._slope(arg) for arg in node.args[:2])
        if first is None or second is None:
            return None
        return {"add": first + second, "sub": first - second, "rsub": second - first}[node.op]

    def _at_first_query(self, node: Node) -> str:
        """What a number with a slope is at the first of the queries."""
        if node.op == "q_idx":
            return "first_query"
        if not self.level(node) & QUERY:
            return self.use(node, KEY)
        if _is_conversion(node):
            return cast(self._at_first_query(node.args[0]), node.args[0].dtype, node.dtype)
        first, second = (cast(self._at_first_query(arg), arg.dtype, node.dtype) for arg in node.args[:2])
        if node.op == "rsub":
            first, second = second, first
        return f"({first} {'+' if node.op == 'add' else '-'} {second})"


def _is_conversion(node: Node) -> bool:
    return node.op == "_to_copy" and node.dtype in _INTEGERS and node.args[0].dtype in _INTEGERS


def _is_sum(node: Node) -> bool:
    return (
        node.op in ("add", "sub", "rsub")
        and node.dtype in _INTEGERS
        and len(node.args) == 2
        and all(isinstance(arg, Node) and arg.dtype in _INTEGERS for arg in node.args)
        and node.kwargs.get("alpha", 1) == 1
    )
