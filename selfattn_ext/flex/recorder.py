"""A function of one score, as the list of operations that it is made of.

The function is called once, with tensors of no dimensions. A dispatch mode sees every operation that depends
on them and writes it down; operations on captured tensors alone are computed, with their gradients, and their
results count as captured.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Indexing", "Load", "Node", "Number", "Recorder", "UnsupportedFunctionError", "replay"]

aten = torch.ops.aten


class UnsupportedFunctionError(Exception):
    """A function of scores that cannot be compiled; torch can compute it."""


@dataclass(eq=False)
class Node:
    """A number that the function computes, or is given: ``op`` is then its name."""

    op: Any
    args: tuple[Any, ...]
    dtype: torch.dtype
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: What the operands of a comparison are brought to.
    common: torch.dtype | None = None


@dataclass(eq=False)
class Number(Node):
    """A constant."""

    value: float | int | bool = 0
    #: Whether it was a tensor, which takes part in the choice of a dtype as a Python number does not.
    is_tensor: bool = False


@dataclass(eq=False)
class Load(Node):
    """An element of a captured tensor, ``args`` are its indices; or, with fewer of them, a part."""

    tensor: Any = None


_CONSTANTS = {"scalar_tensor", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
_VALUE_OF = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_SAME = {"detach", "alias", "clone", "lift_fresh", "lift_fresh_copy", "view", "expand", "squeeze"}


def name_of(op: Any) -> str:
    """ "add" of aten.add.Tensor and of aten.add_.Tensor."""
    name: str = op._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations as others that are simpler."""
    table: dict[Any, Callable[..., Any]] = torch._decomp.decomposition_table
    return table


class Indexing(TorchFunctionMode):
    """``tensor[index, ...]`` by the operation for tensors of indices: Python's would ask for the index's
    value.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = [
                torch.scalar_tensor(each, dtype=torch.int64) if type(each) is int else each
                for each in (index if isinstance(index, tuple) else (index,))
            ]
            if all(isinstance(each, Tensor) and each.dtype != torch.bool for each in indices):
                return aten.index.Tensor(tensor, indices)
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Writes down what is computed from its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, Node] = {}
        self._alive: list[Tensor] = []

    def know(self, tensor: Tensor, node: Node) -> Tensor:
        """From now on ``tensor`` stands for ``node``."""
        self._of[id(tensor)] = node
        self._alive.append(tensor)
        return tensor

    def node(self, value: Any) -> Node:
        """What stands for a tensor or a number of Python."""
        if isinstance(value, Tensor):
            known = self._of.get(id(value))
            if known is None:
                if value.dim():
                    raise UnsupportedFunctionError(
                        f"it computes with all of a tensor of {tuple(value.shape)}, not with one element"
                    )
                known = Load("load", (), value.dtype, tensor=value)
                self.know(value, known)
            return known
        # With all the digits of a Python number: what uses it rounds it to its own dtype.
        dtype = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
        return Number("number", (), dtype, value=value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = name_of(func)
        if not any(id(tensor) in self._of for tensor in tensors):
            result = func(*args, **kwargs)
            if not tensors and name in _CONSTANTS and isinstance(result, Tensor) and result.dim() == 0:
                return self._constant(result, name, args)
            return result
        if name in ("_local_scalar_dense", "is_nonzero", "item", "equal"):
            raise ValueError(
                "a function of scores must not decide by the value of a score or an index in Python, "
                "for it is compiled once for all of them: use torch.where instead" + _place_of_caller()
            )
        if name == "_has_same_storage_numel":
            return func(*args)  # asked by forward mode
        if name == "index":
            return self._index(*args)
        if name in _SAME and tensors[0].dim() == 0:
            return self._same(func, args, kwargs)
        if name in _CONSTANTS or name in _VALUE_OF or name == "full_like":
            return self._constant(func(*args, **kwargs), name, args)
        return self._operation(func, name, args, kwargs, tensors)

    def _same(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        if result.dim():
            raise UnsupportedFunctionError("it makes a tensor with dimensions of a score or an index")
        return self.know(result, self._of[id(args[0])])

    def _constant(self, result: Tensor, name: str, args: Any) -> Tensor:
        value = _VALUE_OF.get(name)
        if value is None:
            value = args[0] if name == "scalar_tensor" else args[-1]
        return self.know(result, Number("number", (), result.dtype, value=value, is_tensor=True))

    def _index(self, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        whole = self._of.get(id(source))
        if whole is not None and not isinstance(whole, Load):
            raise UnsupportedFunctionError("it takes an element of something that it has computed")
        if any(index is None or index.dim() or index.dtype == torch.bool for index in indices):
            raise UnsupportedFunctionError("it takes more than an element of a tensor at once")
        tensor, before = (source, ()) if whole is None else (whole.tensor, whole.args)
        given = (*before, *(self.node(index) for index in indices))
        # Not what is there: nobody knows yet whether there is anything. Integers may be divided by 1.
        result = source.new_ones(()).expand(source.shape[len(indices) :])
        return self.know(result, Load("load", given, source.dtype, tensor=tensor))

    def _operation(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        from .operations import is_known

        if not is_known(name):
            decomposition = _decompositions().get(func)
            if decomposition is None and func._can_decompose():
                decomposition = func.decompose
            if decomposition is None:
                raise UnsupportedFunctionError(
                    f"it uses {func}, which is not one of the operations on single numbers"
                )
            with self:
                return decomposition(*args, **kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dim():
            raise UnsupportedFunctionError(f"{func} makes more than a number")
        numbers = [arg for arg in args if isinstance(arg, (Tensor, int, float, bool))]
        common = torch.result_type(numbers[0], numbers[-1])  # type: ignore[arg-type]
        if func._schema.is_mutable:
            result = args[0]
        operands = tuple(
            self.node(arg) if isinstance(arg, (Tensor, int, float, bool)) else arg for arg in args
        )
        return self.know(result, Node(name, operands, result.dtype, dict(kwargs), common))


def record(recorder: Recorder, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Node:
    """The number that the function returns for these inputs, which the recorder knows.

    Raises:
        ValueError: it decides by a value, or returns no number.
        UnsupportedFunctionError: it cannot be written as operations on single numbers.
    """
    with Indexing(), recorder:
        result = function(*tensors)
    if isinstance(result, (bool, int, float)):
        return recorder.node(result)
    if not isinstance(result, Tensor):
        raise ValueError(
            f"a function of scores must return a tensor, but it returned {type(result).__name__}"
        )
    if result.dim():
        raise ValueError(
            "a function of scores must return one number for one score, but it returned a tensor of shape "
            f"{tuple(result.shape)}"
        )
    return recorder.node(result)


def replay(node: Node, values: dict[Node, Tensor], element: Callable[[Load], Tensor]) -> Tensor:
    """What a node stands for, by torch's operations, on tensors of any shape.

    ``values`` holds the inputs and gets everything else; ``element`` gives what is loaded.
    """
    found = values.get(node)
    if found is None:
        if isinstance(node, Number):
            found = torch.scalar_tensor(node.value, dtype=node.dtype)
        elif isinstance(node, Load):
            found = element(node)
        else:
            args = [_operand(arg, values, element) for arg in node.args]
            found = getattr(aten, node.op)(*args, **node.kwargs)
        values[node] = found
    return found


def _operand(arg: Any, values: dict[Node, Tensor], element: Callable[[Load], Tensor]) -> Any:
    if isinstance(arg, Number) and not arg.is_tensor:
        return arg.value
    return replay(arg, values, element) if isinstance(arg, Node) else arg


def _place_of_caller() -> str:
    """Where in the function the operation stands that is being looked at."""
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
