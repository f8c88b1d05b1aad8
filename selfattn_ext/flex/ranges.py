"""The ranges of a function's integers, and how many bits they take.

Note [32 bits]
    torch's indices have 64 bits, and so have numbers that are computed from them. Vectors hold twice as many
    numbers of 32 bits. So an integer is held in 32 bits if the sizes of the call, the constants of the
    function and its operations show that it fits, and an operation is done in 32 bits if its operands and its
    result fit. The results are the same. Sizes count as the next power of two, so that longer inputs change
    the source of a function only if products and sums of indices outgrow 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from .nodes import Load, Node, Number, all_of

__all__ = ["ANY_SIZES", "INDICES", "Range", "Ranges", "largest_places"]

INDICES = ("batch", "head", "q_idx", "kv_idx")
_MOST_BITS = 30
#: The largest sizes that the operators take with functions of scores.
ANY_SIZES = (1 << _MOST_BITS,) * len(INDICES)
#: Smaller sizes count as this one.
_LEAST_SIZE = 1 << 10


class Range(NamedTuple):
    """The integers from ``least`` to ``most``, both of them included."""

    least: int
    most: int

    def within(self, other: Range) -> bool:
        return other.least <= self.least and self.most <= other.most


def _of_bits(bits: int) -> Range:
    return Range(-(1 << bits - 1), (1 << bits - 1) - 1)


_OF_DTYPE = {
    torch.int64: _of_bits(64),
    torch.int32: _of_bits(32),
    torch.int16: _of_bits(16),
    torch.int8: _of_bits(8),
    torch.uint8: Range(0, 255),
    torch.bool: Range(0, 1),
}
_IN_32_BITS = _of_bits(32)
_UNKNOWN = _of_bits(128)


def largest_places(sizes: Sequence[int | torch.SymInt]) -> dict[str, int]:
    """The largest number that each index is taken to have in a call of these sizes (batch, heads, queries,
    keys). A size that a compiled graph leaves open may be any that the operators take.
    """

    def largest(size: int | torch.SymInt) -> int:
        bits = (max(size, _LEAST_SIZE) - 1).bit_length() if isinstance(size, int) else _MOST_BITS
        return (1 << min(bits, _MOST_BITS)) - 1

    return {name: largest(size) for name, size in zip(INDICES, sizes, strict=True)}


class _Known(NamedTuple):
    range: Range
    #: Whether the result cannot wrap around.
    exact: bool


class Ranges:
    """The ranges of the nodes of a function, given the largest number of each index."""

    def __init__(self, largest: Mapping[str, int]):
        self.largest = largest
        self._known: dict[Node, _Known] = {}

    def of(self, node: Node) -> Range:
        """The range of an integer, or of a bool as 0 and 1."""
        return self._look_up(node).range

    def is_exact(self, node: Node) -> bool:
        """Whether an integer cannot wrap around: it is what the operation gives for integers of any size."""
        return self._look_up(node).exact

    def held(self, node: Node) -> torch.dtype:
        """The dtype of the variable that holds a number."""
        short = node.dtype == torch.int64 and self.of(node).within(_IN_32_BITS)
        return torch.int32 if short else node.dtype

    def computed(self, node: Node, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an operation is done that torch does in ``dtype``."""
        if dtype != torch.int64:
            return dtype
        integers = [arg for arg in node.args if isinstance(arg, Node) and not arg.dtype.is_floating_point]
        fits = all(self.of(each).within(_IN_32_BITS) for each in (node, *integers))
        return torch.int32 if fits else dtype

    def _look_up(self, node: Node) -> _Known:
        if node not in self._known:
            for each in all_of([node], self._known):
                self._known[each] = self._found(each)
        return self._known[node]

    def _found(self, node: Node) -> _Known:
        every = _OF_DTYPE.get(node.dtype)
        if every is None or node.dtype == torch.bool:
            return _Known(every or Range(0, 0), True)
        found = self._unlimited(node, every)
        return _Known(found, True) if found.within(every) else _Known(every, False)

    def _unlimited(self, node: Node, every: Range) -> Range:
        """The range of a result that may have any number of bits."""
        if node.op in self.largest:
            return Range(0, self.largest[node.op])
        if isinstance(node, Number):
            return Range(int(node.value), int(node.value))
        rule = None if isinstance(node, Load) else _RULES.get(node.op)
        operands = [arg for arg in node.args if isinstance(arg, Node)]
        if rule is None:
            return every
        if any(arg.dtype not in _OF_DTYPE for arg in operands):  # floats, or 64 bits without a sign
            return every if node.op == "_to_copy" else _UNKNOWN
        given = [self._known[arg].range for arg in operands]
        if node.op != "_to_copy":  # the operation that brings an operand to the dtype of the result
            given = [each if each.within(every) else every for each in given]
        return rule(node, given)


_Rule = Callable[[Node, list[Range]], Range]


def _hull(numbers: Sequence[int]) -> Range:
    return Range(min(numbers), max(numbers))


def _sum(a: Range, b: Range) -> Range:
    return Range(a.least + b.least, a.most + b.most)


def _times(a: Range, b: Range) -> Range:
    return _hull([x * y for x, y in product(a, b)])


def _scaled(node: Node, given: list[Range], by: int) -> Range:
    """The range of a + by * alpha * b."""
    factor = by * int(node.kwargs.get("alpha", 1))
    return _sum(given[0], _times(given[1], Range(factor, factor)))


def _reversed_difference(node: Node, given: list[Range]) -> Range:
    """The range of b - alpha * a."""
    alpha = int(node.kwargs.get("alpha", 1))
    taken = _times(given[0], given[2] if len(given) > 2 else Range(alpha, alpha))
    return _sum(given[1], Range(-taken.most, -taken.least))


def _size(a: Range) -> int:
    return max(-a.least, a.most)


def _quotient(a: Range, b: Range) -> Range:
    most = _size(a)
    return Range(0 if a.least >= 0 and b.least >= 0 else -most, most)


def _rest(a: Range, b: Range) -> Range:
    """The range of a % b, which has the sign of b; division by 0 leaves a."""
    found = Range(min(b.least + 1, 0), max(b.most - 1, 0))
    return _hull([*found, *a]) if b.least <= 0 <= b.most else found


def _rest_of_truncated(a: Range, b: Range) -> Range:
    """The range of fmod(a, b), which has the sign of a."""
    most = min(_size(a), max(_size(b) - 1, 0)) if not b.least <= 0 <= b.most else _size(a)
    return Range(-most if a.least < 0 else 0, most if a.most > 0 else 0)


def _absolute(a: Range) -> Range:
    return Range(0 if a.least <= 0 <= a.most else min(abs(a.least), abs(a.most)), _size(a))


def _power(base: Range, exponent: Range) -> Range:
    most = max(_size(base), 1)
    if exponent.most > 63 and most > 1:
        return _UNKNOWN
    most **= max(exponent.most, 1)
    return Range(-most if base.least < 0 else 0, most)


def _both_bits(a: Range, b: Range) -> Range:
    """The range of a & b."""
    if a.least >= 0 or b.least >= 0:
        return Range(0, min(each.most for each in (a, b) if each.least >= 0))
    return _some_bits(a, b)


def _some_bits(a: Range, b: Range) -> Range:
    """The range of a | b and a ^ b, which have no bits that neither has."""
    bits = max(number.bit_length() for number in (*a, *b))
    return Range(0 if a.least >= 0 and b.least >= 0 else -(1 << bits), (1 << bits) - 1)


def _left(a: Range, by: Range) -> Range:
    if by.least < 0 or by.most > 63:
        return _UNKNOWN
    return _hull([x << y for x, y in product(a, by)])


def _right(a: Range, by: Range) -> Range:
    return _hull([x >> min(y, 63) for x, y in product(a, by)] if by.least >= 0 else [*a, 0, -1])


def _limited(node: Node, given: list[Range]) -> Range:
    found, *bounds = given
    has_least = node.op != "clamp_max" and len(node.args) > 1 and node.args[1] is not None
    if has_least:
        found = _at_least(found, bounds.pop(0))
    return _at_most(found, bounds[0]) if bounds else found


def _at_least(a: Range, b: Range) -> Range:
    return Range(max(a.least, b.least), max(a.most, b.most))


def _at_most(a: Range, b: Range) -> Range:
    return Range(min(a.least, b.least), min(a.most, b.most))


def _simple(rule: Callable[..., Range]) -> _Rule:
    return lambda node, given: rule(*given)


_RULES: dict[str, _Rule] = {
    "add": lambda node, given: _scaled(node, given, 1),
    "sub": lambda node, given: _scaled(node, given, -1),
    "rsub": _reversed_difference,
    "mul": _simple(_times),
    "square": _simple(lambda a: _power(a, Range(2, 2))),
    "pow": _simple(_power),
    "neg": _simple(lambda a: Range(-a.most, -a.least)),
    "abs": _simple(_absolute),
    "sign": _simple(lambda a: Range(max(min(a.least, 1), -1), max(min(a.most, 1), -1))),
    "relu": _simple(lambda a: _at_least(a, Range(0, 0))),
    "div": _simple(_quotient),
    "floor_divide": _simple(_quotient),
    "remainder": _simple(_rest),
    "fmod": _simple(_rest_of_truncated),
    "bitwise_and": _simple(_both_bits),
    "bitwise_or": _simple(_some_bits),
    "bitwise_xor": _simple(_some_bits),
    "bitwise_not": _simple(lambda a: Range(~a.most, ~a.least)),
    "bitwise_left_shift": _simple(_left),
    "bitwise_right_shift": _simple(_right),
    "maximum": _simple(_at_least),
    "minimum": _simple(_at_most),
    "where": _simple(lambda condition, a, b: _hull([*a, *b])),
    "masked_fill": _simple(lambda a, condition, b: _hull([*a, *b])),
    "fill": _simple(lambda a, b: b),
    "copy": _simple(lambda a, b: b),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _limited),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "_to_copy"), _simple(lambda a: a)),
}
_RULES |= {"__lshift__": _RULES["bitwise_left_shift"], "__rshift__": _RULES["bitwise_right_shift"]}
_RULES |= {"sgn": _RULES["sign"], "fmax": _RULES["maximum"], "fmin": _RULES["minimum"]}
