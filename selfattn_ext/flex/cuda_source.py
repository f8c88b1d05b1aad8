"""Writes recorded operations as the two headers that CUDA's kernels are compiled with.

See Note [Functions in kernels] in csrc/cuda/function/function_tile.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .nodes import Load, Node, UnsupportedFunctionError
from .operations import C_TYPES, cast
from .statements import Body, Function, contiguous_strides

__all__ = ["Headers", "headers_of", "most_dims"]

#: The bytes that arguments of functions may take of a kernel's parameters. These have 4,096 bytes on older
#: devices, and the call's own numbers come first.
_MOST_BYTES = 2048


class Headers(NamedTuple):
    """The texts of the two headers: the arguments of the function, and the function."""

    arguments: str
    function: str


def most_dims(function: Function) -> int:
    """The most dimensions of a captured tensor, at least 1."""
    return max([1, *(tensor.dim() for tensor in function.tensors)])


def headers_of(function: Function) -> Headers:
    """Both headers.

    Raises:
        UnsupportedFunctionError: it reads more tensors than a kernel can be told of.
    """
    dims, tensors, numbers = most_dims(function), len(function.tensors), len(function.numbers)
    if tensors * (8 + 16 * dims) + 8 * numbers > _MOST_BYTES:
        raise UnsupportedFunctionError(
            f"it reads {tensors} tensors and {numbers} numbers, more than a kernel of CUDA takes"
        )
    arguments = _ARGUMENTS.format(dims=dims, tensors=max(tensors, 1), numbers=max(numbers, 1))
    shown = _scores(function, "shown", None)
    modified = _scores(function, "masked", function.mask) if function.mask is not None else ""
    gradient = function.grad_score
    text = _FUNCTION.format(
        kind=C_TYPES[function.dtype],
        scores="\n\n".join(filter(None, [shown, modified])),
        chosen=f"full ? shown{_GIVEN} : masked{_GIVEN}" if modified else f"shown{_GIVEN}",
        gradient=_gradient(function, gradient) if gradient is not None else "return grad;",
        loads=len(function.grad_loads),
        parts="\n".join(
            _captured_part(function, number, *load) for number, load in enumerate(function.grad_loads)
        ),
    )
    return Headers(arguments, text)


_GIVEN = "(inputs, batch, head, query, key, score)"


def _scores(function: Function, name: str, mask: Node | None) -> str:
    """The C++ function from a score to the score to be used. A score that reads outside a tensor becomes NaN
    unless it is hidden, because a kernel cannot raise an error.
    """
    body, kind = Body(function, by_levels=False), C_TYPES[function.dtype]
    result = cast(body.use(function.score, 0), function.score.dtype, function.dtype)
    lines = [f"const {kind} result = {result};"]
    if mask is not None:
        lines = [
            f"const bool visible = {cast(body.use(mask, 0), mask.dtype, torch.bool)};",
            f"const {kind} result = visible ? {result} : hidden;",
        ]
    if body.outside[0]:
        nan = f"std::numeric_limits<{kind}>::quiet_NaN()"
        lines.append(f"return ({' | '.join(body.outside[0])}) && result != hidden ? {nan} : result;")
    else:
        lines.append("return result;")
    head = f"inline {kind} {name}(const FunctionArguments* inputs, {_PLACE}, {kind} score) {{"
    return "\n".join([head, _UNUSED, *body.beginning(), *lines, "}"])


def _gradient(function: Function, grad_score: Node) -> str:
    body = Body(function, by_levels=False)
    result = cast(body.use(grad_score, 0), grad_score.dtype, function.dtype)
    return "\n".join([_UNUSED, *body.beginning(), f"return grad == 0 ? 0 : {result};"])


def _captured_part(function: Function, number: int, tensor: int, load: Load, gradient: Node) -> str:
    """A case of the switch: the place of an element in its tensor, and its gradient."""
    body = Body(function, by_levels=False)
    value = cast(body.use(gradient, 0), gradient.dtype, function.dtype)
    place = body.offset(load, contiguous_strides(function, tensor), 0)
    outside = f"{' | '.join(body.outside[0])} ? -1 : " if body.outside[0] else ""
    lines = [*body.beginning(tensor), f"return {{{tensor}, {outside}{place}, {value}}};"]
    return "\n".join([f"case {number}: {{", *lines, "}"])


_PLACE = "int32_t batch, int32_t head, int32_t query, int32_t key"
_UNUSED = "(void)query, (void)key, (void)score;"

_ARGUMENTS = """// Written by selfattn_ext.flex from a Python function.
#pragma once

#include <cstdint>

namespace selfattn {{

struct FunctionArguments {{
  struct {{
    const void* data;
    int64_t size[{dims}], stride[{dims}];
  }} tensors[{tensors}];
  double numbers[{numbers}];
}};

}}  // namespace selfattn
"""

_FUNCTION = """// Written by selfattn_ext.flex from a Python function.
#pragma once

namespace selfattn::score_function {{

constexpr {kind} hidden = -std::numeric_limits<{kind}>::infinity();

{scores}

inline {kind} modified(const FunctionArguments& arguments, bool full, int32_t batch, int32_t head,
                       int32_t query, int32_t key, {kind} score) {{
const FunctionArguments* const inputs = &arguments;
(void)full;
return {chosen};
}}

inline {kind} gradient(const FunctionArguments& arguments, int32_t batch, int32_t head, int32_t query,
                       int32_t key, {kind} score, {kind} grad) {{
const FunctionArguments* const inputs = &arguments;
{gradient}
}}

constexpr int captured_loads = {loads};

inline CapturedPart<{kind}> captured_part(const FunctionArguments& arguments, int load, int32_t batch,
                                          int32_t head, int32_t query, int32_t key, {kind} score,
                                          {kind} grad) {{
const FunctionArguments* const inputs = &arguments;
(void)batch, (void)head, (void)query, (void)key, (void)score, (void)grad, (void)inputs;
switch (load) {{
{parts}
default: return {{0, -1, 0}};
}}
}}

}}  // namespace selfattn::score_function
"""
