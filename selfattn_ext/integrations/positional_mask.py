"""A mask that is kept as a rule, and becomes a tensor for whoever wants to compute with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..masks import visible_pairs

__all__ = ["PositionalMask"]


class PositionalMask(torch.Tensor):
    """A bool mask (B, 1, L, S), True where a query sees a key, without memory for its elements.

    A library that makes masks in one place and attends in another can hand this from one to the other. Its
    shape, dtype and device are those of the mask that it stands for; any operation on it computes that mask
    first (:meth:`dense`) and gives a plain tensor, so that code which does not know the class stays right.
    Code that knows it takes the rule and the visible keys as they are::

        selfattn_ext.scaled_dot_product_attention(q, k, v, mask.key_mask(), **mask.options())

    It cannot be written to.

    Args:
        shape: (B, L, S).
        window_size: (left, right) as in :func:`selfattn_ext.scaled_dot_product_attention`; (-1, 0) is the
            causal rule.
        query_offset: position of query 0 among the keys.
        visible_keys: (B, S) bool, which keys anybody sees; None for all.
        device: where the mask would be.
    """

    window_size: tuple[int, int]
    query_offset: int
    visible_keys: Tensor | None
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int],
        window_size: tuple[int, int],
        query_offset: int,
        visible_keys: Tensor | None,
        device: torch.device | str,
    ) -> PositionalMask:
        batch, queries, keys = shape
        mask = torch.Tensor._make_wrapper_subclass(
            cls, (batch, 1, queries, keys), dtype=torch.bool, device=torch.device(device)
        )
        mask.window_size = window_size
        mask.query_offset = query_offset
        mask.visible_keys = visible_keys
        mask._dense = None
        return mask

    def options(self) -> dict[str, Any]:
        """The rule as keyword arguments of :func:`selfattn_ext.scaled_dot_product_attention`."""
        if self.window_size == (-1, -1):
            return {}
        if self.window_size == (-1, 0):
            return {"is_causal": True, "query_offset": self.query_offset}
        return {"window_size": self.window_size, "query_offset": self.query_offset}

    def key_mask(self) -> Tensor | None:
        """``visible_keys`` as a mask (B, 1, 1, S), or None."""
        return None if self.visible_keys is None else self.visible_keys[:, None, None, :]

    def dense(self) -> Tensor:
        """The mask as a plain tensor (B, 1, L, S), made once, its batch entries perhaps in one memory."""
        if self._dense is None:
            batch, _, queries, keys = self.shape
            mask = visible_pairs(
                queries,
                keys,
                window_size=self.window_size,
                query_offset=self.query_offset,
                device=self.device,
            )
            shown = self.key_mask()
            if mask is None:
                mask = torch.ones((), dtype=torch.bool, device=self.device) if shown is None else shown
            elif shown is not None:
                mask = mask & shown
            self._dense = mask.expand(batch, 1, queries, keys)
        return self._dense

    # Attributes and methods are found as on any tensor; only operators, which come out below, compute.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], PositionalMask):  # type: ignore[attr-defined]
            raise RuntimeError(f"{func} cannot write to a PositionalMask; take its dense() and clone that")
        args, kwargs = _pytree.tree_map_only(PositionalMask, PositionalMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        padded = "" if self.visible_keys is None else ", visible_keys=..."
        return (
            f"PositionalMask({tuple(self.shape)}, window_size={self.window_size}, "
            f"query_offset={self.query_offset}{padded})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionalMask:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().clone().__reduce_ex__(protocol)
