"""Records a function of one score as the list of operations that it is made of.

The function is called once, with tensors of no dimensions. A dispatch mode below autograd sees every
operation that depends on them and writes it down; operations on captured tensors alone are computed, with
their gradients, and their results count as captured.

Note [Recorded under autograd]
    If a gradient may be asked for, the one run of the function is a live run of torch's autograd, with a
    score and elements of captured tensors that require gradients (:mod:`.indexing` makes them); then
    torch.autograd.grad runs under the same recorder. So detach, no_grad, a torch.autograd.Function and
    operations in place mean for gradients what they mean to torch, and each operation has the derivative that
    torch gives it, even where it is written as simpler ones. For derivatives of second order the operations
    are kept as they were called (:class:`.nodes.Step`), with the operands that have gradients.

Note [Values of a tensor]
    The number that a tensor stands for is found by its memory, so that views and detached tensors stand for
    the same number and an operation in place changes what all of them stand for. Operands are looked up
    before the operation: what was recorded keeps the number that it was given. Tensors that stand for
    something hold numbers that nobody reads.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .decompositions import decomposition_of
from .nodes import Load, Node, Number, Step, Still, UnsupportedFunctionError
from .operations import C_TYPES, is_known

__all__ = ["Recorder", "place_of_caller", "tensors_in"]

aten = torch.ops.aten


_CONSTANTS = {"scalar_tensor", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
_VALUE_OF = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1, "zero": 0}
_EMPTY = {"empty", "empty_like", "new_empty"}
_SAME = {"detach", "alias", "clone", "lift_fresh", "lift_fresh_copy", "view", "_unsafe_view", "expand"}
_SAME |= {"squeeze", "permute", "_reshape_alias", "as_strided"}
_TELL_VALUES = {"_local_scalar_dense", "is_nonzero", "item", "equal"}
#: Divisions, which for integers look whether the divisor is 0.
_DIVISIONS = {"remainder", "fmod", "floor_divide", "div"}
#: Operations on single numbers that torch does not call pointwise.
_POINTWISE = {"hardswish", "log_sigmoid_forward", "_prelu_kernel", "huber_loss", "smooth_l1_loss", "mse_loss"}


@functools.cache
def name_of(op: Any) -> str:
    """An operation's name without its overload: "add" for aten.add.Tensor and aten.add_.Tensor."""
    name: str = op._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


@functools.cache
def _is_mutable(op: Any) -> bool:
    return bool(op._schema.is_mutable)


@functools.cache
def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


@functools.cache
def _is_known(name: str) -> bool:
    return is_known(name)


@functools.cache
def _is_pointwise(op: Any) -> bool:
    name = name_of(op)
    return torch.Tag.pointwise in op.tags or name in _POINTWISE or _is_known(name)


def tensors_in(given: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists among them."""
    found: list[Tensor] = []
    for each in given:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_in(each)
    return found


#: The place of an element in memory. A tensor with dimensions has another place than its first element.
_Place = tuple[int, Any, torch.dtype, int]


def _place(tensor: Tensor) -> _Place:
    if not torch._C._has_storage(tensor):
        return id(tensor), 0, tensor.dtype, tensor.dim()
    offset = tensor.storage_offset()
    known_offset = offset if type(offset) is int else str(offset)
    return tensor.untyped_storage()._cdata, known_offset, tensor.dtype, tensor.dim()


class Recorder(TorchDispatchMode):
    """Writes down the operations on its inputs: see Note [Values of a tensor]."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        #: Whether operations are kept as they were called.
        self.keeps_steps = True
        #: An operation that cannot be computed again from the steps that are kept.
        self.cannot_repeat: str | None = None
        self._of: dict[_Place, Node] = {}
        #: Memory that was made while the function ran, and of that the memory that the recorder made.
        self._made: set[_Place] = set()
        self._own: set[_Place] = set()
        self._alive: list[Tensor] = []
        self._depth = 0

    def know(self, tensor: Tensor, node: Node) -> Tensor:
        """Has ``tensor``, which shares no memory, stand for ``node`` from now on."""
        place = _place(tensor)
        self._of[place] = node
        self._made.add(place)
        self._own.add(place)
        self._alive.append(tensor)
        return tensor

    def known(self, tensor: Tensor) -> Node | None:
        """The node that a tensor stands for, if it stands for one."""
        with torch._C.DisableTorchFunction():
            return self._of.get(_place(tensor))

    def blank(self, dtype: torch.dtype, sizes: Sequence[int] = ()) -> Tensor:
        """A tensor that may stand for something. Integers may be divided by it."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            made = torch.ones((), dtype=dtype, device=self.device)
            return made.expand(sizes) if sizes else made

    def node(self, value: Any) -> Node:
        """The node of a tensor or of a number of Python."""
        if not isinstance(value, Tensor):
            # The number keeps all its digits; each operation rounds it to its own dtype.
            dtype = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
            if dtype == torch.int64 and value >= 2**63:
                dtype = torch.float64  # torch takes such a number as the bits of an integer, or as a float
            return Number("number", (), dtype, value=value)
        known = self.known(value)
        if known is None:
            if value.dim():
                raise UnsupportedFunctionError(
                    f"it computes with all of a tensor of {tuple(value.shape)}, not with one element"
                )
            known = self._made_before(value) if _place(value) in self._made else self.load(value, ())
            self._of[_place(value)] = known
            self._alive.append(value)
        elif isinstance(known, Load) and value.dim():
            raise UnsupportedFunctionError("it takes more than an element of a tensor at once")
        return known

    def _made_before(self, tensor: Tensor) -> Node:
        """The node of a tensor that the function itself has made, and may change later."""
        if type(tensor) is Tensor and tensor.is_cpu and not tensor.requires_grad:
            with torch._C._DisableTorchDispatch():
                value = tensor.item()
            return Number("number", (), tensor.dtype, value=value, is_tensor=True)
        return self.load(tensor.clone(), ())

    def load(self, tensor: Tensor, args: Iterable[Node | None]) -> Load:
        """An element of a captured tensor, or a part of it."""
        version = None if tensor.is_inference() else tensor._version
        return Load("load", tuple(args), tensor.dtype, tensor=tensor, version=version)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._called(func, name_of(func), args, kwargs or {})

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs.values())
        if not any(_place(tensor) in self._of for tensor in tensors):
            return self._of_others(func, name, args, kwargs, tensors)
        if name in _TELL_VALUES:
            raise ValueError(
                "a function of scores must not decide by the value of a score or an index in Python, "
                "for it is compiled once for all of them: use torch.where instead" + place_of_caller()
            )
        if func.namespace == "prim" or name == "_has_same_storage_numel":
            return func(*args, **kwargs)  # torch itself asks tensors this
        if name == "index":
            return self._index(*args)
        if name in _SAME:
            return self._same(func, args, kwargs)
        if name in _EMPTY:
            with torch._C._DisableTorchDispatch():
                return self._made_here(func(*args, **kwargs))
        if not _is_mutable(func) and (name in _CONSTANTS or name in _VALUE_OF or name == "full_like"):
            return self._constant(func, name, args, kwargs)
        if _is_mutable(func):
            return self._in_place(func, name, args, kwargs)
        return self._operation(func, name, args, kwargs)

    def _of_others(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Computes an operation that depends on no score and no index."""
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dim():
            return result
        if _is_random(func):
            raise UnsupportedFunctionError(f"it uses {func}, whose numbers would be the same for all scores")
        if _is_mutable(func):
            return result
        if not tensors and name in _CONSTANTS and type(_value_of(name, args)) in (bool, int, float):
            return self._constant(func, name, args, kwargs)
        place = _place(result)
        if name == "lift_fresh" or all(place[0] != _place(tensor)[0] for tensor in tensors):
            self._made_here(result)
        return result

    def _made_here(self, tensor: Tensor) -> Tensor:
        self._made.add(_place(tensor))
        self._alive.append(tensor)
        return tensor

    def _same(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        with torch._C._DisableTorchDispatch():
            result: Tensor = func(*args, **kwargs)
        source = args[0]
        if result.dim() != source.dim() or result.dtype != source.dtype or result.shape != source.shape:
            raise UnsupportedFunctionError(f"it uses {func} on a score or an index")
        return self.know(result, self._of[_place(source)])

    def _constant(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        with torch._C._DisableTorchDispatch():
            result: Tensor = func(*args, **kwargs)
        if result.dim():
            return result
        node = Number("number", (), result.dtype, value=_value_of(name, args), is_tensor=True)
        return self.know(result, node)

    def _index(self, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        known = self._of.get(_place(source))
        if known is not None and not isinstance(known, Load):
            raise UnsupportedFunctionError("it takes an element of something that it has computed")
        tensor = source if known is None else known.tensor
        if tensor.is_nested:
            raise UnsupportedFunctionError("it reads a nested tensor")
        at: list[Node | None] = [None] * source.dim() if known is None else list(known.args)
        free = [dimension for dimension, index in enumerate(at) if index is None]
        if len(indices) > len(free):
            raise IndexError(f"too many indices for a tensor of {len(free)} dimensions: {len(indices)}")
        for dimension, index in zip(free, indices, strict=False):
            if index is None:
                continue
            if index.dim() or index.dtype in (torch.bool, torch.uint8):
                raise UnsupportedFunctionError("it takes more than an element of a tensor at once")
            if index.is_floating_point():
                raise IndexError(
                    f"tensors used as indices must be long, int, byte or bool tensors, not {index.dtype}"
                )
            at[dimension] = self.node(index)
        _check_dtype(tensor.dtype)
        sizes = [size for size, index in zip(tensor.shape, at, strict=True) if index is None]
        result = self.blank(tensor.dtype, [size if type(size) is int else 1 for size in sizes])
        return self.know(result, self.load(tensor, at))

    def _in_place(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        """Records the same operation that is not in place; the tensor stands for its result from now on."""
        target = args[0]
        written = [place for place, arg in enumerate(func._schema.arguments) if _is_written(arg)]
        overload = func._overloadname
        replacement = getattr(getattr(aten, name, None), overload, None)
        if written != [0] or replacement is None or target.dim():
            raise UnsupportedFunctionError(f"it uses {func}, which writes to a tensor")
        place = _place(target)
        if place not in self._made or target.untyped_storage().nbytes() != target.dtype.itemsize:
            raise UnsupportedFunctionError("it writes to a tensor that it has not made itself")
        if name == "zero":
            result = self._constant(aten.zeros_like.default, "zeros_like", (target,), {})
        else:
            result = self._operation(replacement, name, args, kwargs)
        node = self.node(result)
        if result.dtype != target.dtype:
            if not torch.can_cast(result.dtype, target.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
                )
            converted = {"dtype": target.dtype}
            step = Step(aten._to_copy.default, (node,), converted)
            node = Node("_to_copy", (node,), target.dtype, converted, step=step)
        self._of[place] = node
        self._alive.append(target)
        return target

    def _operation(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if _is_known(name) and any(isinstance(arg, Tensor) and arg.dim() for arg in args):
            raise UnsupportedFunctionError(f"{func} makes more than a number")
        numbers = (Tensor, int, float, bool)
        operands = tuple(self.node(arg) if isinstance(arg, numbers) else arg for arg in args)
        step = self._step(func, args, kwargs, operands)
        if not _is_known(name):
            return self._decomposed(func, args, kwargs, operands, step)
        given = [self._stand_in(arg) if isinstance(arg, Tensor) else arg for arg in args]
        if name in _DIVISIONS and isinstance(given[1], Tensor) and not given[1].is_floating_point():
            given[1] = self.blank(given[1].dtype)
        with torch._C._DisableTorchDispatch():
            result = func(*given, **kwargs)
        if not isinstance(result, Tensor) or result.dim():
            raise UnsupportedFunctionError(f"{func} makes more than a number")
        _check_dtype(result.dtype)
        of_numbers = [arg for arg in given if isinstance(arg, numbers)]
        common = torch.result_type(of_numbers[0], of_numbers[-1])  # type: ignore[arg-type]
        return self.know(result, Node(name, operands, result.dtype, dict(kwargs), common, step))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A plain tensor in place of a captured one, which may be of any class."""
        return tensor if _place(tensor) in self._own else self.blank(tensor.dtype)

    def _decomposed(self, func: Any, args: Any, kwargs: Any, operands: Any, step: Step | None) -> Any:
        decomposition = decomposition_of(func)
        if decomposition is None:
            raise UnsupportedFunctionError(
                f"it uses {func}, which is not one of the operations on single numbers"
            )
        self._depth += 1
        try:
            with self:
                results = decomposition(*args, **kwargs)
        finally:
            self._depth -= 1
        if not isinstance(results, (tuple, list)):
            return self._result_of(step, None, results, operands)
        return tuple(self._result_of(step, *each, operands) for each in enumerate(results))

    def _result_of(self, step: Step | None, output: int | None, result: Any, operands: Any) -> Any:
        node = self.known(result) if isinstance(result, Tensor) else None
        # An operand that comes back as the result is the same number.
        if node is not None and step is not None and all(node is not operand for operand in operands):
            node.step, node.output = step, output
            if not _is_pointwise(step.func):
                self.cannot_repeat = str(step.func)
        return result

    def _step(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Any]) -> Step | None:
        if self._depth or not self.keeps_steps:
            return None
        given: list[Any] = []
        for arg, operand in zip(args, operands, strict=True):
            if isinstance(arg, Tensor):
                given.append(self.operand(arg, operand))
            else:
                given.append(arg)
        return Step(func, tuple(given), kwargs)

    def operand(self, tensor: Tensor, node: Node) -> Node | Still:
        """The node of a tensor, as an operand that has a gradient or has none."""
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return Still(node)
        if node.step is not None and not node.step.has_gradient():
            self.cannot_repeat = "operations that torch.autograd does not see"
        return node


def _value_of(name: str, args: Any) -> Any:
    value = _VALUE_OF.get(name)
    if value is None:
        value = args[0] if name == "scalar_tensor" else args[-1]
    return value


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in C_TYPES:
        raise UnsupportedFunctionError(f"it computes with numbers of {dtype}")


def place_of_caller() -> str:
    """The place in the user's function of the operation that is being recorded."""
    here = __file__.rpartition("/")[0]
    inside = [
        frame
        for frame in traceback.extract_stack(sys._getframe(1))
        if "/torch/" not in frame.filename and not frame.filename.startswith(here)
    ]
    if not inside:
        return ""
    frame = inside[-1]
    return f" ({frame.filename}, line {frame.lineno}: {frame.line})"
