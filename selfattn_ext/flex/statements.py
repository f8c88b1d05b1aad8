"""The C++ statements of a function on tiles of scores, sorted by what they depend on.

Note [Levels]
    A number that depends on neither query nor key is computed once for a tile; one that depends on the key
    alone, once for each of its keys; one that depends on the query alone, once for each of its queries, into
    an array. Only the rest is in the loop over the queries of a key, in which compilers make a vector of
    neighbouring queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .nodes import Load, Node, Number, all_of
from .operations import C_TYPES, cast, expression, is_written, literal
from .ranges import Ranges

__all__ = [
    "KEY",
    "OVER_QUERIES",
    "PAIR",
    "QUERY",
    "TILE",
    "Body",
    "Function",
    "contiguous_strides",
    "is_wide",
]

#: A node's level: what it depends on.
TILE, KEY, QUERY, PAIR = 0, 1, 2, 3
_LEVEL_OF_INPUT = {
    "batch": TILE,
    "head": TILE,
    "q_idx": QUERY,
    "kv_idx": KEY,
    "score": PAIR,
    "grad": PAIR,
}

_STORED = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


@dataclass(frozen=True)
class Function:
    """A function to be compiled: the nodes of its results, and what they read."""

    #: The dtype in which scores are computed, torch.float32 or float64.
    dtype: torch.dtype
    score: Node
    #: None if nothing is hidden.
    mask: Node | None
    #: The gradient of the score given that of the result. For each load whose gradient is wanted: the
    #: tensor's number, the load (in the graph of the gradients) and its gradient.
    grad_score: Node | None
    grad_loads: Sequence[tuple[int, Load, Node]]
    tensors: Sequence[torch.Tensor]
    #: The constants that are no part of the source.
    numbers: Sequence[Number]
    ranges: Ranges


#: The lines that begin the innermost loop.
OVER_QUERIES = (
    "VECTOR_LOOP",
    "for (int64_t i = 0; i < count; ++i) {",
    "const int32_t query = first_query + static_cast<int32_t>(i);",
    "(void)query;",
)


class Body:
    """The text of one function. Its statements are sorted by level, or all on the first level for a single
    score, which has its own ``batch``, ``head``, ``query`` and ``key``.
    """

    LETTERS: ClassVar[str] = "tkqp"  # the first letters of names, by level

    def __init__(self, function: Function, by_levels: bool = True):
        self.function = function
        self.by_levels = by_levels
        self.position = {id(tensor): index for index, tensor in enumerate(function.tensors)}
        self.number = {node: index for index, node in enumerate(function.numbers)}
        self.names: dict[Node, str] = {}
        self.limited: dict[tuple[Node, int, int], str] = {}
        self.count = 0
        self.levels: dict[Node, int] = {}
        self.statements: list[list[str]] = [[], [], [], []]
        #: Names of flags, by level, that say whether a load is outside its tensor.
        self.outside: list[list[str]] = [[], [], [], []]
        self.arrays: list[str] = []
        #: The statements that follow the loop over keys.
        self.behind_keys: list[str] = []
        self.ranges = function.ranges
        wide = any(is_wide(tensor) for tensor in function.tensors)
        self.index, self.index_dtype = ("int64_t", torch.int64) if wide else ("int32_t", torch.int32)

    def level(self, node: Node) -> int:
        if not self.by_levels:
            return TILE
        known = self.levels.get(node)
        if known is not None:
            return known
        for each in all_of([node], self.levels):
            found = _LEVEL_OF_INPUT.get(each.op, TILE)
            for arg in each.args:
                if isinstance(arg, Node):
                    found |= self.levels[arg]
            self.levels[each] = found
        return self.levels[node]

    def use(self, node: Node, at: int) -> str:
        """The name of a node's number, for a statement of level ``at``."""
        if node not in self.names:
            for each in all_of([node], self.names, self._needs):
                self._emit(each)
        in_array = at in (QUERY, PAIR) and self.level(node) == QUERY and node.op != "q_idx"
        return f"{self.names[node]}[i]" if in_array else self.names[node]

    def _needs(self, node: Node) -> Sequence[Any]:
        """The nodes that have to be computed before a node."""
        return node.args

    def _emit(self, node: Node) -> None:
        level = self.level(node)
        kind = C_TYPES[self.ranges.held(node)]
        fixed = {
            "batch": "batch",
            "head": "head",
            "q_idx": "query",
            "kv_idx": "key",
            "score": "score",
            "grad": "grad",
        }
        if node.op in fixed:
            self.names[node] = fixed[node.op]
            return
        self.count += 1
        name = f"{self.LETTERS[level]}{self.count}"
        if isinstance(node, Number) and is_written(node):
            text = literal(node.value, node.dtype)
        elif isinstance(node, Number):
            text = f"static_cast<{kind}>(inputs->numbers[{self.number[node]}])"
        elif isinstance(node, Load):
            text = cast(self._load(node), _value_dtype(node.dtype), node.dtype)
        else:
            text = expression(node, lambda arg: self.use(arg, level), self.ranges)
        self.names[node] = name
        if level == QUERY:
            self.arrays.append(f"{kind} {name}[kAtOnce];")
            self.statements[level].append(f"{name}[i] = {text};")
        else:
            self.statements[level].append(f"const {kind} {name} = {text};")

    def offset(self, load: Load, strides: Sequence[str], at: int) -> str:
        """The place of an element, for a statement of level ``at``."""
        tensor = self.position[id(load.tensor)]
        parts = [self._limited(index, tensor, dimension, at) for dimension, index in enumerate(load.args)]
        return " + ".join(f"{part} * {stride}" for part, stride in zip(parts, strides, strict=False)) or "0"

    def _limited(self, index: Node, tensor: int, dimension: int, at: int) -> str:
        """An index as torch understands it, or 0 if it is outside the tensor."""
        level = self.level(index)
        name = self.limited.get((index, tensor, dimension))
        if name is None:
            self.count += 1
            name = f"{self.LETTERS[level]}{self.count}"
            dtype, given = self._all_bits(index, self.use(index, level))
            size, kind = f"size{tensor}_{dimension}", C_TYPES[dtype]
            out = self.statements[level].append
            out(f"const {kind} {name}_given = {given};")
            out(f"const {kind} {name}_at = {name}_given < 0 ? {name}_given + {size} : {name}_given;")
            out(f"const bool {name}_outside = {name}_at < 0 || {name}_at >= {size};")
            self.outside[level].append(f"{name}_outside")
            inside = f"{name}_outside ? 0 : {cast(f'{name}_at', dtype, self.index_dtype)}"
            if level == QUERY:
                self.arrays.append(f"{self.index} {name}[kAtOnce];")
                out(f"{name}[i] = {inside};")
            else:
                out(f"const {self.index} {name} = {inside};")
            self.limited[index, tensor, dimension] = name
        return f"{name}[i]" if level == QUERY and at in (QUERY, PAIR) else name

    def _all_bits(self, index: Node, text: str) -> tuple[torch.dtype, str]:
        """An index in a dtype that has all of its bits and can count the elements."""
        held = self.ranges.held(index)
        dtype = torch.int64 if held == torch.int64 else self.index_dtype
        return dtype, cast(text, held, dtype)

    def _load(self, load: Load) -> str:
        tensor = self.position[id(load.tensor)]
        strides = [f"stride{tensor}_{dimension}" for dimension in range(len(load.args))]
        return f"data{tensor}[{self.offset(load, strides, self.level(load))}]"

    def beginning(self, *others: int) -> list[str]:
        """The statements before all loops, with places and sizes of the tensors that are read and of
        ``others``.
        """
        lines = ["(void)batch, (void)head, (void)inputs;"]
        read = {self.position[id(node.tensor)] for node in self.names if isinstance(node, Load)}
        for number in sorted(read.union(others)):
            tensor = self.function.tensors[number]
            stored = _STORED.get(tensor.dtype, C_TYPES[tensor.dtype])
            lines.append(
                f"const auto* const data{number} = "
                f"static_cast<const {stored}*>(inputs->tensors[{number}].data);"
            )
            for dimension in range(tensor.dim()):
                for what in ("size", "stride"):
                    lines.append(
                        f"const {self.index} {what}{number}_{dimension} = "
                        f"static_cast<{self.index}>(inputs->tensors[{number}].{what}[{dimension}]);"
                    )
        return [*lines, *self.statements[TILE]]

    def flags(self) -> list[str]:
        """The flags that say whether a load of a score is outside its tensor."""
        of_query = self.outside[QUERY]
        if of_query:
            name = f"{self.LETTERS[QUERY]}_outside"
            self.arrays.append(f"bool {name}[kAtOnce];")
            self.statements[QUERY].append(f"{name}[i] = {' | '.join(of_query)};")
            of_query = [f"{name}[i]"]
        return [*self.outside[PAIR], *of_query, *self.outside[KEY], *self.outside[TILE]]

    def queries_at_once(self) -> list[str]:
        """The lines that begin the loop over parts of the tile's queries."""
        return [
            "for (int64_t first = 0; first < tile->queries; first += kAtOnce) {",
            "const int64_t count = tile->queries - first < kAtOnce ? tile->queries - first : kAtOnce;",
            "const int32_t first_query = static_cast<int32_t>(tile->first_query + first);",
            "(void)first_query;",
        ]

    def loop_over_queries(self) -> list[str]:
        """The loop that computes all that depends on queries alone."""
        return [*OVER_QUERIES, *self.statements[QUERY], "}"] if self.statements[QUERY] else []

    def loop_over_keys(self) -> list[str]:
        """The lines that begin the loop over the tile's keys; statements on keys alone come next."""
        return [
            "for (int64_t j = 0; j < tile->keys; ++j) {",
            "const int32_t key = static_cast<int32_t>(tile->first_key + j);",
            "(void)key;",
            "const int64_t row = j * tile->stride + first;",
        ]


def contiguous_strides(function: Function, tensor: int) -> list[str]:
    """The strides of a contiguous gradient of that tensor, as expressions of its sizes."""
    dims = range(function.tensors[tensor].dim())
    return [" * ".join(["1", *(f"size{tensor}_{behind}" for behind in dims[dim + 1 :])]) for dim in dims]


def is_wide(tensor: torch.Tensor) -> bool:
    """Whether places of its elements, or of those of its gradient, which is contiguous, take 64 bits."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return max(reach, tensor.numel()) >= 2**31


def _value_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _STORED else dtype
