"""collect_statistics: what the layers of a model know about their softmax, from an ordinary call of it."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .aux_request import AuxRequest, returned, wanted
from .reference_statistics import AuxOutput

__all__ = ["collect_statistics", "keep", "request_for"]

#: What a block collects: the name of each layer, by the layer's id, the request, and what has been found.
_Block = tuple[dict[int, str], AuxRequest, dict[str, list[AuxOutput]]]

_blocks: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar("blocks", default=())

_USUAL = AuxRequest(lse=True, max_scores=True, entropy=True)


@contextmanager
def collect_statistics(
    model: nn.Module, request: AuxRequest = _USUAL
) -> Iterator[dict[str, list[AuxOutput]]]:
    """A block in which every attention layer of a model that runs on this package keeps its statistics.

    Args:
        model: a model of Hugging Face transformers with ``attn_implementation="selfattn_ext"``, or any module
            with layers of :mod:`selfattn_ext.nn`.
        request: what to collect, an :class:`selfattn_ext.AuxRequest`; log-sum-exp, largest score and entropy
            by default.

    Returns:
        For ``as``: a dictionary from the name of a layer, as ``model.named_modules()`` has it, to a list with
        an :class:`selfattn_ext.AuxOutput` for each of its calls in the block. They have gradients.

    Raises:
        TypeError, ValueError: model is not a module, or request is none; the message names the argument.
        RuntimeError: at the end of the block, if no layer has kept anything.

    A layer in code of torch.compile keeps nothing: collect from the model as it was before. Layers that
    compute again, as activation checkpoints do, are kept again. Blocks may be nested.

    Example:
        >>> import torch
        >>> from selfattn_ext import AuxRequest, MultiHeadSelfAttention, collect_statistics
        >>> model = torch.nn.Sequential(MultiHeadSelfAttention(32, 4), MultiHeadSelfAttention(32, 4))
        >>> with collect_statistics(model, AuxRequest(entropy=True)) as statistics:
        ...     out = model(torch.randn(2, 6, 32))
        >>> [(name, calls[0].entropy.shape) for name, calls in statistics.items()]
        [('0', torch.Size([2, 4, 6])), ('1', torch.Size([2, 4, 6]))]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but it is {type(model).__name__}")
    wanted(request, False, False)
    found: dict[str, list[AuxOutput]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    token = _blocks.set((*_blocks.get(), (names, request, found)))
    try:
        yield found
    finally:
        _blocks.reset(token)
    if not found:
        raise RuntimeError(
            "no layer of the model has computed attention by this package in the block: load a model of "
            'transformers with attn_implementation="selfattn_ext", and do not compile it'
        )


def request_for(layer: nn.Module, own: Any = None) -> Any:
    """Returns what a layer asks for: what its caller asks for (``own``), and all that blocks collect."""
    if torch.compiler.is_compiling():
        return own
    requests = [request for names, request, _ in _blocks.get() if id(layer) in names]
    if not requests:
        return own
    if own is not None:
        requests.append(own)
    flags = {name: any(getattr(each, name, False) for each in requests) for name in AuxRequest._fields}
    return AuxRequest(**flags)


def keep(layer: nn.Module, found: AuxOutput, kv_heads: int | None) -> None:
    """Keeps what a layer's call has found, for the blocks that collect from it; see :func:`.returned`."""
    for names, request, kept in _blocks.get():
        if id(layer) in names:
            kept.setdefault(names[id(layer)], []).append(returned(request, found, kv_heads))
