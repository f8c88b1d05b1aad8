"""Tells whether a layer of transformers is to return its attention weights.

Not every model tells its layers. There are three ways: the argument ``output_attentions``, which reaches the
attention function in some models; transformers' collectors, which take what layers return; and models that
gather the weights of their layers in a loop of their own. Because of the last, models are watched: a hook
sees ``output_attentions`` as one is called.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn

from .transformers_masks import captured

__all__ = ["watch", "weights_are_wanted"]


class _Calls(threading.local):
    """Whether the models that are running in this thread were asked for weights, the innermost last."""

    def __init__(self) -> None:
        self.wanted: list[bool] = []


_calls = _Calls()


def watch(model: nn.Module) -> None:
    """Has the layers of a model know whether it is asked for weights. It can be called again."""
    if _enter not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


def _enter(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        wanted = kwargs.get("output_attentions")
        if wanted is None:
            wanted = getattr(getattr(model, "config", None), "output_attentions", False)
        _calls.wanted.append(bool(wanted))


def _leave(model: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and _calls.wanted:
        _calls.wanted.pop()


def weights_are_wanted(module: nn.Module) -> bool:
    """Whether a layer's weights are gathered by its model or by transformers."""
    if torch.compiler.is_compiling():
        return False
    if _calls.wanted and _calls.wanted[-1]:
        return True
    collector = _collector()
    if collector is not None:
        return any("attentions" in name for name in collector.get() or ())
    # 4.57 puts a function that knows what it collects before the forward of the layer.
    return "attentions" in str(captured(vars(module).get("forward")).get("key"))


@functools.cache
def _collector() -> Any:
    """The variable in which transformers 5 names what it collects, None in 4.57."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector
