"""Writes the operations of torch on single numbers as expressions of C++.

Functions that are not C++'s own are in csrc/core/score_function_math.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from .nodes import Node, Number, UnsupportedFunctionError
from .ranges import Ranges

__all__ = ["C_TYPES", "STANDARD", "cast", "expression", "is_known", "is_written", "literal"]

#: The C++ type in which a dtype is computed. Numbers of 16 bits are rounded after each operation.
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
_TESTS = {"logical_not": "{0} == 0", "isnan": "{0} != {0}"}
_TESTS |= {"isinf": "is_infinite({0})", "signbit": "is_negative({0})"}
#: Operators of Python for which torch has names of their own.
_OPERATORS = {"__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift"}
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
    *("sigmoid_backward", "frac", "lerp", "bitwise_left_shift", "bitwise_right_shift"),
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
        "bitwise_not",
    ),
    *("masked_fill", "threshold", "threshold_backward", "addcmul", "addcdiv", "fill", "copy", "ldexp"),
}
#: These have two operands of one dtype: that of the result, except in place, where the result is converted.
_OF_TWO = {*_INFIX, *_BITS, "div", "pow", "minimum", "maximum", "fmin", "fmax", "floor_divide"}
_OF_TWO |= {"remainder", "fmod", "atan2", "hypot", "copysign"}


def is_known(name: str) -> bool:
    """Whether :func:`expression` takes an operation."""
    return any(
        name in names
        for names in (_INFIX, _COMPARISONS, _LOGIC, _BITS, _TESTS, _OPERATORS, STANDARD, _OWN, _OTHERS)
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


def expression(node: Node, text_of: Callable[[Node], str], ranges: Ranges) -> str:
    """The expression of a node's number, as the variable that holds it has it; ``text_of`` names its
    operands.
    """
    result = _Expression(node, text_of, ranges).text()
    rounding = _ROUNDING.get(node.dtype)
    return f"{rounding}({result})" if rounding else result


class _Expression:
    """The text of one operation, which may be computed in another dtype than that of its result."""

    def __init__(self, node: Node, text_of: Callable[[Node], str], ranges: Ranges):
        self._node = node
        self._text_of = text_of
        self._ranges = ranges
        dtype = node.dtype
        if node.op in _OF_TWO and node.common and node.common.is_floating_point == dtype.is_floating_point:
            dtype = node.common
        self._dtype = ranges.computed(node, dtype)
        #: Whether products and sums are C++'s own: those of integers must not leave their dtype.
        self._is_plain = node.dtype.is_floating_point or ranges.is_exact(node)

    def text(self) -> str:
        name = _OPERATORS.get(self._node.op, self._node.op)
        text, held = self._computed(name), self._ranges.held(self._node)
        return text if held == self._dtype else cast(f"({text})", self._dtype, held)

    def _operand(self, index: int, dtype: torch.dtype | None = None) -> str:
        return self._of(self._node.args[index], dtype or self._dtype)

    def _of(self, arg: Node, dtype: torch.dtype) -> str:
        if isinstance(arg, Number) and is_written(arg):
            return f"{_ROUNDING.get(dtype, '')}({literal(arg.value, dtype)})"
        return cast(self._text_of(arg), self._ranges.held(arg), dtype)

    def _operands(self, dtype: torch.dtype | None = None) -> list[str]:
        return [self._of(arg, dtype or self._dtype) for arg in self._node.args if isinstance(arg, Node)]

    def _sum(self, left: str, name: str, right: str, factor: float | int | bool = 1) -> str:
        """A sum, difference or product, of the right operand times the factor."""
        if factor == 1:
            return f"{left} {_INFIX[name]} {right}" if self._is_plain else f"{name}_of({left}, {right})"
        if self._dtype.is_floating_point:  # rounded once, as torch does it
            return (
                f"multiply_add({literal(factor if name == 'add' else -factor, self._dtype)}, {right}, {left})"
            )
        return f"{name}_of({left}, mul_of({literal(factor, self._dtype)}, {right}))"

    def _computed(self, name: str) -> str:
        node, kwargs = self._node, self._node.kwargs
        if name in _INFIX:
            left, right = self._operands()
            return self._sum(left, name, right, kwargs.get("alpha", 1))
        if name == "rsub":
            alpha = kwargs.get("alpha", 1) if len(node.args) < 3 else node.args[2].value
            return self._sum(self._operand(1), "sub", self._operand(0), alpha)
        if name in _COMPARISONS:
            left, right = self._operands(self._ranges.computed(node, node.common or node.dtype))
            return f"{left} {_COMPARISONS[name]} {right}"
        if name in _LOGIC:
            left, right = self._operands(torch.bool)
            return f"{left} {_LOGIC[name]} {right}"
        if name in _BITS:
            left, right = self._operands()
            return f"({left} {_BITS[name]} {right}){' != 0' if node.dtype == torch.bool else ''}"
        if name in _TESTS:
            return _TESTS[name].format(self._operand(0, self._ranges.held(node.args[0])))
        if name == "bitwise_not":
            return f"{'!' if node.dtype == torch.bool else '~'}{self._operand(0)}"
        if name == "div":
            return self._quotient(kwargs.get("rounding_mode"))
        if name == "pow":
            return self._power()
        if name == "ldexp":
            return f"{self._operand(0)} * {self._power_of_two()}"
        if name in ("where", "masked_fill"):
            condition, if_true, if_false = (0, 1, 2) if name == "where" else (1, 2, 0)
            chosen = f"{self._operand(if_true)} : {self._operand(if_false)}"
            return f"{self._operand(condition, torch.bool)} ? {chosen}"
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamped(name)
        if name in ("_to_copy", "fill", "copy"):
            return self._operand(0 if name == "_to_copy" else 1)
        if name == "threshold":
            return f"{self._operand(0)} <= {self._operand(1)} ? {self._operand(2)} : {self._operand(0)}"
        if name == "threshold_backward":
            return f"{self._operand(1)} <= {self._operand(2)} ? 0 : {self._operand(0)}"
        if name in ("addcmul", "addcdiv"):
            return self._sum_with_factors(name, kwargs.get("value", 1))
        if name in STANDARD:
            return f"std::{name}({', '.join(self._operands())})"
        if name in _OWN:
            if name == "round" and kwargs.get("decimals"):
                raise UnsupportedFunctionError("it rounds to decimals")
            function = "wrapped_abs_of" if name == "abs" and not self._is_plain else f"{name}_of"
            return f"{function}({', '.join(self._operands())})"
        raise UnsupportedFunctionError(f"it uses {name}")

    def _quotient(self, rounding_mode: str | None) -> str:
        left, right = self._operands()
        if rounding_mode == "floor":
            return f"floor_divide_of({left}, {right})"
        if rounding_mode == "trunc" and not self._dtype.is_floating_point:
            return f"truncate_divide({left}, {right})"
        quotient = f"{left} / {right}"
        rounding = _ROUNDING.get(self._dtype, "")
        return quotient if rounding_mode is None else f"std::trunc({rounding}({quotient}))"

    def _sum_with_factors(self, name: str, factor: float | int | bool) -> str:
        first, left, right = self._operands()
        if not self._dtype.is_floating_point:
            return f"add_of({first}, mul_of(mul_of({literal(factor, self._dtype)}, {left}), {right}))"
        left = left if factor == 1 else f"{literal(factor, self._dtype)} * {left}"
        return (
            f"multiply_add({left}, {right}, {first})" if name == "addcmul" else f"{first} + {left} / {right}"
        )

    def _power(self) -> str:
        exponent = self._node.args[1]
        if isinstance(exponent, Number) and not exponent.is_tensor:
            if exponent.value in (1, 2, 3):
                base = self._operand(0)
                return functools.reduce(
                    lambda left, right: self._sum(left, "mul", right), [base] * int(exponent.value)
                )
            function = {0.5: "std::sqrt", -0.5: "rsqrt_of", -1: "reciprocal_of"}.get(exponent.value)
            # For float16 torch computes the power itself.
            if function is not None and self._dtype.is_floating_point and self._dtype != torch.float16:
                return f"{function}({self._operand(0)})"
        return f"pow_of({', '.join(self._operands())})"

    def _power_of_two(self) -> str:
        """The power of two of ldexp, which torch computes in the exponent's dtype, with all digits of
        integers.
        """
        exponent = self._node.args[1].dtype
        if not exponent.is_floating_point:
            return f"std::exp2({self._operand(1, torch.promote_types(self._dtype, torch.float32))})"
        return cast(
            f"{_ROUNDING.get(exponent, '')}(std::exp2({self._operand(1, exponent)}))", exponent, self._dtype
        )

    def _clamped(self, name: str) -> str:
        bounds: Sequence[int | None]
        bounds = {"clamp_min": (1, None), "clamp_max": (None, 1)}.get(name, (1, 2))
        text, args = self._operand(0), self._node.args
        for index, function in zip(bounds, ("maximum_of", "minimum_of"), strict=True):
            if index is not None and index < len(args) and args[index] is not None:
                text = f"{function}({self._operand(index)}, {text})"
        return text


def is_written(number: Number) -> bool:
    """Whether a constant is part of the source, because a double may not hold all digits of its integer."""
    return isinstance(number.value, int) and abs(number.value) > 2**53


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant of C++ with all of its digits."""
    kind = C_TYPES[dtype]
    if isinstance(value, int) and abs(value) > 2**53:
        sign, bits = ("-", -value) if value < 0 and dtype.is_floating_point else ("", value % 2**64)
        return f"{sign}static_cast<{kind}>({bits:#x}u)"
    if not dtype.is_floating_point:
        return f"static_cast<{kind}>({int(value)})"
    if math.isnan(value):
        return f"std::numeric_limits<{kind}>::quiet_NaN()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<{kind}>::infinity()"
    return f"static_cast<{kind}>({float(value)!r})"
