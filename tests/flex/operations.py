"""Operations of torch on one number or two, and the numbers to call them with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, special

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

#: Functions of torch with one operand.
_OF_ONE = """abs neg sign sgn relu floor ceil trunc round square exp exp2 expm1 log log2 log10 log1p sin cos
tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sqrt rsqrt reciprocal sigmoid frac isnan isinf
isfinite isposinf isneginf signbit logical_not bitwise_not positive deg2rad rad2deg sinc logit nan_to_num"""
_FUNCTIONAL = """relu6 hardtanh hardswish hardsigmoid elu selu celu gelu silu mish softplus softsign
tanhshrink hardshrink softshrink logsigmoid leaky_relu"""
_OF_TWO = """add sub mul div floor_divide remainder fmod atan2 hypot copysign minimum maximum fmin fmax eq ne
lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
bitwise_right_shift pow xlogy logaddexp logaddexp2 heaviside float_power ldexp"""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in _OF_ONE.split()},
    **{name: getattr(F, name) for name in _FUNCTIONAL.split()},
    **{f"special.{name}": getattr(special, name) for name in ("entr", "ndtr", "expit")},
    **{
        f"x ** {exponent}": lambda x, exponent=exponent: x**exponent
        for exponent in (-3, -2, -1, 0, 1, 2, 3, 4, 0.5, -0.5, 1.5, -1.5, 2.0, math.inf, -math.inf)
    },
    **{f"{base} ** x": lambda x, base=base: base**x for base in (2.0, 0.0, -1.0, 2, -2, 0.5, math.inf)},
    **{f"x to {dtype}": lambda x, dtype=dtype: x.to(dtype) for dtype in DTYPES},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 1.0, 7.0),
    "x // 3": lambda x: x // 3,
    "x // -0.7": lambda x: x // -0.7,
    "5 // x": lambda x: 5 // x,
    "x % 3": lambda x: x % 3,
    "x % -2.5": lambda x: x % -2.5,
    "7 % x": lambda x: 7 % x,
    "x / 3": lambda x: x / 3,
    "2 / x": lambda x: 2 / x,
    "1 - x": lambda x: 1 - x,
    "x + 2.5": lambda x: x + 2.5,
    "x + 2**62": lambda x: x + 2**62,
    "x * 2": lambda x: x * 2,
    "x * a hash": lambda x: x * 0x9E3779B97F4A7C15,
    "x * -0.0": lambda x: x * -0.0,
    "3 - 2 * x": lambda x: torch.rsub(x, 3, alpha=2),
    "x / 3 to 0": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "x / -2 down": lambda x: torch.div(x, -2, rounding_mode="floor"),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp to least": lambda x: x.clamp(min=1),
    "clamp to most": lambda x: x.clamp(max=1),
    "clamp by floats": lambda x: x.clamp(-0.5, 2.5),
    "clamp crossed": lambda x: x.clamp(2, -1),
    "clamp to NaN": lambda x: x.clamp(max=math.nan),
    "to int8 and back": lambda x: x.to(torch.int8).to(torch.int64) + 1,
    "x < 300": lambda x: x < 300,
    "x > 2**40": lambda x: x > 2**40,
    "x == 0": lambda x: x == 0,
    "x >= 1.5": lambda x: x >= 1.5,
    "where": lambda x: torch.where(x > 0, x, 0),
    "where of numbers": lambda x: torch.where(x > 0, 1.5, 0),
    "hide": lambda x: torch.where(x < 1, x, -math.inf),
    "masked_fill": lambda x: x.masked_fill(x > 1, 3),
    "x << 2": lambda x: x << 2,
    "x << 9": lambda x: x << 9,
    "x >> 1": lambda x: x >> 1,
    "x >> 70": lambda x: x >> 70,
    "1 << x": lambda x: 1 << x,
    "x & 5": lambda x: x & 5,
    "x | 8": lambda x: x | 8,
    "x ^ -1": lambda x: x ^ -1,
    "full_like": lambda x: torch.full_like(x, 3) + x,
    "x ** full_like": lambda x: torch.pow(x.float() + 2, torch.full_like(x, 2)),
    "in place": lambda x: (x + 0.0).exp_(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in _OF_TWO.split()},
    "special.xlog1py": special.xlog1py,
    "x / y to 0": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "x / y down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "x + 3 * y": lambda x, y: torch.add(x, y, alpha=3),
    "x - 2 * y": lambda x, y: torch.sub(x, y, alpha=2),
    "y - x": torch.rsub,
    "the larger": lambda x, y: torch.where(x > y, x, y),
    "y where x": lambda x, y: torch.where(x != 0, y, x),
    "clamp from a tensor": lambda x, y: torch.clamp(x, min=y),
    "clamp up to a tensor": lambda x, y: torch.clamp(x, max=y),
    "clamp to a tensor": lambda x, y: torch.clamp(x, y, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp from the end": lambda x, y: torch.lerp(x, y, 0.75),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "addcmul of half": lambda x, y: torch.addcmul(x, y, x, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "addcdiv of half": lambda x, y: torch.addcdiv(x, y, x, value=0.5),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2),
    "+=": lambda x, y: (x + 0).add_(y),
    "*=": lambda x, y: (x + 0).mul_(y),
    "copy": lambda x, y: (x + 0).copy_(y),
}
#: torch raises errors or ends the process if these divide integers by 0, or the least integer by -1.
DIVISIONS = {"floor_divide", "remainder", "fmod", "x / y to 0", "x / y down"}
#: Compiled functions cannot use these operations; torch computes such functions in parts.
NOT_COMPILED = {
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "angle": torch.angle,
    "i0": torch.i0,
    "round to decimals": lambda x: torch.round(x, decimals=1),
    "another dtype": lambda x: x.to(torch.uint16).to(torch.float32),
}


def special_numbers(dtype: torch.dtype, few: bool = False) -> Tensor:
    """Returns zeros, ties, ones, exponents that overflow, infinities, NaN, largest and subnormal numbers."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        found = [0.0, -0.0, 0.5, 1.0, -1.0, -2.5, 3.0, 88.0, -1000.0, math.inf, -math.inf, math.nan]
        found += [info.tiny / 4, info.max]
        if not few:
            found += [-0.5, 1.5, -3.0, 6.0, -88.0, 1000.0, -info.tiny / 8, -info.max, 0.1, 2.0, -2.0, 20.0]
            found += [info.eps / 3, 103.0, -103.9, 11.0, 1e-3]
        return torch.tensor(found, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    numbers = [0, 1, 2, 3, 5, 7, 9, 31, 63, info.max, info.max - 1]
    numbers += [-1, -2, -3, -8, -64, info.min, info.min + 1] if info.min < 0 else []
    numbers += [46341, 70000, -70001, 2**31 - 1] if info.bits > 16 else []
    numbers += [2**31, 2**33 + 1, -(2**40), 2**53 + 1] if info.bits > 32 else []
    return torch.tensor(numbers, dtype=dtype)


@functools.cache
def pairs(
    first: torch.dtype, second: torch.dtype, few: bool, divisible: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns every pair of special numbers of two dtypes, or those that can be divided."""
    x, y = (special_numbers(dtype, few) for dtype in (first, second))
    at = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(y)))
    x, y = x[at[:, 0]], y[at[:, 1]]
    if divisible and not (first.is_floating_point or second.is_floating_point):
        taken = (y != 0) & ~((y.long() == -1) & (x == x.min()))
        x, y = x[taken], y[taken]
    return x, y
