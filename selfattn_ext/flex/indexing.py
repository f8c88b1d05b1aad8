"""Modes that change the calls of torch in a function of scores before autograd sees them."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .nodes import Load, UnsupportedFunctionError
from .recorder import Recorder, place_of_caller, tensors_in

__all__ = ["Indexing", "Recording"]

aten = torch.ops.aten

_IN_PYTHON = {"__bool__", "__int__", "__float__", "__complex__", "item"}
_OUT_OF_TORCH = {"numpy", "tolist", "__array__", "__array_wrap__", "__dlpack__", "__index__", "data_ptr"}
_OUT_OF_TORCH |= {"untyped_storage", "storage", "__reduce_ex__", "__deepcopy__", "__cuda_array_interface__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class Indexing(TorchFunctionMode):
    """Computes ``tensor[index, ...]`` by the operation for tensors of indices: Python's own would ask for the
    index's value.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            tensor, index = args
            given = index if isinstance(index, tuple) else (index,)
            if any(_is_index(each) for each in given) or self.stands_for_a_part(tensor):
                indices = _indices(tensor, given)
                if indices is not None:
                    return self.element(*indices)
        elif func in (torch.take, Tensor.take) and len(args) == 2 and not args[1].dim():
            tensor, index = args
            return self.element(tensor if tensor.dim() == 1 else tensor.flatten(), [index])
        return func(*args, **kwargs)

    def stands_for_a_part(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a part that an index has taken of another one."""
        return False

    def element(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        result: Tensor = aten.index.Tensor(tensor, indices)
        return result


def _indices(tensor: Tensor, given: tuple[Any, ...]) -> tuple[Tensor, list[Tensor | None]] | None:
    """A tensor, and an index or None for each of its dimensions. ``given`` may be integers, tensors of them,
    and items that leave a dimension as it is or add one; the result is None for others.
    """
    if not all(_is_index(each) or _is_basic(each) or type(each) is int for each in given):
        return None
    taken = sum(each is not None and each is not ... for each in given)
    items: list[Any] = []
    for each in given:
        items += [slice(None)] * (tensor.dim() - taken) if each is ... else [each]
    if any(_is_basic(each) and each != slice(None) for each in items):
        tensor = tensor[tuple(each if _is_basic(each) else slice(None) for each in items)]
    return tensor, [
        None if _is_basic(each)
        else torch.scalar_tensor(each, dtype=torch.int64, device=tensor.device) if type(each) is int
        else each
        for each in items
    ]  # fmt: skip


def _is_index(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dtype != torch.bool


def _is_basic(given: Any) -> bool:
    return given is None or isinstance(given, (slice, EllipsisType))


class Recording(Indexing):
    """The mode above a recorder. It replaces learned elements by tensors of their own that require gradients
    (Note [Recorded under autograd]), and refuses calls that would read numbers which stand for nothing.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        #: The elements that require gradients, and what they stand for.
        self.learned: list[tuple[Tensor, Load]] = []
        self._of: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)  # an attribute
        if name in _IN_PYTHON or name in _OUT_OF_TORCH:
            self._keep_inside(name, args[0])
        if name in _HOOKS:
            self.recorder.cannot_repeat = name
        given = tensors_in((*args, *kwargs.values()))
        if torch.is_grad_enabled() and len(given) > 1:
            args, kwargs = self._with_learned(name, args, kwargs, given)
        return super().__torch_function__(func, types, args, kwargs)

    def _keep_inside(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or self.recorder.known(tensor) is None:
            return
        start = "a function of scores must not "
        why = ", for it is compiled once for all of them: "
        if name in _IN_PYTHON:
            raise ValueError(
                f"{start}decide by the value of a score or an index in Python{why}use torch.where instead"
                + place_of_caller()
            )
        raise ValueError(
            f"{start}take the value of a score or an index out of torch, as {name} does{why}use functions "
            "and tensors of torch instead of NumPy's or Python's" + place_of_caller()
        )

    def _with_learned(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> tuple[Any, Any]:
        """The arguments of a call, with an element of its own for each learned tensor without dimensions."""
        with torch._C.DisableTorchFunction():
            learned = [each for each in given if each.requires_grad and not each.dim()]
            learned = [each for each in learned if self.recorder.known(each) is None]
            if not learned or all(self.recorder.known(each) is None for each in given):
                return args, kwargs
            in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
            if "out" in kwargs or (in_place and any(args[0] is each for each in learned)):
                raise UnsupportedFunctionError("it changes what it learns in place")
            own = {id(each): self.own(each) for each in learned}
            return _replaced(args, own), _replaced(kwargs, own)

    def own(self, tensor: Tensor) -> Tensor:
        """The element that stands for a learned number without an index."""
        found = self._of.get(id(tensor))
        if found is None:
            load = self.recorder.load(tensor.resolve_neg(), ())
            found = self._of[id(tensor)] = self._leaf(load)
        return found

    def _leaf(self, load: Load) -> Tensor:
        leaf = self.recorder.know(self.recorder.blank(load.dtype).requires_grad_(), load)
        self.learned.append((leaf, load))
        return leaf

    def stands_for_a_part(self, tensor: Tensor) -> bool:
        return bool(tensor.dim()) and self.recorder.known(tensor) is not None

    def element(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        """An element that requires a gradient if one is wanted; the tensor that it is read from does not."""
        if all(self.recorder.known(each) is None for each in (tensor, *indices) if each is not None):
            return super().element(tensor, indices)
        if tensor.is_neg():
            tensor = tensor.resolve_neg()  # otherwise the dispatcher does so below autograd
        wanted = torch.is_grad_enabled() and tensor.requires_grad
        with torch.no_grad():
            result = super().element(tensor, indices)
        if not wanted or not result.is_floating_point():
            return result
        load = self.recorder.known(result)
        if not isinstance(load, Load):
            raise UnsupportedFunctionError("it reads what it learns inside of a transform of torch.func")
        # A clone, because the function may change it in place.
        return result.requires_grad_() if result.dim() else self._leaf(load).clone()


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
_IN_PLACE |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}


def _replaced(given: Any, own: dict[int, Tensor]) -> Any:
    if isinstance(given, Tensor):
        return own.get(id(given), given)
    if type(given) in (tuple, list):
        return type(given)(_replaced(each, own) for each in given)
    if isinstance(given, dict):
        return {key: _replaced(each, own) for key, each in given.items()}
    return given
