"""Operators with gradients that torch.compile and torch.export write into their graphs.

Note [Gradients in graphs]
    A graph holds operators. Those of the compiled library have no gradients: an exported program made of them
    would compute, but its training would leave out, without an error, every parameter before an attention.
    torch.export does not accept an autograd.Function with its backward, and torch.compile refuses one that
    gets a tensor twice, as in self-attention without projections. So each differentiable function is also an
    operator, composed of the others in Python. The compiler traces into it; an exported graph keeps it until
    run_decompositions or AOTInductor asks for the operators of the compiled library. A step on a cache has no
    gradients, but is such an operator, too: it refuses tensors that require a gradient, and tells autograd
    which tensors it has written.

    Within a transform of torch.func, a graph of torch.compile holds a call of that function instead, because
    the dispatcher would remove the transform before it decomposes the operator. Within a vmap, torch.export
    does not accept such a function, so there the graph holds the operator, which has a rule for vmap.
    torch.export does trace derivatives, but the resulting programs return tensors without numbers, for
    torch's own operators, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from .. import ops, reference
from ..arguments import Keywords, OptionalTensor, Tensors, keywords_of
from ..aux_request import Wanted
from ..reference_statistics import AuxOutput
from . import onnx_graphs
from .attention_function import attention, vmapped
from .scores_and_softmax_functions import attention_scores, masked_softmax
from .statistics import attention_and_statistics

__all__ = [
    "arguments_of",
    "attention_scores_with_gradient",
    "attention_with_gradient",
    "composed",
    "is_exporting_vmap",
    "is_tracing_graph",
    "masked_softmax_with_gradient",
    "statistics_with_gradient",
]

_library = torch.library.Library(ops.NAMESPACE, "FRAGMENT")


def composed(name: str, arguments: str, results: str, function: Callable[..., Any]) -> Any:
    """Defines an operator that does what the function does, gradients included, on every device."""
    _library.define(f"{name}({arguments}) -> {results}")
    _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops, ops.NAMESPACE), name).default


def arguments_of(operator: Any, **renamed: str) -> str:
    """Returns the arguments in the schema of an operator, some of them under other names."""
    arguments = str(operator._schema).partition("(")[2].rpartition(") -> ")[0]
    for name, other in renamed.items():
        arguments = arguments.replace(name, other)
    return arguments


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    attn_mask: OptionalTensor = None,
    alibi_slopes: OptionalTensor = None,
    sinks: OptionalTensor = None,
    dropout_seed: OptionalTensor = None,
    **keywords: Any,
) -> list[Tensor]:
    tensors = Tensors(query, key, value, attn_mask, alibi_slopes, sinks, dropout_seed)
    if onnx_graphs.is_exporting():
        return onnx_graphs.wanted(tensors, scale, keywords, return_weights, return_lse)
    results = attention(tensors, scale, keywords, return_weights, return_lse)
    return [result for result in results if result is not None]


def _statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    results: Sequence[str],
    attn_mask: OptionalTensor = None,
    alibi_slopes: OptionalTensor = None,
    sinks: OptionalTensor = None,
    dropout_seed: OptionalTensor = None,
    **keywords: Any,
) -> list[Tensor]:
    tensors = Tensors(query, key, value, attn_mask, alibi_slopes, sinks, dropout_seed)
    if onnx_graphs.is_exporting():
        raise NotImplementedError("torch.onnx.export has no statistics of attention (return_aux)")
    wanted = Wanted(**dict.fromkeys(results, True))
    out, weights, found = attention_and_statistics(tensors, scale, keywords, wanted)
    named = {"weights": weights, **found._asdict()}
    return [out, *(named[name] for name in wanted.names())]


def _attention_scores(query: Tensor, key: Tensor, scale: float, *, kernel_name: str = "") -> Tensor:
    if onnx_graphs.is_exporting():
        return reference.attention_scores(query, key, scale)
    return attention_scores(query, key, scale, kernel_name)


def _masked_softmax(scores: Tensor, scale: float, *, mask: OptionalTensor = None, **keywords: Any) -> Tensor:
    if onnx_graphs.is_exporting():
        keywords.pop("kernel_name", None)
        return reference.masked_softmax(scores, mask, scale=scale, **keywords)
    return masked_softmax(scores, mask, scale, keywords)


class _Step(NamedTuple):
    """The callables that stand for a function in graphs."""

    operator: Any
    #: What Dynamo calls instead while it traces a transform of torch.func.
    in_transforms: Callable[..., Any]


def _step(name: str, arguments: str, results: str, function: Callable[..., Any]) -> _Step:
    operator = composed(name, arguments, results, function)

    @functools.wraps(function)
    def in_transforms(*args: Any, **kwargs: Any) -> Any:
        # torch.export may trace next what Dynamo has traced, so this is asked at every call.
        return (operator if is_exporting_vmap() else function)(*args, **kwargs)

    return _Step(operator, in_transforms)


_OF_ATTENTION = _step(
    "attention_with_gradient",
    arguments_of(ops.attention_forward, need_residual="return_weights", need_weights="return_lse"),
    "Tensor[]",
    _attention,
)
_OF_STATISTICS = _step(
    "attention_and_statistics_with_gradient",
    arguments_of(
        ops.attention_statistics, **{"bool need_residual=False, bool need_weights=False": "str[] results"}
    ),
    "Tensor[]",
    _statistics,
)
_OF_SCORES = _step(
    "attention_scores_with_gradient", arguments_of(ops.attention_scores), "Tensor", _attention_scores
)
_OF_SOFTMAX = _step(
    "masked_softmax_with_gradient", arguments_of(ops.masked_softmax), "Tensor", _masked_softmax
)


def _attention_under_vmap(*inputs: Any, **options: Any) -> Any:
    """Computes the operator of attention for all slices of a vmap at once; the dispatcher calls this.

    The other two operators have no such rule, so torch calls them once for each slice.
    """
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    query, key, value, scale = inputs
    want_weights, want_lse = (options.pop(name, False) for name in ("return_weights", "return_lse"))
    names = ("attn_mask", "alibi_slopes", "sinks", "dropout_seed")
    tensors = Tensors(query, key, value, *(options.pop(name, None) for name in names))

    def apply(*inputs: Any) -> tuple[Tensor, ...]:
        *given, scale, keywords = inputs
        merged = keywords_of(Tensors(*given), keywords)
        operator = _OF_ATTENTION.operator
        return tuple(operator(*given[:3], scale, return_weights=want_weights, return_lse=want_lse, **merged))

    interpreter: Any = retrieve_current_functorch_interpreter()
    rule = functools.partial(vmapped, apply)
    return list(custom_function_call_vmap_helper(interpreter, rule, apply, *tensors, scale, options))


_library.impl("attention_with_gradient", _attention_under_vmap, "FuncTorchBatched")


def is_tracing_graph() -> bool:
    """Tells whether the running code is traced into a graph, other than one of torch.func's transforms."""
    tracing = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    return tracing and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_exporting_vmap() -> bool:
    """Tells whether torch.export traces transforms without Dynamo.

    Raises:
        RuntimeError: some of the transforms are derivatives.
    """
    if not torch.compiler.is_exporting():
        return False
    levels = get_interpreter_stack() or ()
    if forward_ad._current_level >= 0 or any(level.key() != TransformType.Vmap for level in levels):
        raise RuntimeError(
            "torch.export cannot trace derivatives of attention by torch.func (grad, vjp, jvp and functions "
            "made of them), because the exported program would return tensors without numbers: export the "
            "function itself, and differentiate the exported program"
        )
    return True


def _put_in_graphs() -> None:
    """Tells Dynamo to take each function as one step of its graph, like torch's own."""
    for step in (_OF_ATTENTION, _OF_STATISTICS, _OF_SCORES, _OF_SOFTMAX):
        torch.compiler.allow_in_graph(step.in_transforms)


# Dynamo calls it while it traces, instead of tracing it.
_put_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_graph(step: _Step) -> Any:
    """Returns what stands for a function in the graph that is being traced, None if none is traced.

    See Note [Gradients in graphs].
    """
    if is_tracing_graph():
        return step.operator
    if torch.compiler.is_dynamo_compiling():
        _put_in_graphs()
        return step.in_transforms
    return step.operator if is_exporting_vmap() else None


def attention_with_gradient(
    tensors: Tensors, scale: float, keywords: Keywords, want_weights: bool, want_lse: bool
) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
    """Calls :func:`.attention_function.attention`, in a graph as one operator."""
    compute = _in_graph(_OF_ATTENTION)
    if compute is None:
        return attention(tensors, scale, keywords, want_weights, want_lse)
    merged = keywords_of(tensors, keywords)
    results = compute(*tensors[:3], scale, return_weights=want_weights, return_lse=want_lse, **merged)
    return results[0], results[1] if want_weights else None, results[-1] if want_lse else None


def statistics_with_gradient(
    tensors: Tensors, scale: float, keywords: Keywords, wanted: Wanted
) -> tuple[Tensor, OptionalTensor, AuxOutput]:
    """Calls :func:`.statistics.attention_and_statistics`, in a graph as one operator."""
    compute = _in_graph(_OF_STATISTICS)
    if compute is None:
        return attention_and_statistics(tensors, scale, keywords, wanted)
    merged = keywords_of(tensors, keywords)
    out, *rest = compute(*tensors[:3], scale, results=wanted.names(), **merged)
    named = dict(zip(wanted.names(), rest, strict=True))
    return out, named.pop("weights", None), AuxOutput(**named)


def attention_scores_with_gradient(query: Tensor, key: Tensor, scale: float, kernel: str = "") -> Tensor:
    """Calls :func:`.scores_and_softmax_functions.attention_scores`, in a graph as one operator."""
    compute = _in_graph(_OF_SCORES)
    if compute is None:
        return attention_scores(query, key, scale, kernel)
    return compute(query, key, scale, kernel_name=kernel)


def masked_softmax_with_gradient(
    scores: Tensor, mask: OptionalTensor, scale: float, keywords: Keywords
) -> Tensor:
    """Calls :func:`.scores_and_softmax_functions.masked_softmax`, in a graph as one operator."""
    compute = _in_graph(_OF_SOFTMAX)
    if compute is None:
        return masked_softmax(scores, mask, scale, keywords)
    merged = keywords if mask is None else {**keywords, "mask": mask}
    return compute(scores, scale, **merged)
