"""Functions of scores in the graphs of torch.compile and torch.export.

Note [Functions in graphs]
    Dynamo writes a call of flex_attention as one step with a graph of each function, and lists the
    tensors that the functions capture. It does so for operators that it knows by name, and this package
    makes its own known. Different from torch's, it is no node of the graphs after Dynamo: called with
    numbers or stand-ins for them, it records the functions and calls the operators of the compiled library,
    which autograd, AOTAutograd and inductor know how to take. So a compiled training step holds the
    forward kernel and the backward kernel, and nothing of Python.

    functions_of_graphs.py says what becomes of the graph of a function.

    An exported program is to be trained later, saved, and run by other processes. So its graph keeps the call
    as one operator with gradients (Note [Gradients in graphs] in autograd/graph_operators.py), and that has
    the recorded functions as a text (:mod:`.written`), with the gradients of all that may ever have some,
    whatever requires a gradient while torch.export traces. torch.export calls Dynamo for this one call where
    it does not use it for all.

Note [Compiled results on disk]
    The operators name a compiled function by a digest of its source. torch may find a compiled graph on
    disk that another process has made; Dynamo runs our operator before it looks, and that loads the
    function under the same name, provided that the two processes had the same compiler and this package's
    same version. So these are part of the step, and of what torch looks the graph up by.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from .. import ops
from ..arguments import Keywords, OptionalTensor, Tensors, keywords_of
from ..autograd import onnx_graphs
from ..autograd.graph_operators import arguments_of, composed
from ..aux_request import Wanted
from ..build import sources
from . import block_masks, compiler, formula, kernel_calls, written
from .flex_call import Call, Functions
from .functions_of_graphs import GraphFunction, GraphFunctions, recorded
from .nodes import UnsupportedFunctionError

__all__ = ["CacheOperator", "outside_of_graphs", "traced_results"]

_NAME = "selfattn_flex_attention"
_OF_SCORE = 5  # inputs of score_mod: the score and its indices
_OF_MASK = 4
#: Keywords that torch's operator may ignore.
_OF_PROCESS = {"float32_precision", "kernel_name", "batch_invariant"}
_NOT_IN_GRAPHS = (
    "a function that is not compiled must stay out of the graphs of torch.compile and torch.export where "
    "there are options, packed sequences or a cache: in torch.compile, torch.compiler.disable does that to "
    "the function that calls"
)


class CacheOperator(NamedTuple):
    """The operator that computes a step on a cache in a graph, and the new keys and values that it writes."""

    name: str
    news: tuple[Tensor, ...]


def traced_results(
    tensors: Tensors,
    scale: float,
    keywords: Keywords,
    wants: tuple[bool, bool, bool],
    functions: Functions,
    on_cache: CacheOperator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, weights, lse and max_scores where a graph is traced, with an empty tensor in place of each result
    that there is not. ``wants`` are the last three. With ``on_cache``, key and value are caches, and there is
    no max_scores.
    """
    call = tensors, scale, keywords, wants, functions, on_cache
    if torch.compiler.is_dynamo_compiling():
        return _results(*call)
    # torch.export runs without Dynamo here; torch's own flex_attention calls it in this way, too.
    from torch._higher_order_ops.utils import _maybe_compile_and_run_fn

    results: tuple[Tensor, Tensor, Tensor, Tensor] = _maybe_compile_and_run_fn(_results, *call)
    return results


def _results(
    tensors: Tensors,
    scale: float,
    keywords: Keywords,
    wants: tuple[bool, bool, bool],
    functions: Functions,
    on_cache: CacheOperator | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score_mod, mask_mod, block_mask = functions
    blocks: tuple[Any, ...] = (None, None, None, None, 1, 1)
    if block_mask is not None:
        blocks = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices, *block_mask.BLOCK_SIZE,
        )  # fmt: skip
    query, key, value, *others = tensors
    call = {
        "others": others,
        "keywords": keywords,
        "wants": wants,
        "cache_operator": None if on_cache is None else on_cache.name,
        "news": () if on_cache is None else on_cache.news,
        "made_by": _put_in_graphs(),
    }
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _operator(
        query,
        key,
        value,
        _unchanged if score_mod is None else score_mod,
        (*blocks, _everything if mask_mod is None else mask_mod),
        scale,
        call,
    )
    return results


def _unchanged(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _everything(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return batch.new_ones((), dtype=torch.bool)


def _put_in_graphs() -> str:
    """Makes the operator known to Dynamo. Returns a digest of all that compiled results depend on besides a
    graph.
    """
    from torch._dynamo.variables import higher_order_ops as known

    known._hop_name_to_variable_class.setdefault(_NAME, known.FlexAttentionHigherOrderVariable)
    try:
        surroundings = compiler._surroundings()
    except compiler.CompilerError as reason:
        surroundings = str(reason)
    return hashlib.sha256(f"{sources.version()}\n{surroundings}".encode()).hexdigest()


# Dynamo calls it while it traces, instead of tracing it.
_put_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Attention(torch._ops.HigherOrderOperator):
    """The operator that is a step of Dynamo's graph: see Note [Functions in graphs]."""

    def __init__(self) -> None:
        super().__init__(_NAME, cacheable=True)

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: GraphModule,
        block_mask: tuple[Any, ...],
        scale: float,
        call: dict[str, Any],
        of_score: Sequence[Any],
        of_mask: Sequence[Any],
    ) -> tuple[Tensor, ...]:
        *lists, rows, columns, mask_mod = block_mask
        tensors = Tensors(query, key, value, *call["others"])
        functions = GraphFunctions(
            GraphFunction(score_mod, of_score, _OF_SCORE), GraphFunction(mask_mod, of_mask, _OF_MASK)
        )
        blocks = _Blocks(None if lists[0] is None else _Lists(*lists), (rows, columns))
        results = _computed(tensors, scale, call, functions, blocks)
        return tuple(query.new_empty(0) if result is None else result for result in results)


_operator: Any = _Attention()  # Any, as Dynamo lets it be called with functions


class _Lists(NamedTuple):
    """The part of a BlockMask that says which blocks there are."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: OptionalTensor
    full_kv_indices: OptionalTensor


class _Blocks(NamedTuple):
    lists: _Lists | None
    size: tuple[int, int]


def _computed(
    tensors: Tensors, scale: float, given: dict[str, Any], functions: GraphFunctions, blocks: _Blocks
) -> tuple[Any, ...]:
    keywords, on_cache = dict(given["keywords"]), given["cache_operator"]
    block_map, size = (None, None) if blocks.lists is None else (_block_map(*blocks.lists), blocks.size)
    try:
        sizes = kernel_calls.sizes_of(*tensors[:2], keywords)
        traced, captured = recorded(tensors, functions, sizes, on_cache is not None)
        keywords |= kernel_calls.loaded(traced)
        text = written.write(traced) if torch.compiler.is_exporting() else None
    except (UnsupportedFunctionError, compiler.CompilerError) as reason:
        has_options = any(tensor is not None for tensor in tensors[3:]) or given["wants"][0]
        if has_options or keywords.keys() - _OF_PROCESS or on_cache is not None:
            raise UnsupportedFunctionError(_NOT_IN_GRAPHS) from reason
        kernel_calls.warn(reason)
        return _torchs(tensors, scale, functions, blocks)
    want_weights, want_lse, want_max_scores = given["wants"]
    if text is None:
        call = Call(scale, keywords, Wanted(*given["wants"]), traced, block_map, size)
        out, weights, found = kernel_calls.all_results(tensors, call, captured)
        return out, weights, found.lse, found.max_scores
    keywords = {
        **keywords_of(tensors, keywords),
        "return_weights": want_weights,
        "return_lse": want_lse,
        "score_function": text,
        **kernel_calls.inputs_of(traced, captured),
    }
    if on_cache is None:
        keywords |= {"block_map": block_map, "block_size": size, "return_max_scores": want_max_scores}
        return _attention_operator(*tensors[:3], scale, **keywords)
    operator = getattr(getattr(torch.ops, ops.NAMESPACE), on_cache).default
    out, *rest = operator(*tensors[:3], *given["news"], scale, **keywords)
    return out, rest[0] if want_weights else None, rest[-1] if want_lse else None, None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    return_max_scores: bool = False,
    attn_mask: OptionalTensor = None,
    alibi_slopes: OptionalTensor = None,
    sinks: OptionalTensor = None,
    dropout_seed: OptionalTensor = None,
    block_map: OptionalTensor = None,
    block_size: Sequence[int] | None = None,
    score_function: str,
    captured: Sequence[Tensor] = (),
    captured_numbers: Sequence[float] = (),  # the text has them, too
    **keywords: Any,
) -> list[Tensor]:
    tensors = Tensors(query, key, value, attn_mask, alibi_slopes, sinks, dropout_seed)
    size = None if block_size is None else (block_size[0], block_size[1])
    wanted = Wanted(return_weights, return_lse, return_max_scores)
    if onnx_graphs.is_exporting():
        traced = written.recorded(score_function)
        call = Call(scale, keywords, wanted, traced, block_map, size)
        compute = functools.partial(onnx_graphs.attention, want_weights=return_weights, want_lse=return_lse)
        out, weights, lse = formula.of_traced(tensors, captured, call, compute)
        return [out, weights, lse, lse + weights.amax(-1).log() if lse.dim() == 3 else lse]
    traced, loaded = written.read(score_function, block_map is not None)
    call = Call(scale, {**keywords, **loaded}, wanted, traced, block_map, size)
    out, weights, found = kernel_calls.all_results(tensors, call, captured)
    results = (out, weights, found.lse, found.max_scores)
    return [query.new_empty(0) if result is None else result for result in results]


_attention_operator = composed(
    "flex_attention_with_gradient",
    arguments_of(
        ops.attention_forward,
        **{
            "need_residual": "return_weights",
            "bool need_weights=False": "bool return_lse=False, bool return_max_scores=False",
        },
    ),
    "Tensor[]",
    _attention,
)


def _torchs(tensors: Tensors, scale: float, functions: GraphFunctions, blocks: _Blocks) -> tuple[Any, ...]:
    """The call by torch's operator, which takes any function; inductor refuses its gradients on the CPU."""
    from torch.nn.attention import flex_attention as torchs

    query, key, value = tensors[:3]
    if blocks.lists is None:
        mask = torchs._create_empty_block_mask(query, key)
    else:
        lengths = query.size(2), key.size(2)
        mask = torchs.BlockMask.from_kv_blocks(*blocks.lists, BLOCK_SIZE=blocks.size, seq_lengths=lengths)
    out, lse, largest = torch.ops.higher_order.flex_attention(
        query, key, value, functions.score.module, (*mask.as_tuple()[:-1], functions.mask.module), scale,
        torchs._apply_kernel_options(query, key, value, False, None), functions.score.captured,
        functions.mask.captured,
    )  # fmt: skip
    # torch's operator counts in powers of two.
    return out, None, lse * math.log(2.0), largest * math.log(2.0)


def _block_map_of_lists(*lists: Any) -> Tensor:
    return block_masks.block_map(_Lists(*lists))


# It is an operator because it looks at numbers.
_library = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_library.define(
    "block_map(Tensor counts, Tensor indices, Tensor? full_counts, Tensor? full_indices) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("block_map", _block_map_of_lists, _device)
_block_map_operator = getattr(torch.ops, ops.NAMESPACE).block_map.default


def _block_map(*lists: OptionalTensor) -> Tensor:
    return (_block_map_of_lists if onnx_graphs.is_exporting() else _block_map_operator)(*lists)


@torch.library.register_fake(f"{ops.NAMESPACE}::block_map")  # type: ignore[untyped-decorator]
def _(counts: Tensor, indices: Tensor, *full: OptionalTensor) -> Tensor:
    return indices.new_empty(indices.shape, dtype=torch.uint8)


_Python = TypeVar("_Python", bound=Callable[..., Any])


def outside_of_graphs(function: _Python) -> _Python:
    """Does to a function what :func:`torch.compiler.disable` does, without loading the compiler, which takes
    seconds.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_Python, call)
