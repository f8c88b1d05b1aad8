"""torch's own flex_attention runs on this package's kernels, in programs that call it.

:func:`activate` and :func:`restore` hold for the process; :mod:`.flex_mode` has the same as a block.

Note [A function's code as the switch]
    Programs bind the function as they are imported, and torch.compile keeps it, so replacing the name in
    torch's module would reach few of them. What they all hold is the function object, and so its code is
    replaced, by one that asks :func:`attention`. Nothing else of torch is touched, and putting the code
    back restores everything: torch.compile looks code up by its identity. A function that was compiled
    has a compiled form for either code, and the code is among its guards. So the first call after a switch
    compiles once more, and later ones go back to the earlier form.

    Other ways are worse. A TorchFunctionMode does not see this function. Kernels for torch's
    operator ``torch.ops.higher_order.flex_attention`` come after the checks that refuse gradients on the
    CPU, get functions that Dynamo has traced, which costs a compilation even if none is asked for, and
    would have to tell callers apart in a dispatcher's cache. Replacing the checks that torch's function
    calls by name leaves that compilation.

Note [What stays torch's]
    Calls that :func:`attention` does not take run torch's own code, in a function that shares its
    globals: other devices than the CPU, other dtypes, nested tensors and other subclasses, q, k and v of
    different dtypes, and all calls that torch.export traces.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..flex import flex_attention

__all__ = ["activate", "attention", "restore", "switch"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)


def activate() -> None:
    """Has torch's flex_attention run on this package's kernels in all threads, until :func:`restore`.

    The calls that it takes are those of :func:`selfattn_ext.as_flex`. Calling it again does nothing.

    Raises:
        RuntimeError: this torch's flex_attention has other arguments than this package knows.

    Example:
        >>> import torch
        >>> from selfattn_ext.integrations import torch_flex
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> query = torch.randn(1, 2, 16, 8, requires_grad=True)
        >>> torch_flex.activate()
        >>> flex_attention(query, query, query).sum().backward()  # torch's refuses gradients on the CPU
        >>> torch_flex.restore()
    """
    with _lock:
        if not _activated.is_set():
            switch.enter()
            _activated.set()


def restore() -> None:
    """Undoes :func:`activate`, if it was called. Open blocks of as_flex stay in force.

    Example:
        >>> from selfattn_ext.integrations import torch_flex
        >>> torch_flex.activate()
        >>> torch_flex.restore()
    """
    with _lock:
        if _activated.is_set():
            _activated.clear()
            switch.leave()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """The function that torch's flex_attention calls while the switch is on.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux:
            as :func:`torch.nn.attention.flex_attention.flex_attention` takes them.

    Returns:
        The results of :func:`selfattn_ext.flex_attention`, or of torch's own function for other devices,
        dtypes and classes of tensors.

    Raises:
        ValueError, TypeError, RuntimeError, IndexError: as :func:`selfattn_ext.flex_attention` does.
    """
    if not _taken(query, key, value) or torch.compiler.is_exporting():
        return switch.torchs(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    return flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
        # Given here, as Dynamo would take their defaults for numbers that may change, and compile twice.
        dropout_p=0.0, softcap=0.0,
    )  # fmt: skip


def _taken(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN):
        return False
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False
    return query.dtype in _DTYPES and query.dtype == key.dtype == value.dtype


# The names in its code are looked up in torch's module, hence the import inside.
def _entry(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    from selfattn_ext.integrations.torch_flex import attention

    return attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )


class _Switch:
    """The code of torch's function, ours while there are users: Note [A function's code as the switch]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._function: types.FunctionType | None = None
        #: torch's function with torch's code.
        self.torchs: Callable[..., Any] = _not_entered

    def enter(self) -> None:
        with self._lock:
            if self._function is None:
                self._function, self.torchs = _torchs()
            if self._users == 0:
                self._function.__code__ = _entry.__code__
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._function is not None and self._function.__code__ is _entry.__code__:
                self._function.__code__ = self.torchs.__code__


def _torchs() -> tuple[types.FunctionType, types.FunctionType]:
    """torch's function, and a copy of it.

    Raises:
        RuntimeError: torch's function is not one that this package knows.
    """
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = flex_attention
    code, ours = function.__code__, _entry.__code__
    names = [each.co_varnames[: each.co_argcount + each.co_kwonlyargcount] for each in (code, ours)]
    if names[0] != names[1] or code.co_freevars:
        raise RuntimeError(
            f"torch {torch.__version__} has another flex_attention than selfattn_ext knows, with the "
            f"arguments {', '.join(names[0])}: call selfattn_ext.flex_attention instead"
        )
    same = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    same.__kwdefaults__ = function.__kwdefaults__
    return function, same


def _not_entered(*_: Any, **__: Any) -> Any:
    raise AssertionError("nobody has entered the switch")


#: The switch that :func:`activate` and as_flex share.
switch = _Switch()
_activated = threading.Event()
_lock = threading.Lock()
