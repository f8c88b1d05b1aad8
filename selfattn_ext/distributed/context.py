"""context_parallel: a block in which attention that knows nothing of ranks runs split over them.

Note [A mode as the switch]
    The block is a torch function mode. Such a mode sees this package's functions as it sees torch's, so that
    calls outside of blocks cost what they did. Functions of attention that cannot be split ask whether a
    block is open, and refuse, as a rank would take its part of a sequence for the whole. While torch calls a
    mode, the mode is off; so what computes gradients, where checkpoints recompute, is called with the mode on
    again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from .. import functional
from ..arguments import checks, split_blocks
from ..rebound import calling
from ..varlen import varlen_attention
from .agreement import Telling
from .group import ranks_of
from .packed import ring_varlen_attention
from .row_layout import LayoutName
from .shard import unshard_sequence
from .split import choices
from .split_attention import ring_attention, ulysses_attention

__all__ = ["context_parallel"]

METHODS = ("ring", "ulysses")

#: Functions that would take a rank's part of a sequence for the whole.
_REFUSED: tuple[Any, ...] = (
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)


#: Functions that compute gradients.
_DERIVATIVES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class context_parallel(TorchFunctionMode):
    """A context manager: each rank passes its part of a sequence, and attention sees the whole.

    Under it run split: :func:`selfattn_ext.scaled_dot_product_attention` and what is made of it, such as the
    layers and Hugging Face models with ``attn_implementation="selfattn_ext"``;
    :func:`torch.nn.functional.scaled_dot_product_attention`, under :func:`selfattn_ext.as_sdpa` and without;
    :func:`selfattn_ext.varlen_attention`, whose offsets are then those of the whole sequences. Options count
    in positions of the whole sequence, and masks have its columns. All other attention is refused.

    Args:
        mesh: a ProcessGroup or a DeviceMesh of one dimension; the default group where None. A DeviceMesh of
            two dimensions splits both ways: over rings in the first, over heads in the second.
        method: "ring" (:func:`ring_attention`) or "ulysses" (:func:`ulysses_attention`). A mesh of two
            dimensions leaves no choice.
        layout, rotate: as :func:`ring_attention` takes them.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ring_attention` does, for the arguments here. Nothing
            is exchanged here, so the other ranks do not learn of it.

    It holds for the thread that enters it. Activation checkpointing recomputes in the backward: that belongs
    into the block too, or torch refuses what is recomputed.

    Example:
        >>> import torch
        >>> from selfattn_ext import MultiheadAttention
        >>> from selfattn_ext.distributed import context_parallel, shard_sequence
        >>> layer = MultiheadAttention(32, 4, batch_first=True)
        >>> x = shard_sequence(torch.randn(1, 64, 32), dim=1)
        >>> with context_parallel():
        ...     out, _ = layer(x, x, x, is_causal=True, need_weights=False)
        ...     out.sum().backward()
        >>> out.shape
        torch.Size([1, 64, 32])
    """

    def __init__(
        self,
        mesh: Any = None,
        *,
        method: Literal["ring", "ulysses"] = "ring",
        layout: LayoutName = "zigzag",
        rotate: Literal["p2p", "allgather"] = "p2p",
    ) -> None:
        super().__init__()
        choices(layout, rotate)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, but it is {method!r}")
        how: dict[str, Any] = {"layout": layout, "rotate": rotate}
        self._attention: Callable[..., Any] = ring_attention if method == "ring" else ulysses_attention
        self._packed: Callable[..., Any] | None = ring_varlen_attention if method == "ring" else None
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            how["ring_group"], how["group"] = mesh.get_group(0), mesh.get_group(1)
            self._attention, self._packed = ulysses_attention, None
        else:
            how["group"] = ranks_of(mesh).group
        self._how = how

    def __enter__(self) -> context_parallel:
        split_blocks.open_one(self._join, self._telling)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        split_blocks.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _SPLIT:
            with self._telling():
                return _SPLIT[func](self, *args, **given)
        if func in _DERIVATIVES:
            return self._differentiate(func, args, given)
        if func in _REFUSED:
            split_blocks.refuse(func.__name__)
        return func(*args, **given)

    def _telling(self) -> Telling:
        """A block whose exceptions are told to the ranks that attend meanwhile."""
        rings = [self._how["ring_group"]] if "ring_group" in self._how else []
        return Telling(self._how["group"], *rings)

    def _join(self, tensor: Tensor, dim: int) -> Tensor:
        """The rows of all ranks."""
        group, layout, ring = self._how["group"], self._how["layout"], self._how.get("ring_group")
        if ring is None:
            return unshard_sequence(tensor, dim, group=group, layout=layout)
        with self._telling():
            of_ring = unshard_sequence(tensor, dim, group=group, layout="contiguous")
            return unshard_sequence(of_ring, dim, group=ring, layout=layout)

    def _differentiate(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Computes gradients with the mode on, as checkpoints recompute: Note [A mode as the switch]."""
        with self:
            if func is Tensor.backward:
                func = torch.autograd.backward
                given = {"grad_tensors" if name == "gradient" else name: what for name, what in given.items()}
            return calling(func, has_torch_function=lambda _: False)(*args, **given)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Any:
        options = inspect.signature(ring_attention).bind(query, key, value, *args, **_unasked(given))
        mask = options.arguments.get("attn_mask")
        if checks.is_causal_bias(mask):
            split_blocks.refuse("a CausalBias, which is made for the lengths of parts,")
        if any(checks.is_jagged(tensor) for tensor in (query, key, value)):
            split_blocks.refuse("a jagged tensor")
        return self._attention(*options.args, **options.kwargs, **self._how)

    def _varlen(self, *args: Any, **given: Any) -> Any:
        call = inspect.signature(varlen_attention).bind(*args, **_unasked(given))
        call.apply_defaults()
        options = dict(call.arguments)
        options.pop("return_weights")
        if options.pop("attn_mask") is not None:
            split_blocks.refuse("varlen_attention with attn_mask, which ring_varlen_attention takes,")
        tensors = [options.pop(name) for name in ("query", "key", "value")]
        starts, of_keys = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
        for name in ("max_seqlen_q", "max_seqlen_k"):
            del options[name]
        taken = inspect.signature(ring_varlen_attention).parameters
        for name in options.keys() - taken.keys():
            option, default = options.pop(name), inspect.signature(varlen_attention).parameters[name].default
            if option is not default and (isinstance(option, Tensor) or option != default):
                split_blocks.refuse(f"varlen_attention with {name}")
        if self._packed is None:
            raise NotImplementedError('packed sequences cannot be split but by the method "ring"')
        if of_keys is not starts and (of_keys is None or not torch.equal(starts, of_keys)):
            split_blocks.refuse("varlen_attention with different lengths of queries and keys")
        return self._packed(*tensors, starts, **options, **self._how)

    def _multi_head(self, *args: Any, **given: Any) -> Any:
        """torch.nn.MultiheadAttention, whose own call of the function no mode sees."""
        call = inspect.signature(F.multi_head_attention_forward).bind(*args, **given)
        call.apply_defaults()
        if call.arguments["need_weights"]:
            split_blocks.refuse("multi_head_attention_forward with need_weights=True")
        of_parts = calling(F.multi_head_attention_forward, scaled_dot_product_attention=self._dense)
        return of_parts(*call.args, **call.kwargs)


#: The functions that run split, and what computes them.
_SPLIT: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: context_parallel._dense,
    functional.scaled_dot_product_attention: context_parallel._dense,
    varlen_attention: context_parallel._varlen,
    F.multi_head_attention_forward: context_parallel._multi_head,
}


def _unasked(given: dict[str, Any]) -> dict[str, Any]:
    """The options without return_weights, which is refused unless it is False."""
    if given.get("return_weights", False) is not False:
        split_blocks.refuse("attention that returns its weights")
    return {name: value for name, value in given.items() if name != "return_weights"}
