"""The operations of torch on single numbers, as expressions of C++.

Functions that are not C++'s own are in csrc/core/score_function_math.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .recorder import Node, Number, UnsupportedFunctionError

__all__ = ["C_TYPES", "STANDARD", "cast", "expression", "is_known"]

#: What a number of a dtype is computed as. Those of 16 bits are rounded after each operation.
C_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
_ROUNDING = {torch.bfloat16: "round_to_bfloat16", torch.float16: "round_to_float16"}

_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "&", "logical_or": "|", "logical_xor": "!="}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_BITS |= {"bitwise_left_shift": "<<", "bitwise_right_shift": ">>"}
#: Functions of C++.
STANDARD = {
    *(
        "sqrt",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
    ),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "hypot", "copysign"),
}
#: Functions of score_function_math.h.
_OWN = {
    *(
        "abs",
        "neg",
        "sign",
        "sgn",
        "relu",
        "minimum",
        "maximum",
        "floor",
        "ceil",
        "trunc",
        "round",
        "square",
        "exp",
    ),
    *(
        "tanh",
        "sigmoid",
        "rsqrt",
        "reciprocal",
        "floor_divide",
        "remainder",
        "fmod",
        "tanh_backward",
        "fmin",
        "fmax",
    ),
    *("sigmoid_backward", "frac"),
}
_OTHERS = {
    *(
        "rsub",
        "div",
        "pow",
        "where",
        "clamp",
        "clamp_min",
        "clamp_max",
        "_to_copy",
        "logical_not",
        "bitwise_not",
    ),
    *("isnan", "isinf", "masked_fill", "threshold_backward", "lerp", "addcmul", "addcdiv", "fill", "copy"),
}


def is_known(name: str) -> bool:
    """Whether :func:`expression` takes an operation."""
    return (
        name in _INFIX
        or name in _COMPARISONS
        or name in _LOGIC
        or name in _BITS
        or name in STANDARD | _OWN | _OTHERS
    )


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A number of one dtype as one of another."""
    if C_TYPES[source] == C_TYPES[target]:
        converted = text
    elif target == torch.bool:
        converted = f"({text} != 0)"
    else:
        converted = f"static_cast<{C_TYPES[target]}>({text})"
    rounding = _ROUNDING.get(target)
    return f"{rounding}({converted})" if rounding and source not in (target, torch.bool) else converted


def expression(node: Node, text_of: Callable[[Node], str]) -> str:
    """What a node computes, rounded to its dtype; ``text_of`` names what it computes it from."""
    result = _expression(node.op, node, text_of)
    rounding = _ROUNDING.get(node.dtype)
    return f"{rounding}({result})" if rounding else result


def _expression(name: str, node: Node, text_of: Callable[[Node], str]) -> str:
    def operand(index: int, dtype: torch.dtype = node.dtype) -> str:
        arg = node.args[index]
        return cast(text_of(arg), arg.dtype, dtype)

    def operands(dtype: torch.dtype = node.dtype) -> list[str]:
        return [cast(text_of(arg), arg.dtype, dtype) for arg in node.args if isinstance(arg, Node)]

    common = node.common or node.dtype
    if name in _INFIX:
        alpha = node.kwargs.get("alpha", 1)
        left, right = operands()
        if alpha != 1:
            right = f"{literal(alpha, node.dtype)} * {right}"
        return f"{left} {_INFIX[name]} {right}"
    if name == "rsub":
        alpha = node.kwargs.get("alpha", 1) if len(node.args) < 3 else node.args[2].value
        factor = "" if alpha == 1 else f"{literal(alpha, node.dtype)} * "
        return f"{operand(1)} - {factor}{operand(0)}"
    if name in _COMPARISONS:
        left, right = operands(common)
        return f"{left} {_COMPARISONS[name]} {right}"
    if name in _LOGIC:
        left, right = operands(torch.bool)
        return f"{left} {_LOGIC[name]} {right}"
    if name in _BITS:
        left, right = operands()
        return cast(f"({left} {_BITS[name]} {right})", torch.int32, node.dtype)
    if name in ("logical_not", "isnan", "isinf"):
        test = {"logical_not": "{} == 0", "isnan": "{0} != {0}", "isinf": "is_infinite({})"}[name]
        return test.format(operand(0, node.args[0].dtype))
    if name == "bitwise_not":
        return f"!{operand(0)}" if node.dtype == torch.bool else f"~{operand(0)}"
    if name == "div":
        mode = node.kwargs.get("rounding_mode")
        if mode is None:
            return f"{operand(0)} / {operand(1)}"
        return f"{'floor_divide' if mode == 'floor' else 'truncate_divide'}({operand(0)}, {operand(1)})"
    if name == "pow":
        return _power(node, operand)
    if name == "where":
        return f"{operand(0, torch.bool)} ? {operand(1)} : {operand(2)}"
    if name == "masked_fill":
        return f"{operand(1, torch.bool)} ? {operand(2)} : {operand(0)}"
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamped(name, node, operand)
    if name in ("_to_copy", "fill", "copy"):
        return operand(0 if name == "_to_copy" else 1)
    if name == "threshold_backward":
        return f"{operand(1)} <= {operand(2)} ? 0 : {operand(0)}"
    if name == "lerp":
        return f"{operand(0)} + {operand(2)} * ({operand(1)} - {operand(0)})"
    if name in ("addcmul", "addcdiv"):
        factor = literal(node.kwargs.get("value", 1), node.dtype)
        return f"{operand(0)} + {factor} * ({operand(1)} {'*' if name == 'addcmul' else '/'} {operand(2)})"
    if name in STANDARD:
        return f"std::{name}({', '.join(operands())})"
    if name in _OWN:
        if name == "round" and node.kwargs.get("decimals"):
            raise UnsupportedFunctionError("it rounds to decimals")
        return f"{name}_of({', '.join(operands())})"
    raise UnsupportedFunctionError(f"it uses {name}")


def _power(node: Node, operand: Callable[..., str]) -> str:
    exponent = node.args[1]
    if isinstance(exponent, Number):
        if exponent.value in (1, 2, 3):
            return " * ".join([operand(0)] * int(exponent.value))
        if exponent.value == 0.5:
            return f"std::sqrt({operand(0)})"
        if exponent.value == -1 and node.dtype.is_floating_point:
            return f"reciprocal_of({operand(0)})"
    return f"power_of({operand(0)}, {operand(1)})"


def _clamped(name: str, node: Node, operand: Callable[..., str]) -> str:
    bounds: Sequence[int | None]
    bounds = {"clamp_min": (1, None), "clamp_max": (None, 1)}.get(name, (1, 2))
    text = operand(0)
    for index, function in zip(bounds, ("maximum_of", "minimum_of"), strict=True):
        if index is not None and index < len(node.args) and node.args[index] is not None:
            text = f"{function}({text}, {operand(index)})"
    return text


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant of C++ with all of its digits."""
    kind = C_TYPES[dtype]
    if not dtype.is_floating_point:
        return f"static_cast<{kind}>({int(value)})"
    if math.isnan(value):
        return f"std::numeric_limits<{kind}>::quiet_NaN()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<{kind}>::infinity()"
    return f"static_cast<{kind}>({float(value)!r})"
