"""Neighbouring queries that read neighbouring elements do so by one load.

If an index of a captured tensor grows or falls by 1 with the query, as in ``bias[q_idx - kv_idx + n]``, the
queries of a vector read a run of memory. One pointer and one load serve all of them if the run lies inside
the tensor, which is checked once for a key and its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .nodes import Load, Node, all_of
from .operations import C_TYPES, expression
from .statements import KEY, PAIR, QUERY, Body

__all__ = ["StraightBody"]


class _Run(NamedTuple):
    """The dimension along which the queries of a key read neighbours, and the step of its index."""

    dimension: int
    slope: int


class _Slope(NamedTuple):
    """The growth of a number from a query to the next, and whether it never wraps around meanwhile."""

    slope: int
    is_exact: bool


class StraightBody(Body):
    """A body whose loads are of runs, under ``conditions``."""

    LETTERS = "TKQP"  # its statements stand beside those of a Body

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.conditions: list[str] = []
        self._slopes: dict[Node, _Slope | None] = {}
        #: The values of numbers with a slope at the first of the queries.
        self._at_first_query: dict[Node, str] = {}

    def _needs(self, node: Node) -> Sequence[Any]:
        run = self._run_of(node) if isinstance(node, Load) else None
        if run is None:
            return node.args
        others = [index for dimension, index in enumerate(node.args) if dimension != run.dimension]
        terms = all_of([node.args[run.dimension]], operands=self._terms)
        return [*others, *(term for term in terms if not self.level(term) & QUERY)]

    def _terms(self, node: Node) -> Sequence[Any]:
        """The terms that a number with a slope is the sum of."""
        return node.args if self.level(node) & QUERY else ()

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
        """The element of a query, read by a pointer that is made once for a key."""
        tensor = self.position[id(load.tensor)]
        start = self._first_of(load.args[run.dimension])
        self.count += 1
        name = f"{self.LETTERS[KEY]}{self.count}"
        size = f"size{tensor}_{run.dimension}"
        parts = [f"{name}_start * {strides[run.dimension]}"]
        for dimension, other in enumerate(load.args):
            if dimension != run.dimension:
                parts.append(f"{self._limited(other, tensor, dimension, KEY)} * {strides[dimension]}")
        if run.slope > 0:
            inside = f"{name}_start >= 0 && {name}_start <= {size} - count"
        else:
            inside = f"{name}_start >= count - 1 && {name}_start < {size}"
        self.statements[KEY] += [
            f"const int64_t {name}_start = {start};",
            f"const bool {name}_inside = {inside};",
            f"auto* const {name} = {data} + ({name}_inside ? {' + '.join(parts)} : 0);",
        ]
        self.conditions.append(f"{name}_inside")
        return f"{name}[{'' if run.slope > 0 else '-'}i]"

    def _all_bits(self, index: Node, text: str) -> tuple[torch.dtype, str]:
        """The index in as many bits as a score has, so that compilers make vectors of both."""
        dtype, given = super()._all_bits(index, text)
        if dtype == self.index_dtype:
            return dtype, given
        return self.index_dtype, f"saturated({given})"

    def _first_of(self, index: Node) -> str:
        """The value of a number with a slope at the first of the queries."""
        for node in all_of([index], self._at_first_query, self._terms):
            if node.op == "q_idx":
                text = "first_query"
            elif not self.level(node) & QUERY:
                text = self.use(node, KEY)
            else:
                self.count += 1
                text = f"{self.LETTERS[KEY]}{self.count}"
                value = expression(node, self._at_first_query.__getitem__, self.ranges)
                self.statements[KEY].append(f"const {C_TYPES[self.ranges.held(node)]} {text} = {value};")
            self._at_first_query[node] = text
        return self._at_first_query[index]

    def _run_of(self, load: Load) -> _Run | None:
        if self.level(load) != PAIR:
            return None
        slopes = [self._slope(index) for index in load.args]
        runs = [_Run(at, slope) for at, slope in enumerate(slopes) if slope in (1, -1)]
        return runs[0] if len(runs) == 1 and slopes.count(0) == len(slopes) - 1 else None

    def _slope(self, index: Node) -> int | None:
        for node in all_of([index], self._slopes, self._terms):
            self._slopes[node] = self._found_slope(node)
        found = self._slopes[index]
        return None if found is None else found.slope

    def _found_slope(self, node: Node) -> _Slope | None:
        if node.op == "q_idx":
            return _Slope(1, True)
        if not self.level(node) & QUERY:
            return _Slope(0, True)
        if not _is_sum(node):
            return None
        slopes = [self._slopes[arg] for arg in node.args]
        is_exact = self.ranges.is_exact(node)
        total = 0
        for arg, found, sign in zip(node.args, slopes, _SIGNS[node.op], strict=True):
            # If a shorter number wraps around, the longer one that it is converted to makes a leap.
            if found is None or not (found.is_exact or arg.dtype.itemsize >= node.dtype.itemsize):
                return None
            total += sign * found.slope
            is_exact &= found.is_exact
        return _Slope(total, is_exact)


#: The sign with which each operand enters a sum.
_SIGNS = {"_to_copy": (1,), "add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}
_INTEGERS = (torch.int32, torch.int64)


def _is_sum(node: Node) -> bool:
    return (
        node.dtype in _INTEGERS
        and len(node.args) == len(_SIGNS.get(node.op, ()))
        and all(isinstance(arg, Node) and arg.dtype in _INTEGERS for arg in node.args)
        and node.kwargs.get("alpha", 1) == 1
    )
