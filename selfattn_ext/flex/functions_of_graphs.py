"""Records the functions that Dynamo has written as graphs.

Operations on captured tensors alone are computed for the whole tensors, once, where the compiler sees them
and has their gradients. The rest is recorded, with tensors of the same form in the place of those that it
reads, since a compiler's stand-ins have no numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..arguments import Tensors
from ..reference import accumulation_dtype
from .nodes import UnsupportedFunctionError
from .recorder import tensors_in
from .tracing import Traced, trace

__all__ = ["GraphFunction", "GraphFunctions", "recorded"]


class GraphFunction:
    """The graph of a function, split into steps on captured tensors alone and the rest."""

    def __init__(self, module: GraphModule, captured: Sequence[Any], inputs: int):
        self.module = module
        self.captured = tuple(captured)
        self._placeholders = module.graph.find_nodes(op="placeholder")
        #: The results that are known before there is a score.
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
        """The function of a score, or of indices, with other tensors in place of those that it reads."""
        known = {node: pytree.tree_map_only(Tensor, replace, self._known[node]) for node in self._used}

        def function(*inputs: Tensor) -> Tensor:
            given = dict(zip(self._placeholders, inputs, strict=False))
            unused = dict.fromkeys(self._known)
            interpreter = Interpreter(self.module, garbage_collect_values=False)
            interpreter.extra_traceback = False
            result: Tensor = interpreter.run(initial_env={**unused, **known, **given})
            return result

        return function


class GraphFunctions(NamedTuple):
    score: GraphFunction
    mask: GraphFunction


def _as_tensor(given: Any) -> Any:
    """A number that changes from call to call, as a tensor: so functions may capture it."""
    if isinstance(given, torch.SymInt):
        return torch.scalar_tensor(given, dtype=torch.int64)  # type: ignore[arg-type]
    if isinstance(given, torch.SymFloat):
        return torch.scalar_tensor(given, dtype=torch.float32)  # type: ignore[arg-type]
    return given


def recorded(
    tensors: Tensors, functions: GraphFunctions, sizes: Sequence[int | torch.SymInt], on_cache: bool
) -> tuple[Traced, list[Tensor]]:
    """The recorded functions, and the captured tensors in the operators' order."""
    of_stand_in: dict[int, Tensor] = {}
    # An exported program may be trained later, whatever requires a gradient now.
    exporting = torch.compiler.is_exporting() and not on_cache
    requires_grad = exporting or any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def stand_in(tensor: Tensor) -> Tensor:
        made = _stand_in(tensor)
        made.requires_grad_(tensor.is_floating_point() if exporting else tensor.requires_grad)
        of_stand_in[id(made)] = tensor
        return made

    with _no_modes(), torch.set_grad_enabled(exporting or torch.is_grad_enabled()):
        score_mod, mask_mod = (function.of(stand_in) for function in functions)
        dtype, device = accumulation_dtype(tensors.query.dtype), tensors.query.device
        with _Unread(of_stand_in):
            traced = trace(score_mod, mask_mod, dtype, device, requires_grad, sizes)
    return traced, [of_stand_in.get(id(tensor), tensor) for tensor in traced.tensors]


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """A block whose operations a compiler does not trace."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


class _Unread(TorchDispatchMode):
    """Refuses to compute with stand-ins, in the middle of one of torch's functions, for example."""

    def __init__(self, stand_ins: Container[int]) -> None:
        super().__init__()
        self.stand_ins = stand_ins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(tensor) in self.stand_ins for tensor in tensors_in(args)):
            raise UnsupportedFunctionError(f"it uses {func} on a captured tensor, together with an index")
        return func(*args, **(kwargs or {}))


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same form, whose numbers are not read; one without dimensions may be divided by."""
    sizes, strides = ([_hint(number) for number in each] for each in (tensor.shape, tensor.stride()))
    made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return made if sizes else made.fill_(1)


def _hint(number: int | torch.SymInt) -> int:
    """A number that a symbol may stand for; functions are compiled for any number."""
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else 2
