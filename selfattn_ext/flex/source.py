"""From recorded operations to the C++ source of a function on tiles of scores.

Note [Levels]
    What depends on neither query nor key is computed once for a tile; what depends on the key alone, once for
    each of its keys; what depends on the query alone, once for each of its queries, into an array. Only the
    rest is in the loop over the queries of a key, in which compilers make a vector of neighbouring queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .operations import C_TYPES, cast, expression
from .recorder import Load, Node, Number

__all__ = ["Body", "Function", "kinds_of", "source_of"]

#: A node's level: what it depends on.
_TILE, _KEY, _QUERY, _PAIR = 0, 1, 2, 3
_LEVEL_OF_INPUT = {
    "batch": _TILE,
    "head": _TILE,
    "q_idx": _QUERY,
    "kv_idx": _KEY,
    "score": _PAIR,
    "grad": _PAIR,
}

_STORED = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


@dataclass(frozen=True)
class Function:
    """What is compiled: nodes of the results, and what they read."""

    #: torch.float32 or float64: what scores are computed in.
    dtype: torch.dtype
    score: Node
    #: None where nothing is hidden.
    mask: Node | None
    #: The gradient of the score given that of the result, and for each load whose gradient is wanted the
    #: tensor's number, the load (in the graph of the gradients) and its gradient.
    grad_score: Node | None
    grad_loads: Sequence[tuple[int, Load, Node]]
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[Number]


_POSITION = (
    "const int32_t batch = static_cast<int32_t>(tile->batch), head = static_cast<int32_t>(tile->head);"
)
#: Begins the innermost loop.
_OVER_QUERIES = (
    "VECTOR_LOOP",
    "for (int64_t i = 0; i < count; ++i) {",
    "const int32_t query = first_query + static_cast<int32_t>(i);",
    "(void)query;",
)


class Body:
    """The text of one function; statements by level, or all of them on the first, where ``batch``, ``head``,
    ``query`` and ``key`` are those of a single score.
    """

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
        #: Names of flags, by level, that say whether a load is beside its tensor.
        self.beside: list[list[str]] = [[], [], [], []]
        self.arrays: list[str] = []
        index_bits = 64 if any(_extent(tensor) >= 2**31 for tensor in function.tensors) else 32
        self.index = f"int{index_bits}_t"

    def level(self, node: Node) -> int:
        if not self.by_levels:
            return _TILE
        found = self.levels.get(node)
        if found is None:
            found = _LEVEL_OF_INPUT.get(node.op, _TILE) if isinstance(node.op, str) else _TILE
            for arg in node.args:
                if isinstance(arg, Node):
                    found |= self.level(arg)
            self.levels[node] = found
        return found

    def use(self, node: Node, at: int) -> str:
        """The name of what a node computes, for a statement of level ``at``."""
        name = self.names.get(node)
        if name is None:
            name = self._emit(node)
        in_array = at in (_QUERY, _PAIR) and self.level(node) == _QUERY and node.op != "q_idx"
        return f"{name}[i]" if in_array else name

    def _emit(self, node: Node) -> str:
        level = self.level(node)
        kind = C_TYPES[node.dtype]
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
            return self.names[node]
        self.count += 1
        name = f"{'tkqp'[level]}{self.count}"
        if isinstance(node, Number):
            text = f"static_cast<{kind}>(inputs->numbers[{self.number[node]}])"
        elif isinstance(node, Load):
            text = cast(self._load(node), _value_dtype(node.dtype), node.dtype)
        else:
            text = expression(node, lambda arg: self.use(arg, level))
        self.names[node] = name
        if level == _QUERY:
            self.arrays.append(f"{kind} {name}[kAtOnce];")
            self.statements[level].append(f"{name}[i] = {text};")
        else:
            self.statements[level].append(f"const {kind} {name} = {text};")
        return name

    def offset(self, load: Load, strides: Sequence[str], at: int) -> str:
        """The place of an element, for a statement of level ``at``."""
        tensor = self.position[id(load.tensor)]
        parts = [self._limited(index, tensor, dimension, at) for dimension, index in enumerate(load.args)]
        return " + ".join(f"{part} * {stride}" for part, stride in zip(parts, strides, strict=False)) or "0"

    def _limited(self, index: Node, tensor: int, dimension: int, at: int) -> str:
        """An index as torch understands it, 0 where it is beside the tensor."""
        level = self.level(index)
        name = self.limited.get((index, tensor, dimension))
        if name is None:
            self.count += 1
            name = f"{'tkqp'[level]}{self.count}"
            given = cast(
                self.use(index, level), index.dtype, torch.int64 if self.index == "int64_t" else torch.int32
            )
            size = f"size{tensor}_{dimension}"
            out = self.statements[level].append
            out(f"const {self.index} {name}_given = {given};")
            out(f"const {self.index} {name}_at = {name}_given < 0 ? {name}_given + {size} : {name}_given;")
            out(f"const bool {name}_beside = {name}_at < 0 || {name}_at >= {size};")
            self.beside[level].append(f"{name}_beside")
            if level == _QUERY:
                self.arrays.append(f"{self.index} {name}[kAtOnce];")
                out(f"{name}[i] = {name}_beside ? 0 : {name}_at;")
            else:
                out(f"const {self.index} {name} = {name}_beside ? 0 : {name}_at;")
            self.limited[index, tensor, dimension] = name
        return f"{name}[i]" if level == _QUERY and at in (_QUERY, _PAIR) else name

    def _load(self, load: Load) -> str:
        tensor = self.position[id(load.tensor)]
        strides = [f"stride{tensor}_{dimension}" for dimension in range(len(load.args))]
        return f"data{tensor}[{self.offset(load, strides, self.level(load))}]"

    def beginning(self, *others: int) -> list[str]:
        """What comes before all loops, with what is known of the tensors that are read, and of ``others``."""
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
        return [*lines, *self.statements[_TILE]]

    def queries_at_once(self) -> list[str]:
        """Begins the loop over parts of the tile's queries."""
        return [
            "for (int64_t first = 0; first < tile->queries; first += kAtOnce) {",
            "const int64_t count = tile->queries - first < kAtOnce ? tile->queries - first : kAtOnce;",
            "const int32_t first_query = static_cast<int32_t>(tile->first_query + first);",
            "(void)first_query;",
            *self.arrays,
        ]

    def loop_over_queries(self) -> list[str]:
        """All that depends on queries alone."""
        return [*_OVER_QUERIES, *self.statements[_QUERY], "}"] if self.statements[_QUERY] else []

    def loop_over_keys(self) -> list[str]:
        """Begins the loop over the tile's keys."""
        return [
            "for (int64_t j = 0; j < tile->keys; ++j) {",
            "const int32_t key = static_cast<int32_t>(tile->first_key + j);",
            "(void)key;",
            *self.statements[_KEY],
            "const int64_t row = j * tile->stride + first;",
        ]


def _extent(tensor: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _value_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _STORED else dtype


def _text(function: Function, name: str, results: dict[str, Node], ending: list[str], arguments: str) -> str:
    """One of the functions. ``results`` are names that ``ending``, the end of the innermost loop, uses."""
    body = Body(function)
    known = [f"const auto {key} = {body.use(node, _PAIR)};" for key, node in results.items()]
    beside = [body.beside[level] for level in range(4)]
    if beside[_QUERY]:
        body.arrays.append("bool beside_query[kAtOnce];")
        body.statements[_QUERY].append(f"beside_query[i] = {' | '.join(beside[_QUERY])};")
    flags = [*beside[_PAIR], *(["beside_query[i]"] if beside[_QUERY] else []), *beside[_KEY], *beside[_TILE]]
    lines = [
        f"void {name}({arguments}) {{",
        _POSITION,
        *body.beginning(),
        "int32_t beside_any = 0;",
        *body.queries_at_once(),
    ]
    lines += body.loop_over_queries()
    lines += [
        *body.loop_over_keys(),
        *_OVER_QUERIES,
        *ending[:1],
        *body.statements[_PAIR],
        *known,
        *ending[1:],
    ]
    if flags:
        lines.append(f"beside_any |= static_cast<int32_t>(({' | '.join(flags)}) & seen);")
    lines += [
        "}",
        "}",
        "}",
        "if (beside_any != 0) __atomic_store_n(inputs->out_of_range, 1, __ATOMIC_RELAXED);",
        "}",
    ]
    return "\n".join(lines)


_ARGUMENTS = "const FunctionInputs* inputs, const ScoreTile* tile"


def source_of(function: Function) -> str:
    """The source of a library with a ScoreFunctionTable."""
    kind = C_TYPES[function.dtype]
    scores = f"{_ARGUMENTS}, void* data"
    read = f"{kind}* const at = static_cast<{kind}*>(data) + row + i; const {kind} score = *at; (void)score;"
    result = cast("result", function.score.dtype, function.dtype)
    seen = "const bool seen = *at != hidden; (void)seen;"
    parts: list[str] = []
    entries = dict.fromkeys(("apply", "apply_unmasked", "differentiate", "add_captured"), "nullptr")
    if function.score.op != "score":
        entries["apply"] = entries["apply_unmasked"] = "apply_unmasked"
        ending = [read, f"*at = {result};", seen]
        parts.append(_text(function, "apply_unmasked", {"result": function.score}, ending, scores))
    if function.mask is not None:
        entries["apply"] = "apply"
        visible = cast("visible", function.mask.dtype, torch.bool)
        ending = [read, f"*at = {visible} ? {result} : hidden;", seen]
        named = {"visible": function.mask, "result": function.score}
        parts.append(_text(function, "apply", named, ending, scores))
    raw = f"const {kind} score = static_cast<const {kind}*>(before)[row + i]; (void)score;"
    if function.grad_score is not None and function.grad_score.op != "grad":
        entries["differentiate"] = "differentiate"
        ending = [
            f"{kind}* const at = static_cast<{kind}*>(gradient) + row + i; const {kind} grad = *at; {raw}",
            f"*at = grad == 0 ? 0 : {cast('result', function.grad_score.dtype, function.dtype)};",
            "const bool seen = false; (void)seen;",
        ]
        arguments = f"{_ARGUMENTS}, const void* before, void* gradient"
        parts.append(_text(function, "differentiate", {"result": function.grad_score}, ending, arguments))
    if function.grad_loads:
        entries["add_captured"] = "add_captured"
        parts += [
            _captured_text(function, index, *wanted) for index, wanted in enumerate(function.grad_loads)
        ]
        calls = (
            f"add_captured_{index}(inputs, tile, before, gradient, sums);"
            for index in range(len(function.grad_loads))
        )
        arguments = f"{_ARGUMENTS}, const void* before, const void* gradient, double* const* sums"
        parts.append("\n".join([f"void add_captured({arguments}) {{", *calls, "}"]))
    table = [
        str(function.dtype.itemsize),
        f'"{kinds_of(function)}"',
        str(len(function.numbers)),
        *entries.values(),
    ]
    return _FRAME.format(parts="\n\n".join(parts), kind=kind, table=", ".join(table))


def kinds_of(function: Function) -> str:
    """Of the captured tensors, as ScoreFunctionTable has them."""
    return " ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.dim()}]" for tensor in function.tensors
    )


def _captured_text(function: Function, index: int, tensor: int, load: Load, gradient: Node) -> str:
    """The function that adds the gradient of one load.

    Where neighbouring queries read one element, there are partial sums for them, so that no chain of
    additions is as long as the tile.
    """
    kind = C_TYPES[function.dtype]
    body = Body(function)
    level = body.level(load)
    sizes = function.tensors[tensor].shape
    behind = (range(dimension + 1, len(sizes)) for dimension in range(len(sizes)))
    strides = [" * ".join(["1", *(f"size{tensor}_{d}" for d in of)]) for of in behind]
    place = body.offset(load, strides, level)
    value = body.use(gradient, _PAIR)
    value = cast(value, gradient.dtype, torch.float64)
    lines = [
        f"void add_captured_{index}({_ARGUMENTS}, const void* before, const void* gradient,",
        "                    double* const* sums) {",
        f"double* const to = sums[{tensor}];",
        "if (to == nullptr) return;",
        _POSITION,
        *body.beginning(tensor),
    ]
    offset_line = f"const {body.index} place_at = {place};"
    if level == _TILE:
        lines.append(offset_line)
    lines += [
        *body.queries_at_once(),
    ]
    if level in (_TILE, _QUERY):
        lines.append("double partial[kAtOnce] = {};")
    if level == _QUERY:
        lines.append(f"{body.index} places[kAtOnce];")
        body.statements[_QUERY] += [offset_line, "places[i] = place_at;"]
    lines += body.loop_over_queries()
    lines += [
        *body.loop_over_keys(),
    ]
    if level == _KEY:
        lines += [offset_line, "double partial[kAtOnce] = {};"]
    if level == _PAIR:
        lines += [f"{body.index} places[kAtOnce];", "double partial[kAtOnce];"]
        body.statements[_PAIR] += [offset_line, "places[i] = place_at;"]
    lines += [
        *_OVER_QUERIES,
        f"const {kind} score = static_cast<const {kind}*>(before)[row + i]; (void)score;",
        f"const {kind} grad = static_cast<const {kind}*>(gradient)[row + i];",
        *body.statements[_PAIR],
        f"const double added = grad == 0 ? 0.0 : {value};",
        f"partial[i] {'=' if level == _PAIR else '+='} added;",
        "}",
    ]
    if level == _PAIR:
        lines += ["for (int64_t i = 0; i < count; ++i) to[places[i]] += partial[i];", "}"]
    elif level == _KEY:
        lines += ["to[place_at] += sum_of(partial, count);", "}"]
    elif level == _QUERY:
        lines += ["}", "for (int64_t i = 0; i < count; ++i) to[places[i]] += partial[i];"]
    else:
        lines += ["}", "to[place_at] += sum_of(partial, count);"]
    lines += ["}", "}"]
    return "\n".join(lines)


_FRAME = """// Written by selfattn_ext.flex from a Python function.
#include "core/score_function.h"
#include "core/score_function_math.h"

// Each turn of such a loop is independent of the others.
#if defined(__clang__)
#define VECTOR_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define VECTOR_LOOP _Pragma("GCC ivdep")
#endif

using namespace selfattn;
using namespace selfattn::score_function;

namespace {{

constexpr int64_t kAtOnce = 64;
constexpr {kind} hidden = -std::numeric_limits<{kind}>::infinity();

[[maybe_unused]] double sum_of(const double* numbers, int64_t count) {{
  double sums[4] = {{}};
  for (int64_t i = 0; i < count; ++i) sums[i % 4] += numbers[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}}

{parts}

}}  // namespace

extern "C" __attribute__((visibility("default"))) const ScoreFunctionTable selfattn_score_function_table;
const ScoreFunctionTable selfattn_score_function_table = {{{table}}};
"""
