"""Checks and conversions of single arguments.

Each function raises an error that names the argument, what was given and what is allowed. Some of them run
in every call, the others only after an operator has refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..build import cuda_build, library

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES_TEXT = "float64, float32, bfloat16 or float16"
_MAX_OFFSET = 2**40
_MAX_ELEMENTS = 2**60


def integer(name: str, value: Any, low: int = -_MAX_OFFSET, high: int = _MAX_OFFSET) -> int:
    """Returns anything that is an int, NumPy's and one-element integer tensors included, as an int.

    A symbol that a compiler traces is returned as it is: a question about its value would tie the graph to
    the answer. The operators check it when it has a value.
    """
    if _is_truth_value(value):
        raise TypeError(f"{name} must be an int, got {described(value)}")
    if _may_be_symbol(value):
        return value
    try:
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {described(value)}") from None
    if not low <= result <= high:
        raise ValueError(f"{name} must lie between {low} and {high}, got {_digits(result)}")
    return result


def integers(name: str, values: Iterable[Any], low: int = -_MAX_OFFSET, high: int = _MAX_OFFSET) -> list[int]:
    """Returns the elements of a sequence as ints; an error names the element that is wrong."""
    return [integer(f"{name}[{index}]", value, low, high) for index, value in enumerate(values)]


def _is_truth_value(value: Any) -> bool:
    """Tells whether a value is True or False, in Python, NumPy, a tensor or a compiler.

    To Python these are numbers; where a number is asked for they are a mistake.
    """
    if type(value) is int or type(value) is float:
        return False
    return isinstance(value, (bool, torch.SymBool)) or str(getattr(value, "dtype", "")).endswith("bool")


def _digits(number: int) -> str:
    """Returns an int for a message; Python refuses to print ints of thousands of digits."""
    return str(number) if number.bit_length() <= 200 else f"an int of {number.bit_length()} bits"


def _may_be_symbol(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    return torch.compiler.is_dynamo_compiling() and isinstance(value, int)


def number(name: str, value: Any) -> float:
    """Returns a real number, or a tensor of one element that requires no gradient, as a finite float."""
    result = value if type(value) is float else _as_float(name, value)
    # This is math.isfinite in operations that a compiler's symbol has, too.
    if result - result != 0:
        raise ValueError(f"{name} must be finite, got {result}")
    return result


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"{name} must be a real number, got {described(value)}")
        if value.requires_grad:
            raise ValueError(
                f"{name} gets no gradient and must be a number or a tensor without requires_grad, got a "
                "tensor with requires_grad=True"
            )
    if isinstance(value, (str, bytes)) or _is_truth_value(value):
        raise TypeError(f"{name} must be a real number, got {described(value)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number, got {described(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be finite as a float64, got {described(value)}") from None


def scale(value: Any, dtype: torch.dtype = torch.float64) -> float:
    """Returns the factor of the scores for inputs of ``dtype``; all but float64 are computed in float32.

    A learned factor belongs in the query: ``query * factor``, ``scale=1.0``.
    """
    result = number("scale", value)
    if dtype != torch.float64 and abs(result) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale must be finite in float32, in which {dtype} inputs are computed, got {result}"
        )
    return result


def softcap(value: Any) -> float:
    """Returns the bound of the scores, 0 for none."""
    result = number("softcap", value)
    if result < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {result}")
    return result


def probability(name: str, value: Any) -> float:
    """Returns the value as a float between 0 and 1."""
    result = number(name, value)
    if not 0.0 <= result <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {result}")
    return result


def flags(**values: Any) -> None:
    """Checks that each value is True or False: to Python "False" is true, and None may be a mistake."""
    for name, value in values.items():
        # Not by identity with True or False, which a compiler's symbol for a bool would fail.
        if type(value) is not bool and not isinstance(value, torch.SymBool):
            raise TypeError(f"{name} must be a bool, the same for the whole call, got {described(value)}")


def window(value: Any) -> tuple[int, int]:
    """Returns window_size as a pair (left, right) of ints, each at least -1."""
    if isinstance(value, (str, bytes, Tensor)) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(
            f"window_size must be a pair (left, right) of ints, -1 for unbounded, got {described(value)}"
        )
    left, right = integers("window_size", value, -sys.maxsize, sys.maxsize)
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size must be (left, right), each at least -1 (unbounded), got {(left, right)}"
        )
    return left, right


def is_causal_bias(mask: Any) -> bool:
    """Tells whether a mask is a torch.nn.attention.bias.CausalBias, a rule that only looks like a tensor."""
    # Until somebody has imported that module, no such object can exist, and importing it takes time.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def is_jagged(value: Any) -> bool:
    """Tells whether a value is a nested tensor of the jagged layout."""
    # The class decides, as reading a tensor subclass's layout would call its __torch_function__.
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and isinstance(value, module.NestedTensor)


def mask(name: str, value: Any) -> Tensor:
    """Returns a mask if the operators take its dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {described(value)}")
    if value.dtype != torch.bool and value.dtype not in _DTYPES:
        raise TypeError(
            f"{name} must be bool (True = attend) or {_DTYPES_TEXT} (added to the scores), got "
            f"{value.dtype}; for a mask of zeros and ones, pass {name} != 0"
        )
    return value


def described(value: Any) -> str:
    """Returns a description of what was given, for a message."""
    if isinstance(value, Tensor):
        if value.is_nested:  # the older layout has no shape
            return "a nested tensor"
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, int) and not isinstance(value, bool):
        digits = _digits(value)
        return digits if digits.startswith("an int") else f"int {digits}"
    hint = (
        "; torch.from_numpy makes a tensor of it"
        if type(value).__module__ == "numpy" and hasattr(value, "shape")
        else ""
    )
    return f"{type(value).__name__} {value!r:.60}{hint}"


def dense_tensor(name: str, value: Any) -> Tensor:
    """Returns a tensor if it is dense."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {described(value)}")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        if value.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, but it is a nested tensor; scaled_dot_product_attention "
                "takes those of layout=torch.jagged for query, key and value"
            )
        kind = "quantized" if value.is_quantized else str(value.layout)
        raise TypeError(f"{name} must be a dense tensor, but it is {kind}; {name}.to_dense() may help")
    return value


def on_device(name: str, tensor: Tensor, first: str, device: torch.device) -> None:
    """Checks that a tensor is on ``device``, that of the tensor named ``first``."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and {first} on {device}: all tensors must be on one device"
        )


def _has_kernels(name: str, device: torch.device) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # a graph cannot ask the library, and its operators check the device themselves
    build = library.extension().build_info()
    allowed = "cpu or cuda" if build["cuda"] else "cpu"
    if device.type == "meta":
        raise ValueError(f"{name} is on the meta device and has no data; allowed is {allowed}")
    if device.type == "cuda" and not build["cuda"]:
        raise ValueError(
            f"{name} is on {device}, and this build of selfattn_ext has no CUDA kernels: "
            f"{cuda_build.ABSENT[build['cuda_absent']]}. {cuda_build.install_hint(torch.version.cuda)}"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {device}, for which this build has no kernels; allowed is {allowed}")


def float_dtype(name: str, value: Any) -> torch.dtype:
    """Returns a dtype if the operators compute in it."""
    if value not in _DTYPES:
        raise TypeError(f"{name} must be {_DTYPES_TEXT}, got {value}")
    return value


def alike(tensors: dict[str, Any]) -> None:
    """Checks that all are dense floating tensors of one dtype, on one device."""
    for name, tensor in tensors.items():
        float_dtype(name, dense_tensor(name, tensor).dtype)
    first, reference = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        on_device(name, tensor, first, reference.device)
        if tensor.dtype != reference.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} and {first} {reference.dtype}: they must have the same dtype"
            )


def floats(tensors: dict[str, Any]) -> None:
    """Checks that all are dense floating tensors of one dtype, on one device that has kernels."""
    alike(tensors)
    first, reference = next(iter(tensors.items()))
    _has_kernels(first, reference.device)


def fits(name: str, sizes: Sequence[int]) -> None:
    """Checks that memory can address all elements of a shape."""
    if math.prod(sizes) > _MAX_ELEMENTS or any(size > _MAX_OFFSET for size in sizes):
        raise ValueError(f"{name} would have the shape {tuple(sizes)}: more elements than memory can address")


def broadcasts(name: str, shape: Sequence[int], full: Sequence[int], meaning: str) -> None:
    """Checks that a shape broadcasts to the full one."""
    given = list(shape)
    while len(given) > len(full) and given[0] == 1:
        given.pop(0)
    if len(given) > len(full) or any(
        size not in (1, wanted) for size, wanted in zip(reversed(given), reversed(full), strict=False)
    ):
        raise ValueError(
            f"{name} of shape {tuple(shape)} does not broadcast to {tuple(full)}, {meaning}"
            f"{with_missing_dimensions(name, tuple(shape), tuple(full))}"
        )


def with_missing_dimensions(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Returns a hint how to index a tensor that has only the first and the last of the full dimensions."""
    if len(shape) < 2 or len(shape) >= len(full) or shape[0] != full[0]:
        return ""
    after = len(shape) - 1
    if any(size not in (1, wanted) for size, wanted in zip(shape[1:], full[-after:], strict=True)):
        return ""
    places = [":", *["None"] * (len(full) - len(shape)), *[":"] * after]
    return f"; {name}[{', '.join(places)}] does"
