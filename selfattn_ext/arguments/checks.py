"""What is wrong with the arguments of a call: which one, what was given, what is allowed.

The small functions at the top check and convert single values on the way into a call. ``attention``,
``scores`` and ``softmax`` go through all arguments of a public function and are called once an operator has
refused something (Note [Refusals] in :mod:`selfattn_ext.functional`); each raises for the first thing that is
wrong and returns None when it finds nothing.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import cuda_build, library
from . import shapes

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES_TEXT = "float64, float32, bfloat16 or float16"
#: What operators, torch's views and attributes of things that are no tensors raise for bad arguments, and
#: what an operator raises where there is no memory for its result.
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, IndexError, MemoryError)
_MAX_OFFSET = 2**40
_MAX_ELEMENTS = 2**60


def explained(refusal: Exception, check: Callable[..., None], *args: Any, **kwargs: Any) -> Exception:
    """What to raise in place of one of REFUSALS: what the check finds wrong with the arguments of the call,
    the refusal itself where it finds nothing.
    """
    if isinstance(refusal, MemoryError):
        return out_of_memory(refusal, next(arg for arg in args if isinstance(arg, Tensor)))
    try:
        check(*args, **kwargs)
    except (ValueError, TypeError) as problem:
        return problem
    if "DefaultCPUAllocator" in str(refusal):
        # torch's own functions, of which the formula is made, have no class of their own for that.
        return MemoryError(f"not enough memory: {refusal}")
    return refusal


def out_of_memory(error: MemoryError, tensor: Tensor) -> Exception:
    """What to raise in place of an operator's MemoryError: on CUDA, what torch's own functions raise.

    The operators learn only that an allocation failed. Trying it once more tells why: an earlier kernel's
    error shows there as well as lack of memory.
    """
    if tensor.device.type != "cuda":
        return error
    wanted = re.search(r"\((\d+) bytes\)", str(error))
    try:
        torch.empty(int(wanted[1]) if wanted else 1, dtype=torch.uint8, device=tensor.device)
    except Exception as reason:
        return reason
    return torch.OutOfMemoryError(f"CUDA out of memory: {error}")


def integer(name: str, value: Any, low: int = -_MAX_OFFSET, high: int = _MAX_OFFSET) -> int:
    """An int from anything that is one, NumPy's and one-element integer tensors included.

    One that a compiler traces as a symbol is taken as it is: a question about its value would tie the graph
    to the answer. The operators check it when it has a value.
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


def _is_truth_value(value: Any) -> bool:
    """Whether a value is True or False, or that of NumPy, of a tensor or of a compiler: a number to Python,
    and a mistake where a number is asked for.
    """
    if type(value) is int or type(value) is float:
        return False
    return isinstance(value, (bool, torch.SymBool)) or str(getattr(value, "dtype", "")).endswith("bool")


def _digits(number: int) -> str:
    """An int for a message; Python refuses to print those of thousands of digits."""
    return str(number) if number.bit_length() <= 200 else f"an int of {number.bit_length()} bits"


def _may_be_symbol(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    return torch.compiler.is_dynamo_compiling() and isinstance(value, int)


def number(name: str, value: Any) -> float:
    """A finite float from a real number or a tensor of one element that requires no gradient."""
    result = value if type(value) is float else _as_float(name, value)
    # As math.isfinite says it, in words that hold for the symbol of a compiler too.
    if result - result != 0:
        raise ValueError(f"{name} must be finite, got {result}")
    return result


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"{name} must be a real number, got {described(value)}")
        if value.requires_grad:
            raise ValueError(f"{name} is a constant of differentiation, got a tensor with requires_grad=True")
    if isinstance(value, (str, bytes)) or _is_truth_value(value):
        raise TypeError(f"{name} must be a real number, got {described(value)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number, got {described(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be finite as a float64, got {described(value)}") from None


def scale(value: Any, dtype: torch.dtype = torch.float64) -> float:
    """The factor of the scores of inputs of ``dtype``, all of which but float64 are computed in float32.

    A learned one belongs into the query: ``query * factor``, ``scale=1.0``.
    """
    result = number("scale", value)
    if dtype != torch.float64 and abs(result) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale must be finite in float32, in which {dtype} inputs are computed, got {result}"
        )
    return result


def softcap(value: Any) -> float:
    """The bound of the scores, 0 for none."""
    result = number("softcap", value)
    if result < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {result}")
    return result


def probability(name: str, value: Any) -> float:
    """A float between 0 and 1."""
    result = number(name, value)
    if not 0.0 <= result <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {result}")
    return result


def flags(**values: Any) -> None:
    """True or False each, as torch's functions have it: "False" is true, and None may be a mistake."""
    for name, value in values.items():
        # By its type: a compiler's symbol for a bool has it too, and is nobody's identical object.
        if type(value) is not bool and not isinstance(value, torch.SymBool):
            raise TypeError(f"{name} must be a bool, the same for the whole call, got {described(value)}")


def window(value: Any) -> tuple[int, int]:
    """A pair (left, right) of integers from -1."""
    if isinstance(value, (str, bytes, Tensor)) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(
            f"window_size must be a pair (left, right) of ints, -1 for unbounded, got {described(value)}"
        )
    left, right = (integer("window_size", side, -sys.maxsize, sys.maxsize) for side in value)
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size must be (left, right) with each from -1 (unbounded) on, got {(left, right)}"
        )
    return left, right


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is a torch.nn.attention.bias.CausalBias, a rule that only looks like a tensor."""
    # Until somebody has imported the module there can be none, and importing it takes time.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def is_jagged(value: Any) -> bool:
    """Whether a value is a nested tensor of the jagged layout."""
    # By its class: asking a tensor subclass for its layout would show in its __torch_function__.
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and isinstance(value, module.NestedTensor)


def mask(name: str, value: Any) -> Tensor:
    """A mask of a dtype that the operators take."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {described(value)}")
    if value.dtype != torch.bool and value.dtype not in _DTYPES:
        raise TypeError(
            f"{name} must be bool (True = attend) or {_DTYPES_TEXT} (added to the scores), got "
            f"{value.dtype}; make {name} != 0 of a mask of zeros and ones"
        )
    return value


def described(value: Any) -> str:
    """What was given, for a message."""
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
    """A tensor of plain memory."""
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
    """The device of the first tensor."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and {first} on {device}: all tensors must be on one device"
        )


def _has_kernels(name: str, device: torch.device) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # the library cannot be asked from within a graph, whose operators know the device anyway
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
    """A dtype that the operators compute in."""
    if value not in _DTYPES:
        raise TypeError(f"{name} must be {_DTYPES_TEXT}, got {value}")
    return value


def floats(tensors: dict[str, Any]) -> None:
    """Dense floating tensors of one dtype on one device that has kernels."""
    for name, tensor in tensors.items():
        float_dtype(name, dense_tensor(name, tensor).dtype)
    first, reference = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        on_device(name, tensor, first, reference.device)
        if tensor.dtype != reference.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} and {first} {reference.dtype}: they must have the same dtype"
            )
    _has_kernels(first, reference.device)


def fits(name: str, sizes: Sequence[int]) -> None:
    """A shape of not more elements than memory can have."""
    if math.prod(sizes) > _MAX_ELEMENTS or any(size > _MAX_OFFSET for size in sizes):
        raise ValueError(f"{name} would have the shape {tuple(sizes)}: more elements than memory can address")


def broadcasts(name: str, shape: Sequence[int], full: Sequence[int], meaning: str) -> None:
    """A shape that broadcasts to the full one."""
    given = list(shape)
    while len(given) > len(full) and given[0] == 1:
        given.pop(0)
    if len(given) > len(full) or any(
        size not in (1, wanted) for size, wanted in zip(reversed(given), reversed(full), strict=False)
    ):
        raise ValueError(f"{name} of shape {tuple(shape)} does not broadcast to {tuple(full)}, {meaning}")


def _mask_of(name: str, value: Any, tensor: Tensor, full: Sequence[int], first: str) -> None:
    if is_causal_bias(value):
        if (value.seq_len_q, value.seq_len_kv) != tuple(full[-2:]):
            raise ValueError(
                f"{name} is a CausalBias for {value.seq_len_q} queries and {value.seq_len_kv} keys, but "
                f"there are {full[-2]} queries and {full[-1]} keys"
            )
        return
    mask(name, value)
    dense_tensor(name, value)
    on_device(name, value, first, tensor.device)
    broadcasts(name, value.shape, full, "the shape of the scores")


def _head_numbers(name: str, value: Any, tensor: Tensor, full: Sequence[int]) -> None:
    if value is None:
        return
    float_dtype(name, dense_tensor(name, value).dtype)
    on_device(name, value, "query", tensor.device)
    broadcasts(name, value.shape, full, "one number per head")


def _form(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> shapes.Canonical:
    """The three in the operators' form, to look at."""
    try:
        return shapes.canonical(query.detach(), key.detach(), value.detach(), enable_gqa, dense=False)
    except RuntimeError:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} broadcast to "
            "more elements than memory can address"
        ) from None


def _result_lead(form: shapes.Canonical) -> tuple[int, ...]:
    """The dimensions of the scores before L and S, as the user counts them."""
    if form.rank == 2:
        return ()
    heads = (form.query.size(1),)
    return heads if form.rank == 3 else (*form.lead, *heads)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale_: Any = None,
    enable_gqa: Any = False,
    *,
    window_size: Any = (-1, -1),
    softcap_: Any = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    query_offset: Any = 0,
    return_weights: Any = False,
    return_lse: Any = False,
) -> None:
    """Every argument of :func:`selfattn_ext.scaled_dot_product_attention`."""
    floats({"query": query, "key": key, "value": value})
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, (..., length, head dim), got {tuple(tensor.shape)}"
            )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            f"query and key must have the same last dimension (head dim), but query is {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if key.size(-2) != value.size(-2):
        raise ValueError(
            "key and value must have the same length (second dimension from the end), but key is "
            f"{tuple(key.shape)} and value {tuple(value.shape)}"
        )
    flags(enable_gqa=enable_gqa, return_weights=return_weights, return_lse=return_lse)
    form = _form(query, key, value, enable_gqa)
    lead = _result_lead(form)
    scores = (*lead, query.size(-2), key.size(-2))
    fits("the output", (*scores[:-1], value.size(-1)))
    fits("the scores", scores[-2:])
    if return_weights:
        fits("the weights", scores)

    integer("query_offset", query_offset)
    options(
        query, scores, attn_mask, dropout_p, is_causal, scale_, window_size, softcap_, alibi_slopes, sinks,
        lead or (1,),
    )  # fmt: skip


def options(
    query: Tensor,
    scores: Sequence[int],
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale_: Any,
    window_size: Any,
    softcap_: Any,
    alibi_slopes: Any,
    sinks: Any,
    heads: Sequence[int],
) -> None:
    """The options that every attention has, for scores of that shape and numbers per head of that."""
    probability("dropout_p", dropout_p)
    flags(is_causal=is_causal)
    if scale_ is not None:
        scale(scale_, query.dtype)
    window(window_size)
    softcap(softcap_)
    if attn_mask is not None:
        _mask_of("attn_mask", attn_mask, query, scores, "query")
    _head_numbers("alibi_slopes", alibi_slopes, query, heads)
    _head_numbers("sinks", sinks, query, heads)


def scores(query: Any, key: Any, scale_: Any = None, enable_gqa: Any = False) -> None:
    """Every argument of :func:`selfattn_ext.attention_scores`."""
    floats({"query": query, "key": key})
    attention(query, key, key, None, 0.0, False, scale_, enable_gqa)
    form = _form(query, key, key, enable_gqa)
    fits("the scores", (*_result_lead(form), query.size(-2), key.size(-2)))


def softmax(
    scores: Any, mask: Any = None, *, scale_: Any = 1.0, is_causal: Any = False, query_offset: Any = 0
) -> None:
    """Every argument of :func:`selfattn_ext.masked_softmax`."""
    floats({"scores": scores})
    if scores.dim() < 2:
        raise ValueError(f"scores must have at least 2 dimensions, (..., L, S), got {tuple(scores.shape)}")
    fits("the weights", scores.shape)
    scale(scale_, scores.dtype)
    flags(is_causal=is_causal)
    integer("query_offset", query_offset)
    if mask is not None:
        _mask_of("mask", mask, scores, tuple(scores.shape), "scores")
