"""flex_attention in the graphs of torch.compile.

Note [Functions in graphs]
    Dynamo writes a call of flex_attention as one step with a graph of each function, and lists the
    tensors that the functions capture. It does so for operators that it knows by name, and knows one
    more: ours. Unlike torch's, our operator is no node of what comes after Dynamo: called with numbers or
    with what stands for them, it records the functions and calls the operators of the compiled library,
    which autograd, AOTAutograd and inductor know how to take. So a compiled training step holds the
    forward kernel, the backward kernel and nothing that knows Python.

    Inside a graph of a function, operations on captured tensors alone are computed for the whole tensors,
    once, where the compiler sees them and has their gradients. The rest is recorded, with tensors of the
    same form in the place of those that it reads, since a compiler's stand-ins have no numbers.

Note [Compiled results on disk]
    The operators name a compiled function by a digest of its source. torch may find a compiled graph on
    disk that another process has made; Dynamo runs our operator before it looks, and that loads the
    function under the same name, provided that the two processes had the same compiler and this package's
    same version. So these are part of the step, and of what torch looks the graph up by.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .. import ops, sources
from ..arguments import AttentionCall, AttentionOptions, OptionalTensor, Tensors, call_checks, prepare
from ..attend import attend
from ..flex import attention as flex
from ..flex import block_masks, compiler
from ..flex.recorder import UnsupportedFunctionError
from ..flex.tracing import Traced, trace
from ..reference import accumulation_dtype

__all__ = ["attention"]

_NAME = "selfattn_flex_attention"
_OF_SCORE = 5  # inputs of score_mod: the score and its indices
_OF_MASK = 4


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    *,
    return_aux: Any,
) -> Any:
    """:func:`selfattn_ext.flex_attention` as Dynamo traces it."""
    flex._check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    wants_max = return_aux is not None and return_aux.max_scores
    options = {"enable_gqa": enable_gqa, "max_scores": wants_max}
    options |= {"has_blocks": block_mask is not None, "made_by": _put_in_graphs()}
    if score_mod is None:
        score_mod = _unchanged
    if block_mask is None:
        blocks: tuple[Any, ...] = (None, None, None, None, 1, 1, _everything)
    else:
        blocks = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices, *block_mask.BLOCK_SIZE, block_mask.mask_mod,
        )  # fmt: skip
    out, lse, largest = _operator(query, key, value, score_mod, blocks, scale, options)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest if wants_max else None)
    return (out, lse) if return_lse else out


def _unchanged(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _everything(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return batch.new_ones((), dtype=torch.bool)


def _put_in_graphs() -> str:
    """Makes the operator known to Dynamo. Returns what decides, beside a graph, how it is compiled."""
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
    """One step of Dynamo's graph; see Note [Functions in graphs]."""

    def __init__(self) -> None:
        super().__init__(_NAME, cacheable=True)

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: GraphModule,
        block_mask: tuple[Any, ...],
        scale: float | None,
        options: dict[str, Any],
        of_score: Sequence[Any],
        of_mask: Sequence[Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and the largest scores, where they are asked for."""
        *lists, rows, columns, mask_mod = block_mask
        functions = _Functions(
            _Function(score_mod, of_score, _OF_SCORE), _Function(mask_mod, of_mask, _OF_MASK)
        )
        blocks = _Blocks(_Lists(*lists) if options["has_blocks"] else None, (rows, columns))
        largest: list[Tensor] = []

        def compute(call: AttentionCall) -> tuple[Tensor, OptionalTensor, OptionalTensor]:
            out, lse, row_max = _computed(call, functions, blocks, options["max_scores"])
            largest.append(lse.new_empty(0) if row_max is None else row_max)
            return out, None, lse

        given = AttentionOptions(None, 0.0, False, scale, options["enable_gqa"], return_lse=True)
        out, lse = attend(AttentionCall(query, key, value, given), compute, call_checks.attention)
        return out, lse, largest[0]


_operator: Any = _Attention()  # as Dynamo lets it be called, with functions


class _Function:
    """The graph of a function, parted in what it computes of captured tensors alone and the rest."""

    def __init__(self, module: GraphModule, captured: Sequence[Any], inputs: int):
        self.module = module
        self.captured = tuple(captured)
        self._placeholders = module.graph.find_nodes(op="placeholder")
        #: What is known before there is a score.
        self._known: dict[Node, Any] = {}
        for node, given in zip(self._placeholders[inputs:], captured, strict=True):
            self._known[node] = _as_tensor(given)
        interpreter = Interpreter(module)
        interpreter.env = self._known
        for node in module.graph.nodes:
            is_step = node.op not in ("placeholder", "output")
            if is_step and all(each in self._known for each in node.all_input_nodes):
                self._known[node] = interpreter.run_node(node)
        self._used = {node for node in self._known if any(user not in self._known for user in node.users)}

    def of(self, replace: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        """The function of a score, or of indices, with others in the place of the tensors that it reads."""
        known = {node: pytree.tree_map_only(Tensor, replace, self._known[node]) for node in self._used}

        def function(*inputs: Tensor) -> Tensor:
            given = dict(zip(self._placeholders, inputs, strict=False))
            unused = dict.fromkeys(self._known)
            interpreter = Interpreter(self.module, garbage_collect_values=False)
            interpreter.extra_traceback = False
            result: Tensor = interpreter.run(initial_env={**unused, **known, **given})
            return result

        return function


class _Functions(NamedTuple):
    score: _Function
    mask: _Function


def _as_tensor(given: Any) -> Any:
    """A number that changes from call to call, as a tensor: so functions may capture it."""
    if isinstance(given, torch.SymInt):
        return torch.scalar_tensor(given, dtype=torch.int64)  # type: ignore[arg-type]
    if isinstance(given, torch.SymFloat):
        return torch.scalar_tensor(given, dtype=torch.float32)  # type: ignore[arg-type]
    return given


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
    call: AttentionCall, functions: _Functions, blocks: _Blocks, wants_max: bool
) -> tuple[Tensor, Tensor, OptionalTensor]:
    """out, lse and, where it is asked for, the largest score of each query."""
    tensors, scale, keywords, _ = prepare(call)
    try:
        traced, captured = _recorded(tensors, functions)
        keywords |= flex.loaded(traced)
    except (UnsupportedFunctionError, compiler.CompilerError) as reason:
        flex.warn(reason)
        return _torchs(tensors, scale, functions, blocks)
    block_map, size = (None, None) if blocks.lists is None else (_block_map(*blocks.lists), blocks.size)
    whole = flex.Call(scale, keywords, False, True, traced, block_map, size)
    out, lse = flex._FlexAttention.apply(*tensors, *captured, whole)
    largest = None
    if wants_max:
        # 16-bit kernels need not know it, so those of float32 tell.
        dtype = accumulation_dtype(tensors.query.dtype)
        query, key, value = (each.detach().to(dtype) for each in (*tensors[:2], tensors.value[..., :0]))
        largest = flex._forward(Tensors(query, key, value), whole, captured)[1]
    return out, lse, largest


def _torchs(
    tensors: Tensors, scale: float, functions: _Functions, blocks: _Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's operator, which takes any function; inductor refuses its gradients on the CPU."""
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
    # It counts in powers of two.
    return out, lse * math.log(2.0), largest * math.log(2.0)


def _recorded(tensors: Tensors, functions: _Functions) -> tuple[Traced, list[Tensor]]:
    """What the functions compute, and the captured tensors in the operators' order."""
    of_stand_in: dict[int, Tensor] = {}
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def stand_in(tensor: Tensor) -> Tensor:
        made = _stand_in(tensor)
        of_stand_in[id(made)] = tensor
        return made

    with _disable_current_modes():
        score_mod, mask_mod = (function.of(stand_in) for function in functions)
        dtype, device = accumulation_dtype(tensors.query.dtype), tensors.query.device
        traced = trace(score_mod, mask_mod, dtype, device, requires_grad)
    return traced, [of_stand_in.get(id(tensor), tensor) for tensor in traced.tensors]


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same form, whose numbers nobody reads; those without dimensions may be divided by."""
    sizes, strides = ([_hint(number) for number in each] for each in (tensor.shape, tensor.stride()))
    made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    if not sizes:
        made.fill_(1)
    return made.requires_grad_(tensor.requires_grad)


def _hint(number: int | torch.SymInt) -> int:
    """A number that a symbol may stand for; functions are compiled for any."""
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else 2


def _block_map_of_lists(*lists: Any) -> Tensor:
    return block_masks.block_map(_Lists(*lists))


# An operator, for it looks at numbers.
_library = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_library.define(
    "block_map(Tensor counts, Tensor indices, Tensor? full_counts, Tensor? full_indices) -> Tensor"
)
_library.impl("block_map", _block_map_of_lists, "CPU")
_block_map = getattr(torch.ops, ops.NAMESPACE).block_map.default


@torch.library.register_fake(f"{ops.NAMESPACE}::block_map")  # type: ignore[untyped-decorator]
def _(counts: Tensor, indices: Tensor, *full: OptionalTensor) -> Tensor:
    return indices.new_empty(indices.shape, dtype=torch.uint8)
