"""Writes recorded operations as the C++ source of a function on tiles of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .nodes import Load, Node, Number, all_of
from .operations import C_TYPES, cast
from .statements import KEY, OVER_QUERIES, PAIR, QUERY, TILE, Body, Function, contiguous_strides, is_wide
from .straight import StraightBody

__all__ = ["kinds_of", "source_of"]

_POSITION = (
    "const int32_t batch = static_cast<int32_t>(tile->batch), head = static_cast<int32_t>(tile->head);"
)


def _both(function: Function, inner: Callable[[Body], list[str] | None], *read: int) -> list[str]:
    """The loops with the statements of ``inner`` inside, in a form for runs of memory, if there are any, and
    in a form for all other loads.

    ``inner`` makes the statements of a body, or None if runs do not help; ``read`` are tensors whose sizes it
    needs.
    """
    body, straight = Body(function), StraightBody(function)
    statements, of_runs = inner(body), inner(straight)
    assert statements is not None
    has_runs = of_runs is not None and bool(straight.conditions)
    bodies = [body, straight] if has_runs else [body]
    lines = [*body.beginning(*read)]
    for each in bodies[1:]:
        lines += each.statements[TILE]
    lines.append("int32_t outside_any = 0;")
    lines += body.queries_at_once()
    for each in bodies:
        lines += [*each.arrays, *each.loop_over_queries()]
    lines += body.loop_over_keys()
    if of_runs is not None and has_runs:
        conditions = " && ".join(dict.fromkeys(straight.conditions))
        lines += ["{", *straight.statements[KEY], f"if ({conditions}) {{", *of_runs, "continue;", "}", "}"]
    lines += [*body.statements[KEY], *statements, "}", *body.behind_keys, "}"]
    return lines


def _text(function: Function, name: str, results: dict[str, Node], ending: list[str], arguments: str) -> str:
    """The text of a function. ``results`` are names that ``ending``, the end of the innermost loop, uses."""

    def inner(body: Body) -> list[str]:
        known = [f"const auto {key} = {body.use(node, PAIR)};" for key, node in results.items()]
        flags = [] if name == "differentiate" else body.flags()
        lines = [*OVER_QUERIES, *ending[:1], *body.statements[PAIR], *known, *ending[1:]]
        if flags:
            lines += [
                f"const bool outside = ({' | '.join(flags)}) & (*at != hidden);",
                "*at = outside ? outside_tensor : *at;",
                "outside_any |= static_cast<int32_t>(outside);",
            ]
        return [*lines, "}"]

    lines = [
        f"void {name}({arguments}) {{",
        _POSITION,
        *_both(function, inner),
        "if (outside_any != 0) __atomic_store_n(inputs->out_of_range, 1, __ATOMIC_RELAXED);",
        "}",
    ]
    return "\n".join(lines)


_ARGUMENTS = "const FunctionInputs* inputs, const ScoreTile* tile"


#: The sources of functions, by :func:`_key`.
_known: dict[Any, str] = {}
_MOST_KNOWN = 256


def source_of(function: Function) -> str:
    """The source of a library with a ScoreFunctionTable.

    A function is recorded anew for each call, and writing its source would take longer than that.
    """
    key = _key(function)
    source = _known.get(key)
    if source is None:
        if len(_known) >= _MOST_KNOWN:  # more, where threads have added at once
            _known.clear()
        source = _known[key] = _written(function)
    return source


def _key(function: Function) -> Any:
    """All that the source of a function depends on."""
    of_gradients = [node for _, *nodes in function.grad_loads for node in nodes]
    roots = [function.score, function.mask, function.grad_score, *of_gradients]
    tensors = {id(tensor): index for index, tensor in enumerate(function.tensors)}
    places: dict[Any, int] = {None: -1}
    nodes: list[Any] = []
    for node in all_of(roots):
        places[node] = len(nodes)
        args = tuple(places[arg] if isinstance(arg, Node) else repr(arg) for arg in node.args)
        own: Any = None
        if isinstance(node, Number):
            own = (repr(node.value), node.is_tensor)
        elif isinstance(node, Load):
            own = tensors[id(node.tensor)]
        nodes.append((node.op, args, node.dtype, node.common, repr(node.kwargs), own))
    ends = [places[root] for root in roots]
    of_tensors = [tensor for tensor, *_ in function.grad_loads]
    largest = function.ranges.largest.values()
    return function.dtype, *nodes, *ends, *of_tensors, kinds_of(function), *largest


def _written(function: Function) -> str:
    kind = C_TYPES[function.dtype]
    scores = f"{_ARGUMENTS}, void* data"
    read = f"{kind}* const at = static_cast<{kind}*>(data) + row + i; const {kind} score = *at; (void)score;"
    result = cast("result", function.score.dtype, function.dtype)
    parts: list[str] = []
    entries = dict.fromkeys(("apply", "apply_unmasked", "differentiate", "add_captured"), "nullptr")
    if function.score.op != "score":
        entries["apply"] = entries["apply_unmasked"] = "apply_unmasked"
        ending = [read, f"*at = {result};"]
        parts.append(_text(function, "apply_unmasked", {"result": function.score}, ending, scores))
    if function.mask is not None:
        entries["apply"] = "apply"
        visible = cast("visible", function.mask.dtype, torch.bool)
        ending = [read, f"*at = {visible} ? {result} : hidden;"]
        named = {"visible": function.mask, "result": function.score}
        parts.append(_text(function, "apply", named, ending, scores))
    raw = f"const {kind} score = static_cast<const {kind}*>(before)[row + i]; (void)score;"
    if function.grad_score is not None and function.grad_score.op != "grad":
        entries["differentiate"] = "differentiate"
        ending = [
            f"{kind}* const at = static_cast<{kind}*>(gradient) + row + i; const {kind} grad = *at; {raw}",
            f"*at = grad == 0 ? 0 : {cast('result', function.grad_score.dtype, function.dtype)};",
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
    """The dtypes and dimensions of the captured tensors, in the form of ScoreFunctionTable."""
    return " ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.dim()}]{'(wide)' if is_wide(tensor) else ''}"
        for tensor in function.tensors
    )


def _captured_text(function: Function, index: int, tensor: int, load: Load, gradient: Node) -> str:
    """The function that adds the gradient of one load.

    If neighbouring queries read one element, it has partial sums for them, so that no chain of additions is
    as long as the tile.
    """
    kind = C_TYPES[function.dtype]
    strides = contiguous_strides(function, tensor)

    def loop(body: Body, add: str) -> list[str]:
        value = cast(body.use(gradient, PAIR), gradient.dtype, torch.float64)
        return [
            *OVER_QUERIES,
            f"const {kind} score = static_cast<const {kind}*>(before)[row + i]; (void)score;",
            f"const {kind} grad = static_cast<const {kind}*>(gradient)[row + i];",
            *body.statements[PAIR],
            f"const double added = grad == 0 ? 0.0 : {value};",
            add,
            "}",
        ]

    def inner(body: Body) -> list[str] | None:
        level = body.level(load)
        if isinstance(body, StraightBody):
            run = body.run_of_last_dimension(load)
            return None if run is None else loop(body, f"{body.element(load, run, 'to', strides)} += added;")
        body.use(gradient, PAIR)
        place = f"const {body.index} place_at = {body.offset(load, strides, level)};"
        if level == PAIR:
            body.statements[PAIR] += [place, "places[i] = place_at;"]
            return [
                f"{body.index} places[kAtOnce];",
                "double partial[kAtOnce];",
                *loop(body, "partial[i] = added;"),
                "for (int64_t i = 0; i < count; ++i) to[places[i]] += partial[i];",
            ]
        if level == QUERY:
            body.arrays.append(f"{body.index} places[kAtOnce];")
            body.statements[QUERY] += [place, "places[i] = place_at;"]
            body.arrays.append("double partial[kAtOnce] = {};")
            body.behind_keys.append("for (int64_t i = 0; i < count; ++i) to[places[i]] += partial[i];")
            return loop(body, "partial[i] += added;")
        body.statements[level].append(place)
        if level == KEY:
            return [
                "double partial[kAtOnce] = {};",
                *loop(body, "partial[i] += added;"),
                "to[place_at] += sum_of(partial, count);",
            ]
        body.arrays.append("double partial[kAtOnce] = {};")
        body.behind_keys.append("to[place_at] += sum_of(partial, count);")
        return loop(body, "partial[i] += added;")

    lines = [
        f"void add_captured_{index}({_ARGUMENTS}, const void* before, const void* gradient,",
        "                    double* const* sums) {",
        f"double* const to = sums[{tensor}];",
        "if (to == nullptr) return;",
        _POSITION,
        *_both(function, inner, tensor),
        "}",
    ]
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
const {kind} outside_tensor = bits_of<{kind}>(beside_bits({kind}()));

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
