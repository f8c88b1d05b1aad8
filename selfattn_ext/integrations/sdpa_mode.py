"""as_sdpa: a block in which F.scaled_dot_product_attention runs on this package's kernels.

Note [A dispatch key as the switch]
    The block includes a dispatch key in the thread's set of keys, one that torch itself uses in no build, and
    the kernels registered under that key stand before everything else: autocast, torch.func, autograd. A
    call that they leave alone is made again without the key. This has four advantages over a
    TorchFunctionMode or a replaced function: other operators cost what they did; C++ code (TorchScript, the
    fast path of nn.TransformerEncoder) is caught like Python code; threads that autograd starts inherit the
    set, other threads do not; and torch.compile, which compares the keys of its inputs before it runs a
    compiled function again, recompiles at the border of the block.

Note [Compiled code]
    A function that is compiled within the block holds this package's operators. Compiled results that torch
    keeps on disk are found by the traced graph, which looks the same in and out of the block, so the block
    tells them apart by torch's tag for such results. Inside a function that is being compiled, where keys
    cannot be changed, the block is a TorchFunctionMode, which torch.compile traces, and our function a step
    of the graph like torch's own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import backends, functional
from ..arguments import precision, split_blocks
from ..rebound import calling
from . import aten_multihead

__all__ = ["as_sdpa"]

# Every build of torch has this key, for C++ tests that include it by hand.
_KEY = "TESTING_ONLY_GenericMode"
_TAG = "selfattn_ext"

_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_REFUSALS = (ValueError, TypeError, MemoryError)

_key: Any = torch._C._parse_dispatch_key(_KEY)
_keys = torch._C.DispatchKeySet(_key)
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_set_included = torch._C._dispatch_tls_set_dispatch_key_included
_without_key = torch._C._ExcludeDispatchKeyGuard
_lock = threading.Lock()

# Looked up once: an attribute chain costs as much as the call at its end.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_flash_enabled = torch._C._get_flash_sdp_enabled
_tracing_state = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_no_dispatch = torch._C._disabled_torch_dispatch_impl


def as_sdpa() -> _Block | _Traced:
    """A context manager and decorator: attention of PyTorch runs on this package's kernels.

    It takes every call of :func:`torch.nn.functional.scaled_dot_product_attention`, from Python or C++, and
    the fast path of :class:`torch.nn.MultiheadAttention` and :class:`torch.nn.TransformerEncoderLayer`.
    Beyond the calls that ``torch.nn.attention.activate_flash_attention_impl("selfattn_ext")`` takes, these
    are those that torch computes with its formula: dropout, gradients of masks, Ev != E, grouped heads, any
    number of leading dimensions, derivatives of any order. For everything else (other dtypes and devices,
    nested tensors, other tensor subclasses, mistakes) results and errors are torch's own, and so they are
    where :func:`torch.nn.attention.sdpa_kernel` does not allow FLASH_ATTENTION.

    It holds for the thread that enters it and for the threads in which autograd computes gradients meanwhile,
    like :class:`torch.autocast`. Blocks may be nested. torch.compile compiles a function once for use inside
    and once for use outside, and takes the block inside a compiled function too.

    Activation checkpointing recomputes in the backward, which therefore belongs into a block too.

    Returns:
        A context manager, which also decorates functions, and which can be entered again.

    Raises:
        NotImplementedError: in a function that torch.compile compiles, if attention is called in it while a
            block of :class:`selfattn_ext.distributed.context_parallel` is open.

    Example:
        >>> import torch, selfattn_ext
        >>> import torch.nn.functional as F
        >>> query = key = value = torch.randn(2, 4, 16, 32, requires_grad=True)
        >>> with selfattn_ext.as_sdpa():
        ...     F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).sum().backward()
        >>> @selfattn_ext.as_sdpa()
        ... def encode(layer, x):
        ...     return layer(x)
        >>> encode(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """
    if torch.compiler.is_dynamo_compiling():
        _put_in_graphs()
        return _Traced()
    return _Block()


class _Block(ContextDecorator):
    """Includes the key; see Note [A dispatch key as the switch]."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def _recreate_cm(self) -> _Block:
        return _Block()

    def __enter__(self) -> None:
        _install()
        if not hasattr(self._of_thread, "before"):
            self._of_thread.before = []
        self._of_thread.before.append(_is_included(_key))
        _tagged.enter()
        _set_included(_key, True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _set_included(_key, self._of_thread.before.pop())
        _tagged.leave()


class _Tagged:
    """torch's tag for compiled results on disk while any thread is in a block; see Note [Compiled code]."""

    def __init__(self) -> None:
        self._blocks = 0
        self._before = ""

    def enter(self) -> None:
        with _lock:
            self._blocks += 1
            if self._blocks == 1:
                self._before = torch.compiler.config.cache_key_tag
                torch.compiler.config.cache_key_tag = self._before + _TAG

    def leave(self) -> None:
        with _lock:
            self._blocks -= 1
            if self._blocks == 0 and torch.compiler.config.cache_key_tag == self._before + _TAG:
                torch.compiler.config.cache_key_tag = self._before


_tagged = _Tagged()


class _Traced(TorchFunctionMode):
    """The block within a function that torch.compile traces."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            split_blocks.refuse("as_sdpa() within a function that is compiled")
            return _attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # It calls F.scaled_dot_product_attention by a name that no mode sees.
            return _multi_head_attention_forward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _put_in_graphs() -> None:
    """Tells Dynamo to take our function as one step of its graph, like torch's. AOTAutograd enters it."""
    torch.compiler.allow_in_graph(_attention)


# Dynamo calls it while it traces, instead of tracing it.
_put_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _install() -> None:
    """Registers the kernels of the key, for good: no thread has the key in its set outside of a block."""
    with _lock:
        if not _libraries:
            _register()


def _register() -> None:
    everything = torch.library.Library("_", "IMPL", _KEY)
    everything.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", _KEY)
    library.impl("scaled_dot_product_attention", _attention)
    library.impl("_native_multi_head_attention", _multi_head_attention)
    _libraries.extend((everything, library))
    # Operators that take functions, such as torch.func's, have a list of their own of keys to skip.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_key)


_libraries: list[torch.library.Library] = []


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    with _without_key(_keys):
        if _taken(query, key, value, attn_mask, enable_gqa):
            _guard_precision(query)
            try:
                return functional.scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
            except _REFUSALS:
                pass
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


_multi_head_attention_forward = calling(
    F.multi_head_attention_forward, scaled_dot_product_attention=_attention
)


def _multi_head_attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    with _without_key(_keys):
        if all(_is_ours(tensor, tensor.is_nested) for tensor in args[:3]) and _is_allowed():
            try:
                return aten_multihead.multi_head_attention(*args)
            except _REFUSALS:
                pass
        return torch.ops.aten._native_multi_head_attention(*args)


def _taken(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether this package takes a call, and torch would: torch has to refuse the calls that it refuses.

    Shapes that do not fit are not looked at here, because both refuse them.
    """
    if not (_is_ours(query) and _is_ours(key) and _is_ours(value) and _is_allowed()):
        return False
    if query.size(-1) == 0 or (enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3):
        return False
    casts = _is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type)
    if not casts and not query.dtype == key.dtype == value.dtype:
        return False
    if attn_mask is None:
        return True
    if not _is_plain(attn_mask) or attn_mask.dim() < 2 or attn_mask.device != query.device:
        return False
    mask = attn_mask.dtype
    return mask in (torch.bool, torch.float32, query.dtype) or (casts and mask in _DTYPES)


def _is_allowed() -> bool:
    """Whether torch.jit.trace is not recording and torch.nn.attention.sdpa_kernel allows flash attention."""
    return _is_flash_enabled() and _tracing_state() is None


def _is_ours(tensor: Tensor, nested: bool = False) -> bool:
    return (
        tensor.dtype in _DTYPES
        and tensor.dim() >= 2
        and (nested or _is_plain(tensor))
        and (tensor.is_cpu or (tensor.is_cuda and _has_kernels(tensor.device)))
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in memory, or stands for such a tensor while torch traces."""
    kind = type(tensor)
    return (
        (
            kind is Tensor
            or kind.__torch_dispatch__ is _no_dispatch
            or kind.__module__.startswith("torch._subclasses.")
        )
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return bool(backends.available(device))


def _guard_precision(query: Tensor) -> None:
    """Has a compiled function recompile if the precision that it was compiled for changes."""
    if query.dtype is torch.float32 and _is_compiling():
        precision.of_graph(query.is_cuda)
