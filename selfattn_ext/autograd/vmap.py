"""Support of torch.func.vmap: the mapped dimension is folded into the batch.

A tensor of one slice is (B, ...). With the mapped dimension it is folded to (V * B, ...), the operator runs
once, and the results are unfolded to (V, B, ...). A row does not depend on the rest of its batch, so every
slice gets the bits that it would get alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["each_slice", "fold", "fold_optional", "slice_batch", "unfold", "unfold_gradient"]


def slice_batch(tensor: Tensor, dim: int | None) -> int:
    """Returns the size of the first dimension of one slice."""
    return tensor.size(0) if dim is None else tensor.movedim(dim, 0).size(1)


def _mapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Folds a tensor whose slices, along ``dim`` or all the same, are (B, ...) to (V * B, ...)."""
    return _mapped_first(tensor, dim, size).flatten(0, 1)


def fold_optional(
    tensor: Tensor | None, dim: int | None, size: int, batch: int, expand: bool = False
) -> Tensor | None:
    """Folds a tensor that may be None, or whose slices may be (1, ...), broadcast over the batch.

    A tensor that is the same for the whole of V * B stays (1, ...), unless ``expand`` asks for an entry each.
    """
    if tensor is None or (dim is None and tensor.size(0) == 1 and not expand):
        return tensor
    mapped = _mapped_first(tensor, dim, size)
    if mapped.size(1) != batch:
        mapped = mapped.expand(size, batch, *mapped.shape[2:])
    return mapped.flatten(0, 1)


def unfold(tensor: Tensor, size: int, batch: int) -> Tensor:
    """Unfolds (V * B, ...) to (V, B, ...)."""
    return tensor.unflatten(0, (size, batch))


def unfold_gradient(gradient: Tensor, size: int, batch: int, original: int) -> Tensor:
    """Unfolds a gradient (V * B, ...) to (V, original, ...).

    It is that of a tensor whose first dimension :func:`fold_optional` has expanded from ``original``.
    """
    unfolded = unfold(gradient, size, batch)
    return unfolded if original == batch else unfolded.sum(1, keepdim=True)


def each_slice(
    function: Callable[..., Any], size: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Calls the function on every slice and stacks each of its results.

    If there are no slices, it calls the function on one of zeros, to learn the shapes of the results.
    """

    def of_slice(value: Any, dim: Any, index: int) -> Any:
        if not isinstance(value, Tensor) or dim is None:
            return value
        return value.select(dim, index) if size else value.new_zeros(value.movedim(dim, 0).shape[1:])

    slices = [
        function(*(of_slice(value, dim, index) for value, dim in zip(inputs, in_dims, strict=True)))
        for index in range(max(size, 1))
    ]
    stacked = tuple(torch.stack(results)[:size] for results in zip(*slices, strict=True))
    return stacked, (0,) * len(stacked)
