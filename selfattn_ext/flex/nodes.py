"""The nodes of a recorded function of one score: numbers, and the operations that make them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Load", "Node", "Number", "Step", "Still", "UnsupportedFunctionError", "all_of", "replay"]

aten = torch.ops.aten


class UnsupportedFunctionError(Exception):
    """A function of scores that cannot be compiled; torch can compute it."""


@dataclass(eq=False)
class Node:
    """A number that the function computes, or that it is given; ``op`` is then the input's name."""

    op: Any
    args: tuple[Any, ...]
    dtype: torch.dtype
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: The dtype that the operands of a comparison are brought to.
    common: torch.dtype | None = None
    #: The operation of torch that computes it, and its place among the results if there are several.
    step: Step | None = None
    output: int | None = None


@dataclass(eq=False)
class Number(Node):
    """A constant."""

    value: float | int | bool = 0
    #: Whether it was a tensor, which takes part in the choice of a dtype as a Python number does not.
    is_tensor: bool = False


@dataclass(eq=False)
class Load(Node):
    """An element of a captured tensor, whose indices are ``args``; a part of it if some of them are None."""

    tensor: Any = None
    #: The number of changes in place that the tensor had seen when it was read.
    version: int | None = None


@dataclass(eq=False)
class Still:
    """An operand through which no gradient goes."""

    node: Node


@dataclass(eq=False)
class Step:
    """A call of one of torch's operations, not in place. Operands that are tensors are Node or Still."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def has_gradient(self) -> bool:
        return any(isinstance(arg, Node) for arg in self.args)

    def nodes(self) -> list[Node]:
        """The operands that are tensors."""
        held = (arg.node if isinstance(arg, Still) else arg for arg in self.args)
        return [each for each in held if isinstance(each, Node)]


def all_of(
    roots: Sequence[Node | None],
    done: Container[Node] = (),
    operands: Callable[[Node], Sequence[Any]] = lambda node: node.args,
) -> Iterator[Node]:
    """Every node that the roots need, each after those that it needs itself, without those in ``done`` and
    what only they need. It is a loop, because functions may be longer than Python's stack.
    """
    seen: set[Node] = set()
    waiting: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots) if root is not None]
    while waiting:
        node, complete = waiting.pop()
        if complete:
            yield node
        elif node not in seen and node not in done:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(arg, False) for arg in reversed(operands(node)) if isinstance(arg, Node)]


def replay(
    root: Node, values: dict[Node, Tensor], element: Callable[[Load], Tensor], device: torch.device
) -> Tensor:
    """The value of a node, by the operations of torch that were called, on tensors of four dimensions.
    Constants have as many, so that dtypes come out as they were recorded.

    ``values`` holds the inputs and gets everything else; ``element`` gives the elements that are loaded.
    """
    results: dict[Step, Any] = {}
    for node in all_of([root], values, _repeated):
        if isinstance(node, Number):
            values[node] = torch.full((1, 1, 1, 1), node.value, dtype=node.dtype, device=device)
        elif isinstance(node, Load):
            values[node] = element(node)
        else:
            step = node.step
            if step is None:
                step = Step(getattr(aten, node.op), node.args, node.kwargs)
            if step not in results:
                args = [_operand(arg, values) for arg in step.args]
                results[step] = step.func(*args, **step.kwargs)
            found = results[step]
            values[node] = found if node.output is None else found[node.output]
    return values[root]


def _repeated(node: Node) -> Sequence[Any]:
    """The nodes that :func:`replay` needs for a node."""
    return node.args if node.step is None else node.step.nodes()


def _operand(arg: Any, values: dict[Node, Tensor]) -> Any:
    if isinstance(arg, Still):
        return values[arg.node].detach()
    return values[arg] if isinstance(arg, Node) else arg
