"""activate_flash_attention_impl("selfattn_ext"): torch's own switch for flash attention.

Importing the package registers the name, which costs a dictionary entry. Activating puts this package's
kernels in the place of torch's fused ones, for the whole process; restore_flash_attention_impl() takes them
out again. Calls that torch does not send to its fused kernels stay torch's; :mod:`.sdpa_mode` takes those,
too.

Note [Kernels in torch's table]
    The dispatcher keeps the kernels that were registered for an operator and a device in a stack, and calls
    the newest. So taking ours off brings torch's back, and so does deleting the torch.library.Library that
    holds ours. torch's kernel is remembered before, for calls that ours refuses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import backends
from . import aten_cpu, aten_cuda, aten_multihead, torch_context_parallel

__all__ = ["NAME", "activate", "register"]

#: The name that activate_flash_attention_impl knows the kernels by.
NAME = "selfattn_ext"

#: The exceptions by which the kernels refuse a call, TypeError for dtypes.
REFUSALS = (ValueError, TypeError)


class Activation:
    """Kernels in torch's table, until :meth:`remove` or the last reference is gone."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        tables: list[tuple[str, dict[str, Callable[..., Any]]]] = [
            ("CPU", {**aten_cpu.OPERATORS, **aten_multihead.OPERATORS}),
            ("NestedTensorCPU", aten_multihead.OPERATORS),
        ]
        if backends.available("cuda"):
            tables.append(("CUDA", aten_cuda.OPERATORS))
        with warnings.catch_warnings():
            # torch warns of the first kernel that takes another's place, which is what was asked for.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for dispatch_key, operators in tables:
                for name, function in operators.items():
                    kernel = _or_torch(f"aten::{name}", dispatch_key, function)
                    self._library.impl(name, kernel, dispatch_key, with_keyset=True, allow_override=True)

        torch_context_parallel.activate()

    def remove(self) -> None:
        """Brings torch's kernels back. Calling it again does nothing."""
        library, self._library = self._library, None
        if library is not None:
            torch_context_parallel.restore()
            library._destroy()


def _or_torch(operator: str, dispatch_key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with torch's kernel for calls that it refuses."""
    torchs = torch.library.get_kernel(operator, dispatch_key)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except REFUSALS:
            return torchs.call_boxed(keys, *args, **kwargs)

    return kernel


def activate() -> Activation:
    """Puts the kernels in the place of torch's, as torch.nn.attention.activate_flash_attention_impl asks.

    Returns:
        The handle that restore_flash_attention_impl removes.
    """
    return Activation()


def register() -> None:
    """Makes the name known to torch.nn.attention. Nothing runs on these kernels before it is activated."""
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)
