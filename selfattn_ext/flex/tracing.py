"""From score_mod and mask_mod to what is compiled: recorded operations, and those of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .recorder import Load, Node, Number, Recorder, UnsupportedFunctionError, record, replay
from .statements import Function

__all__ = ["Traced", "all_of", "trace"]

_INDICES = ("batch", "head", "q_idx", "kv_idx")
_EXCLUSIVE = {"batch": 1, "head": 2, "q_idx": 4}


@dataclass(frozen=True)
class Traced:
    """A pair of functions of scores, ready to be compiled."""

    function: Function
    #: What it is for.
    device: torch.device
    #: What the operators call along which dimensions no two items write one element of a captured gradient.
    exclusive: int

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The captured tensors, in the order of the operators' argument."""
        return self.function.tensors

    @property
    def numbers(self) -> list[float]:
        """Constants that are no part of the source."""
        return [float(number.value) for number in self.function.numbers]

    def does_nothing(self) -> bool:
        """Whether all scores stay as they are."""
        return self.function.score.op == "score" and self.function.mask is None

    def inputs(self) -> list[Node]:
        """The score and the indices as nodes."""
        roots = [self.function.score, self.function.mask]
        return [node for node in all_of(roots) if node.op == "score" or node.op in _INDICES]

    def wanted(self) -> list[bool]:
        """For each captured tensor, whether it has a gradient."""
        with_gradient = {tensor for tensor, _, _ in self.function.grad_loads}
        return [index in with_gradient for index in range(len(self.tensors))]


def trace(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    dtype: torch.dtype,
    device: torch.device,
    inputs_require_grad: bool,
) -> Traced:
    """Calls both functions once and writes down what they compute of a score of ``dtype``.

    With gradients where a backward may come: grad mode is on, and the inputs or a captured tensor require
        one.

    Raises:
        ValueError: a function decides by a value in Python, or returns no number.
        UnsupportedFunctionError: a function is more than operations on single numbers.
    """
    recorder = Recorder()
    score, *indices = _inputs(recorder, dtype, device, "score")
    result = recorder.node(score)
    if score_mod is not None:
        result = record(recorder, score_mod, [score, *indices])
    mask = None if mask_mod is None else record(recorder, mask_mod, indices)
    if isinstance(mask, Number) and mask.value:
        mask = None
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"a mask function must return a bool, but it returned {mask.dtype}")
    grad_score: Node | None = None
    grad_loads: list[tuple[Load, Node]] = []
    loads = [node for node in all_of([result]) if isinstance(node, Load)]
    captured_require_grad = any(load.tensor.requires_grad for load in loads)
    if torch.is_grad_enabled() and (inputs_require_grad or captured_require_grad):
        grad_score, grad_loads = _derivatives(result, dtype, device)
    everything = list(all_of([result, mask, grad_score, *(node for pair in grad_loads for node in pair)]))
    tensors: list[Tensor] = []
    for node in everything:
        if isinstance(node, Load) and all(node.tensor is not tensor for tensor in tensors):
            _check_captured(node.tensor, device)
            tensors.append(node.tensor)
    position = {id(tensor): index for index, tensor in enumerate(tensors)}
    by_tensor = [(position[id(load.tensor)], load, grad) for load, grad in grad_loads]
    numbers = [node for node in everything if isinstance(node, Number)]
    function = Function(dtype, result, mask, grad_score, by_tensor, tensors, numbers)
    for node in everything:
        if isinstance(node, Load) and len(node.args) != node.tensor.dim():
            raise UnsupportedFunctionError("it takes more than an element of a tensor at once")
    return Traced(function, device, _exclusive([load for load, _ in grad_loads]))


def _inputs(recorder: Recorder, dtype: torch.dtype, device: torch.device, *first: str) -> list[Tensor]:
    tensors = []
    for name in (*first, *_INDICES):
        kind = torch.int32 if name in _INDICES else dtype
        tensor = torch.zeros((), dtype=kind, device=device)
        tensors.append(recorder.know(tensor, Node(name, (), kind)))
    return tensors


def _derivatives(
    result: Node, dtype: torch.dtype, device: torch.device
) -> tuple[Node | None, list[tuple[Load, Node]]]:
    """The gradients of the score and of what is loaded, by torch's own derivatives of the operations."""
    recorder = Recorder()
    values: dict[Node, Tensor] = {}
    leaves: list[Tensor] = []
    inputs = _inputs(recorder, dtype, device, "score", "grad")
    named = dict(zip(("score", "grad", *_INDICES), inputs, strict=True))

    # Made beforehand: what is recorded must not be how leaves come to be.
    for node in all_of([result]):
        if isinstance(node, Load):
            wanted = node.tensor.requires_grad and node.dtype.is_floating_point
            values[node] = torch.ones((), dtype=node.dtype, device=device, requires_grad=wanted)
            leaves += [values[node]] if wanted else []
        elif node.op in named:
            values[node] = named[node.op]
    score = named["score"].requires_grad_()
    # Activation checkpointing has hooks that would compute the whole layer again to get at these numbers.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself), torch.enable_grad(), recorder:
        for node in all_of([result]):
            if isinstance(node, Load):
                indices = tuple(recorder.node(values[index]) for index in node.args)
                recorder.know(values[node], Load("load", indices, node.dtype, tensor=node.tensor))
            else:
                replay(node, values, values.__getitem__)
        end = values[result].to(dtype)
        if not end.requires_grad:
            return recorder.node(0.0), []
        gradients = torch.autograd.grad(end, [score, *leaves], named["grad"], allow_unused=True)
    nodes = [recorder.node(0.0 if gradient is None else gradient) for gradient in gradients]
    loads: list[tuple[Load, Node]] = []
    for leaf, gradient, node in zip(leaves, gradients[1:], nodes[1:], strict=True):
        load = recorder.node(leaf)
        if gradient is not None and isinstance(load, Load):
            loads.append((load, node))
    return nodes[0], loads


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def all_of(roots: Sequence[Node | None]) -> Iterator[Node]:
    """Every node that the roots need, each behind those that it needs itself."""
    seen: set[Node] = set()
    waiting: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots) if root is not None]
    while waiting:
        node, complete = waiting.pop()
        if complete:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(arg, False) for arg in reversed(node.args) if isinstance(arg, Node)]


def _exclusive(loads: Sequence[Load]) -> int:
    """The sum of the dimensions along which no two scores read one element of a tensor: each of its loads has
    that index, and at the same place.
    """
    common = set(_EXCLUSIVE)
    for tensor in {id(load.tensor) for load in loads}:
        places = [
            {(index.op, place) for place, index in enumerate(load.args) if index.op in _EXCLUSIVE}
            for load in loads
            if id(load.tensor) == tensor
        ]
        common &= {name for name, _ in set.intersection(*places)}
    return sum(_EXCLUSIVE[name] for name in common)


def _check_captured(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"a function of scores must read tensors on the query's device, {device}, but it reads one on "
            f"{tensor.device}"
        )
    if tensor.numel() == 0:
        raise ValueError(
            f"a function of scores reads a tensor without elements, of shape {tuple(tensor.shape)}"
        )
    from .operations import C_TYPES

    if tensor.dtype not in C_TYPES:
        raise UnsupportedFunctionError(f"it reads a tensor of {tensor.dtype}")
