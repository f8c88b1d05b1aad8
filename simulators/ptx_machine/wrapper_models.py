"""What the wrappers of csrc/cuda/common/ptx_sm80.cuh must answer, by numpy.

These models share nothing with the machine: its answers to the words of probe.py are judged by them. Products
are judged by float64 here, within what tensor cores truncate; their bits are recorded in oracle/.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import probe
from .probe import LANES, Words

FLOAT32_LIMIT = 2.0**128
#: The bits of NaN that devices answer.
NAN, SHORT_NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7FFF)
#: How many products a device adds in one step, by its compute capability.
PRODUCTS_OF_STEP = {80: 8, 90: 16}


def load_matrix(operands: Words, transposed: bool = False) -> Words:
    """Lane l asks for row l % 8 of matrix l / 8, and gets the pair l % 4 in row l / 4 of each matrix."""
    problems = np.arange(len(operands))[:, None]
    rows = np.ascontiguousarray(operands[:, :, 1:5])[problems, operands[:, :, 0] % LANES]
    matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
    return matrices.view(np.uint32).reshape(-1, 4, LANES).swapaxes(1, 2)


def copy_async_16(operands: Words) -> Words:
    """Copies four words, or zeros if the first operand is even."""
    return operands[:, :, 4:8] * (operands[:, :, :1] % 2)


def pack_bfloat16(operands: Words) -> Words:
    """Rounds to the nearest number, of two that are as near to the even one; the first is the lower half."""
    even = operands >> np.uint32(16) & np.uint32(1)
    rounded = (operands.astype(np.uint64) + 0x7FFF + even >> 16).astype(np.uint32)
    halves = np.where(np.isnan(operands.view(np.float32)), SHORT_NAN, rounded)
    return halves[:, :, :1] | halves[:, :, 1:] << np.uint32(16)


def pack_float16(operands: Words) -> Words:
    """Rounds as numpy does; the first is the lower half."""
    values = operands.view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    halves = np.where(np.isnan(values), SHORT_NAN, rounded)
    return halves[:, :, :1] | halves[:, :, 1:] << np.uint32(16)


def exp2_approx(operands: Words) -> Words:
    """Powers of two, with zeros in place of subnormal arguments and results."""
    values = _flushed(operands.view(np.float32))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        powers = np.exp2(values.astype(np.float64)).astype(np.float32)
    return np.where(np.isnan(values), NAN, _flushed(powers).view(np.uint32))


def _flushed(values: NDArray[np.float32]) -> NDArray[np.float32]:
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


MODELS: dict[str, Callable[[Words], Words]] = {
    "load_matrix_x4": load_matrix,
    "load_matrix_x4_transposed": lambda operands: load_matrix(operands, transposed=True),
    "copy_async_16": copy_async_16,
    "pack_bfloat16": pack_bfloat16,
    "pack_float16": pack_float16,
    "exp2_approx": exp2_approx,
}


def _matrices(wrapper: str, operands: Words) -> tuple[NDArray[np.float64], ...]:
    """The matrices A, B and C of each problem, from its lanes' registers as the PTX manual draws them."""
    halves = np.ascontiguousarray(operands[:, :, :6]).view(np.uint16).reshape(-1, LANES, 6, 2)
    with np.errstate(invalid="ignore"):
        if wrapper == "multiply_float16":
            elements = halves.view(np.float16).astype(np.float64)
        else:
            elements = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    lane, pair = np.arange(LANES)[:, None], np.arange(2)
    group, place = lane // 4, 2 * (lane % 4) + pair
    a, b, c = (np.empty((len(operands), *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
    for register in range(4):
        a[:, group + 8 * (register % 2), place + 8 * (register // 2)] = elements[:, :, register]
    for register in range(2):
        b[:, place + 8 * register, group] = elements[:, :, 4 + register]
    c[:] = _result(operands[:, :, 6:])
    return a, b, c


def _result(words: Words) -> NDArray[np.float64]:
    """The matrix of an accumulator's registers."""
    numbers = np.ascontiguousarray(words).view(np.float32).reshape(-1, 8, 4, 2, 2)
    # The order is: problem, row within a half, pair of columns, half of the rows, column of the pair.
    with np.errstate(invalid="ignore"):
        return numbers.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8).astype(np.float64)


def _sizes(numbers: NDArray[np.float64], smallest: float) -> NDArray[np.float64]:
    """What truncation takes numbers for: subnormal ones have the exponent of the smallest normal one."""
    return np.where(numbers == 0, 0, np.maximum(np.abs(numbers), smallest))


def product_differences(wrapper: str, capability: int, operands: Words, found: Words) -> int:
    """How many results of a product are further from float64's than truncation allows.

    Each step truncates its terms to 24 bits, or 25, from the largest one on, and truncates their sum to
    float32.
    """
    a, b, sums = _matrices(wrapper, operands)
    sizes = np.abs(sums)
    step = PRODUCTS_OF_STEP[capability]
    smallest = 2.0**-14 if wrapper == "multiply_float16" else 2.0**-126
    size_a, size_b = (_sizes(numbers, smallest) for numbers in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, 16, step):
            part = slice(first, first + step)
            sums = sums + a[:, :, part] @ b[:, part]
            sizes = sizes + size_a[:, :, part] @ size_b[:, part]
            sums = np.where(np.abs(sums) >= FLOAT32_LIMIT, np.copysign(np.inf, sums), sums)
        allowed = 11 * 2.0**-23 * sizes + 2.0**-148
        results = _result(found)
        near = np.abs(results - sums) <= allowed
    right = np.where(np.isfinite(sums), near, results == sums) | (np.isnan(sums) & np.isnan(results))
    return int((~right).sum())


def differences(wrapper: str, capability: int, operands: Words, found: Words) -> int:
    """How many words of a wrapper's answers are none that a device may give."""
    if wrapper not in MODELS:
        return product_differences(wrapper, capability, operands, found)
    expected = np.ascontiguousarray(MODELS[wrapper](operands))
    return probe.differences(probe.Recording(wrapper, "numpy", capability, operands, expected), found)
