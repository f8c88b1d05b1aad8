"""Results without data, which the fake kernels of the operators return: shapes, dtypes and strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reference import accumulation_dtype

__all__ = [
    "empty_gradients",
    "empty_like",
    "empty_packed",
    "empty_statistic",
    "has_rows_outside",
    "refuse_meta",
]


def refuse_meta(*arguments: Any) -> None:
    """Refuses meta tensors: fake kernels run for them, too, and their results would have no data."""
    if any(isinstance(argument, Tensor) and argument.device.type == "meta" for argument in arguments):
        raise RuntimeError(
            "selfattn_ext does not run on meta tensors; use torch._subclasses.FakeTensorMode for shapes"
        )


def has_rows_outside(layout: Tensor) -> bool:
    """Tells whether a tensor (B, H, L, E) has its heads within its rows in memory, as results will have."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    _, heads, rows, _ = layout.shape
    # A size may depend on data. A wrong guess about one head or one row leaves every address the same.
    several = guard_or_true(heads > 1) and guard_or_true(rows > 1) and guard_or_true(layout.stride(1) != 0)
    return several and guard_or_false(layout.stride(1) < layout.stride(2))


def empty_like(layout: Tensor, length: int, width: int) -> Tensor:
    """Returns an empty dense (B, H, length, width) with heads and rows in the order of ``layout``."""
    batch, heads, _, _ = layout.shape
    if has_rows_outside(layout):
        return layout.new_empty((batch, length, heads, width)).transpose(1, 2)
    return layout.new_empty((batch, heads, length, width))


def empty_statistic(query: Tensor) -> Tensor:
    """An empty row statistic; that of packed queries is (1, H, rows), as they are (1, H, rows, E)."""
    return query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))


def empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], need_mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty gradients of a call."""

    def of_optional(name: str, dtype: torch.dtype) -> Tensor:
        tensor = options.get(name)
        return query.new_empty(0, dtype=dtype) if tensor is None else tensor.new_empty(tensor.shape)

    statistics = accumulation_dtype(query.dtype)
    of_query, of_key, of_value = (
        empty_like(tensor, tensor.shape[2], tensor.shape[3]) for tensor in (query, key, value)
    )
    of_mask = of_optional("attn_mask", query.dtype) if need_mask_grad else query.new_empty(0)
    of_slopes, of_sinks = of_optional("alibi_slopes", statistics), of_optional("sinks", statistics)
    return of_query, of_key, of_value, of_mask, of_slopes, of_sinks


def empty_packed(layout: Tensor, width: int) -> Tensor:
    """Returns empty packed rows (rows, H, width) with heads and rows in the order of ``layout``."""
    heads_first = layout.transpose(0, 1).unsqueeze(0)
    return empty_like(heads_first, layout.shape[0], width).squeeze(0).transpose(0, 1)
