"""torch's experimental context_parallel runs on this package's kernels while they are active.

Note [Where torch's context parallelism is met]
    torch puts a function of its own in the place of F.scaled_dot_product_attention, which makes DTensors of a
    rank's tensors, and knows how to split three operators of CUDA. The other operators of its attention would
    compute on DTensors whose rows are not in order. So while the switch is on, the function that torch
    puts there is ours, which splits the whole call. This takes three names that are private to torch; in a
    version without them its context parallelism stays torch's, and so it does if the switch is turned on
    before there are process groups.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .split_attention import ring_attention

__all__ = ["activate", "restore"]

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_NAMES = ("_cp_options", "_distribute_function", "_replaced_functions")

#: torch's function, once for each time that the switch was turned on.
_torchs: list[Callable[..., None]] = []
_lock = threading.Lock()


def activate() -> None:
    """Blocks of torch's context_parallel that begin from now on are ours."""
    module = _module()
    if module is not None:
        with _lock:
            _torchs.append(_torchs[0] if _torchs else module._distribute_function)
            module._distribute_function = _distribute_function


def restore() -> None:
    """Blocks are torch's again, once this has been called as often as :func:`activate`."""
    module = _module()
    if module is None:
        return
    with _lock:
        torchs = _torchs.pop() if _torchs else None
        if torchs is not None and not _torchs:
            module._distribute_function = torchs


def _module() -> Any:
    """torch's module, or None where this torch has none, or another one."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    return module if all(hasattr(module, name) for name in _NAMES) else None


def _distribute_function(function: Any, module: Any, mesh: Any, *others: Any) -> None:
    """Replaces a function of a module, as torch's function of that name does."""
    if function is not F.scaled_dot_product_attention:
        return _torchs[0](function, module, mesh, *others)
    replaced = _module()._replaced_functions
    if function in replaced:
        return None
    attention = _attention_of(mesh)
    replaced[attention] = (function.__name__, function)
    setattr(module, function.__name__, attention)
    return None


def _attention_of(mesh: Any) -> Callable[..., Tensor]:
    """F.scaled_dot_product_attention of a rank's rows, whose arguments ring_attention takes as they are."""
    options = _module()._cp_options

    def attention(*args: Any, **given: Any) -> Tensor:
        out: Tensor = ring_attention(
            *args, **given, group=mesh,
            layout="head-tail" if options.enable_load_balance else "contiguous",
            rotate="p2p" if options.rotate_method.name == "ALL_TO_ALL" else "allgather",
        )  # fmt: skip
        return out

    return attention
