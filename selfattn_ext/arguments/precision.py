"""The precision of float32 products: torch's setting, read at every call.

Note [Precision in compiled graphs]
    A traced graph holds the precision as a constant, so it must not outlive the setting. Dynamo's own guards
    tell "highest" from the other two settings but not those from each other, hence the guard here. If Dynamo
    offers no guard, a graph asks for "highest", which is right for any setting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["current", "current_for", "current_on_cuda", "of_graph"]

_setting = torch._C._get_float32_matmul_precision

# torch.backends calls the same precisions by other names.
_OF_BACKENDS = {"tf32": "high", "bf16": "medium"}


def current() -> str:
    """Returns the float32 precision of the process: "highest", "high" or "medium".

    It is that of :func:`torch.set_float32_matmul_precision`. If torch.backends has set devices differently,
    that has no value, and the answer is torch.backends.mkldnn.matmul.fp32_precision, that of the CPU.
    """
    try:
        return _setting()
    except RuntimeError:
        return _of_backend(torch.backends.mkldnn)


def current_on_cuda() -> str:
    """Returns the same for CUDA: torch.backends.cuda.matmul.fp32_precision if devices are set differently."""
    try:
        return _setting()
    except RuntimeError:
        return _of_backend(torch.backends.cuda)


def current_for(tensor: Tensor) -> str:
    """Returns the precision for products on the tensor's device."""
    try:
        return _setting()
    except RuntimeError:
        return current_on_cuda() if tensor.is_cuda else current()


def _of_backend(backend: Any) -> str:
    return _OF_BACKENDS.get(backend.matmul.fp32_precision, "highest")


def of_graph(on_cuda: bool) -> str:
    """Returns the precision for a graph that torch.compile traces: Note [Precision in compiled graphs]."""
    asked = current_on_cuda if on_cuda else current
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, ImportSource

        package, *path = __name__.split(".")
        source: Any = ImportSource(package)
        for name in (*path, asked.__name__):
            source = AttrSource(source, name)
        source = CallFunctionNoArgsSource(source)
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    except (ImportError, AttributeError, TypeError):
        return "highest"
    return asked()


# Dynamo calls it while it traces, instead of tracing it.
of_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
