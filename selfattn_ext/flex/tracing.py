"""Traces score_mod and mask_mod to the recorded operations that are compiled, gradients included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .indexing import Recording
from .nodes import Load, Node, Number, UnsupportedFunctionError, all_of
from .operations import C_TYPES, is_written
from .ranges import ANY_SIZES, INDICES, Ranges, largest_places
from .recorder import Recorder
from .statements import Function

__all__ = ["INDEX_DTYPE", "Traced", "trace"]

#: The dtype of the indices that functions are given.
INDEX_DTYPE = torch.int64
_EXCLUSIVE = {"batch": 1, "head": 2, "q_idx": 4}


@dataclass(frozen=True)
class Traced:
    """A pair of functions of scores, ready to be compiled."""

    function: Function
    #: The device of the tensors that it is for.
    device: torch.device
    #: The operators' number for the dimensions along which no two items write one element of a captured
    #: gradient.
    exclusive: int
    #: The score and the indices, by name.
    inputs: dict[str, Node]
    #: Whether the result has a gradient.
    differentiable: bool = False
    #: The error of the backward, if torch has no gradient of the function.
    failure: str | None = None
    #: The name of something in the function that cannot be computed again for second derivatives.
    cannot_repeat: str | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The captured tensors, in the order of the operators' argument."""
        return self.function.tensors

    @property
    def numbers(self) -> list[float]:
        """The constants that are no part of the source."""
        return [float(number.value) for number in self.function.numbers]

    def does_nothing(self) -> bool:
        """Whether all scores stay as they are."""
        return self.function.score.op == "score" and self.function.mask is None

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
    sizes: Sequence[int | torch.SymInt] = ANY_SIZES,
) -> Traced:
    """Calls both functions once and writes down what they compute from a score of ``dtype``.

    ``sizes`` are how many batch elements, heads, queries and keys there are at most. Gradients are recorded
    if a backward may come: grad mode is on, and the inputs or a captured tensor require one.

    Raises:
        ValueError: a function decides by a value in Python, or returns no number.
        UnsupportedFunctionError: a function is more than operations on single numbers.
    """
    recorder = Recorder(device)
    above = Recording(recorder)
    names = ("score", *INDICES)
    inputs = {name: Node(name, (), INDEX_DTYPE if name in INDICES else dtype) for name in names}
    recorder.keeps_steps = wants_gradients = torch.is_grad_enabled()
    leaf = _input(recorder, inputs["score"]).requires_grad_(wants_gradients)
    result, mask, end = inputs["score"], None, leaf
    # The hooks of activation checkpointing would compute the whole layer again to get at saved numbers.
    with _no_hooks():
        if score_mod is not None:
            places = [_input(recorder, inputs[name]) for name in INDICES]
            with above, recorder:
                # The function may change the score in place, and indices as well.
                result, end = _number(above, score_mod(leaf.clone(), *places))
        if mask_mod is not None:
            places = [_input(recorder, inputs[name]) for name in INDICES]
            with above, recorder:
                mask, _ = _number(above, mask_mod(*places))
        if isinstance(mask, Number) and mask.value:
            mask = None
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"a mask function must return a bool, but it returned {mask.dtype}")
        grad_score: Node | None = None
        grad_loads: list[tuple[Load, Node]] = []
        failure = None
        if wants_gradients and (inputs_require_grad or above.learned):
            try:
                grad_score, grad_loads = _derivatives(above, end, leaf)
            except RuntimeError as reason:
                failure = str(reason)
    everything = list(all_of([result, mask, grad_score, *(node for pair in grad_loads for node in pair)]))
    tensors: list[Tensor] = []
    for node in everything:
        if isinstance(node, Load):
            _check_load(node)
            if all(node.tensor is not tensor for tensor in tensors):
                _check_captured(node.tensor, device)
                tensors.append(node.tensor)
    position = {id(tensor): index for index, tensor in enumerate(tensors)}
    by_tensor = [(position[id(load.tensor)], load, grad) for load, grad in grad_loads]
    numbers = [node for node in everything if isinstance(node, Number) and not is_written(node)]
    ranges = Ranges(largest_places(sizes))
    function = Function(dtype, result, mask, grad_score, by_tensor, tensors, numbers, ranges)
    exclusive = _exclusive([load for load, _ in grad_loads])
    return Traced(function, device, exclusive, inputs, end.requires_grad, failure, recorder.cannot_repeat)


def _input(recorder: Recorder, node: Node) -> Tensor:
    blank = recorder.blank(node.dtype)
    return recorder.know(blank, node)


def _number(above: Recording, result: Any) -> tuple[Node, Tensor]:
    """The number that a function has returned, and the tensor that stands for it."""
    if isinstance(result, (bool, int, float)):
        return above.recorder.node(result), above.recorder.blank(torch.float64)
    if not isinstance(result, Tensor):
        raise ValueError(
            f"a function of scores must return a tensor, but it returned {type(result).__name__}"
        )
    if result.dim():
        raise ValueError(
            "a function of scores must return one number for one score, but it returned a tensor of shape "
            f"{tuple(result.shape)}"
        )
    if result.requires_grad and above.recorder.known(result) is None:
        result = above.own(result)
    node = above.recorder.node(result)
    above.recorder.operand(result, node)
    return node, result


def _derivatives(above: Recording, end: Tensor, leaf: Tensor) -> tuple[Node | None, list[tuple[Load, Node]]]:
    """The gradients of the score and of learned tensors, by torch's own derivatives of the operations."""
    recorder = above.recorder
    if not end.requires_grad:
        return recorder.node(0.0), []
    # A copy, because a checkpoint in the function reads elements once more meanwhile.
    learned = list(above.learned)
    elements = [leaf, *(element for element, _ in learned)]
    _check_graph(recorder, end, elements)
    recorder.keeps_steps = False
    # A search for NaN would ask for values.
    unasked = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)
    with torch.enable_grad(), unasked, above, recorder:
        end = end.to(leaf.dtype)
        # If it is given tensors, torch hides from `above` the calls of a torch.autograd.Function's backward.
        first, *edges = (torch.autograd.graph.get_gradient_edge(each) for each in (end, *elements))
        grad = _input(recorder, Node("grad", (), leaf.dtype))
        found = torch.autograd.grad(first, edges, grad, allow_unused=True)
        of_score, *nodes = (recorder.node(0.0 if each is None else each) for each in found)
    return of_score, [
        (load, node)
        for (_, load), gradient, node in zip(learned, found[1:], nodes, strict=True)
        if gradient is not None
    ]


def _check_graph(recorder: Recorder, end: Tensor, leaves: list[Tensor]) -> None:
    """Checks that gradients end in ``leaves``. A torch.autograd.Function, for example, can use a captured
    tensor in a way that no mode sees.
    """
    own = {id(leaf) for leaf in leaves}
    seen: set[Any] = set()
    waiting: list[Any] = [end.grad_fn]
    while waiting:
        step = waiting.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if isinstance(step, BackwardCFunction):
            recorder.cannot_repeat = f"a torch.autograd.Function, {type(step).__name__}"
        leaf = getattr(step, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise UnsupportedFunctionError("it learns a tensor that no operation of torch shows")
        waiting += [behind for behind, _ in step.next_functions]


def _no_hooks() -> contextlib.AbstractContextManager[Any]:
    """A block in which tensors are saved as they are, whatever hooks surround it."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked)


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unpacked(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"
        )
    return tensor


def _exclusive(loads: Sequence[Load]) -> int:
    """The sum of the numbers of those dimensions along which no two scores read one element of a tensor: each
    of the tensor's loads has that index, and at the same place.
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


def _check_load(load: Load) -> None:
    tensor = load.tensor
    if None in load.args or len(load.args) != tensor.dim():
        raise UnsupportedFunctionError("it takes more than an element of a tensor at once")
    if load.version is not None and tensor._version != load.version:
        raise UnsupportedFunctionError("it changes a tensor that it has read")


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
    if tensor.dtype not in C_TYPES:
        raise UnsupportedFunctionError(f"it reads a tensor of {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise UnsupportedFunctionError(f"it reads a tensor of layout {tensor.layout}")
    if tensor._is_zerotensor() or not _has_memory(tensor):
        raise UnsupportedFunctionError(f"it reads a {type(tensor).__name__} that has no memory of its own")


def _has_memory(tensor: Tensor) -> bool:
    """Whether kernels may read a tensor, now or when a graph of it runs."""
    if not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return True
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))
