"""Masks that are rules, and become numbers if code computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..masks import visible_pairs

__all__ = ["LazyMask", "PositionalMask", "VisibleMask"]


class LazyMask(torch.Tensor):
    """A float mask (B, 1, L, S), 0 where a query sees a key and the dtype's least number where it does not.

    A library that makes masks in one place and attends in another can hand this from one to the other. Its
    shape, dtype and device are those of the mask that it stands for; any operation on it computes that mask
    first (:meth:`additive`) and gives a plain tensor. So code that does not know the class and adds its mask
    to scores, slices it or joins it with another one stays right. Code that knows the class attends by::

        selfattn_ext.scaled_dot_product_attention(q, k, v, mask.attn_mask(), **mask.options())

    It cannot be written to.
    """

    _additive: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> LazyMask:
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        mask._additive = None
        return mask

    def options(self) -> dict[str, Any]:
        """The rule in it, as arguments of :func:`selfattn_ext.scaled_dot_product_attention`."""
        raise NotImplementedError

    def attn_mask(self) -> Tensor | None:
        """The part that is no rule, a bool mask broadcastable to (B, 1, L, S), or None."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The whole mask as a plain bool tensor (B, 1, L, S), True where a query sees a key."""
        raise NotImplementedError

    def additive(self) -> Tensor:
        """The whole mask as a plain tensor of its own dtype, made once; batch entries may share memory."""
        if self._additive is None:
            hidden = torch.finfo(self.dtype).min
            zero = torch.zeros((), dtype=self.dtype, device=self.device)
            self._additive = torch.where(self.dense(), zero, hidden)
        return self._additive

    # Attributes and methods are found as on any tensor; only operators compute, in __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], LazyMask):  # type: ignore[attr-defined]
            name = type(args[0]).__name__
            raise RuntimeError(f"{func} cannot write to a {name}; take its additive() and clone that")
        args, kwargs = _pytree.tree_map_only(LazyMask, LazyMask.additive, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyMask:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.additive().clone().__reduce_ex__(protocol)


class PositionalMask(LazyMask):
    """A mask by the positions of queries and keys, and by keys that are hidden from all, without (L, S)
    memory.

    Args:
        shape: (B, L, S).
        window_size: (left, right) as in :func:`selfattn_ext.scaled_dot_product_attention`; (-1, 0) is the
            causal rule.
        query_offset: position of query 0 among the keys.
        visible_keys: (B, S) bool, False for keys that are hidden from all queries; None shows all.
        device: the device of the mask.
        dtype: the dtype of the numbers that it turns into.
    """

    window_size: tuple[int, int]
    query_offset: int
    visible_keys: Tensor | None
    _dense: Tensor | None

    @staticmethod
    def __new__(  # type: ignore[override]
        cls,
        shape: tuple[int, int, int],
        window_size: tuple[int, int],
        query_offset: int,
        visible_keys: Tensor | None,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> PositionalMask:
        batch, queries, keys = shape
        mask = LazyMask.__new__(cls, (batch, 1, queries, keys), dtype, device)
        assert isinstance(mask, PositionalMask)
        mask.window_size = window_size
        mask.query_offset = query_offset
        mask.visible_keys = visible_keys
        mask._dense = None
        return mask

    def options(self) -> dict[str, Any]:
        if self.window_size == (-1, -1):
            return {}
        if self.window_size == (-1, 0):
            return {"is_causal": True, "query_offset": self.query_offset}
        return {"window_size": self.window_size, "query_offset": self.query_offset}

    def attn_mask(self) -> Tensor | None:
        return None if self.visible_keys is None else self.visible_keys[:, None, None, :]

    def dense(self) -> Tensor:
        if self._dense is None:
            batch, _, queries, keys = self.shape
            mask = visible_pairs(
                queries,
                keys,
                window_size=self.window_size,
                query_offset=self.query_offset,
                device=self.device,
            )
            shown = self.attn_mask()
            if mask is None:
                mask = torch.ones((), dtype=torch.bool, device=self.device) if shown is None else shown
            elif shown is not None:
                mask = mask & shown
            self._dense = mask.expand(batch, 1, queries, keys)
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        padded = "" if self.visible_keys is None else ", visible_keys=..."
        return (
            f"PositionalMask({tuple(self.shape)}, window_size={self.window_size}, "
            f"query_offset={self.query_offset}{padded})"
        )


class VisibleMask(LazyMask):
    """A mask whose elements are known.

    Args:
        visible: (B, 1, L, S) bool, True where a query sees a key.
        dtype: the dtype of the numbers that it turns into.
    """

    visible: Tensor

    @staticmethod
    def __new__(cls, visible: Tensor, dtype: torch.dtype) -> VisibleMask:  # type: ignore[override]
        mask = LazyMask.__new__(cls, visible.shape, dtype, visible.device)
        assert isinstance(mask, VisibleMask)
        mask.visible = visible
        return mask

    def options(self) -> dict[str, Any]:
        return {}

    def attn_mask(self) -> Tensor | None:
        return self.visible

    def dense(self) -> Tensor:
        return self.visible

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VisibleMask({tuple(self.shape)})"
