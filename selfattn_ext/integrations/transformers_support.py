"""Models of transformers that are given our name run on these kernels, or are refused.

Most models ask transformers' AttentionInterface for their attention function. Some take a class of layers
from a table, "eager" and "sdpa", in the module of the model: such a table gets an entry of our name, the
"sdpa" class run within :func:`selfattn_ext.as_sdpa`. Others compute attention by themselves and would accept
any name silently; these raise ValueError, as most of them do for "sdpa". Those of them that call torch's
function, or have models inside that ask, get a warning.

Nothing is imported for this: a model is judged and prepared when one of its kind is built.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils import _pytree

from . import transformers_457, transformers_paged
from .positional_mask import LazyMask
from .sdpa_mode import as_sdpa
from .transformers_masks import note_bool_masks
from .transformers_weights import watch, weights_are_wanted

__all__ = ["keeps_sinks_out_of_weights", "makes_masks", "register"]

# Packages whose tables have an "sdpa" class that takes the masks that their models make for our name.
_WITH_TABLES = {"data2vec", "deepseek_ocr2", "falcon", "sam", "sam_hq", "unlimited_ocr"}

_names: set[str] = set()
_lock = threading.Lock()
_version: tuple[int, ...] = ()
_attention_forward: Callable[..., Any]


def register(name: str, version: tuple[int, ...], attention_forward: Callable[..., Any]) -> None:
    """Has models take the name, which AttentionInterface knows already as that function, or refuse it. It can
    be called again.
    """
    global _attention_forward, _version
    from transformers import PreTrainedModel

    with _lock:
        if not _names:
            _attention_forward, _version = attention_forward, version
            PreTrainedModel.get_correct_attn_implementation = _judging(
                PreTrainedModel.get_correct_attn_implementation
            )
            if version >= transformers_paged.OLDEST:
                transformers_paged.register(_has_our_name)
        _names.add(name)


def makes_masks(module: nn.Module) -> bool:
    """Whether this package makes the masks of a layer, so that None hides nothing."""
    return _has_our_name(getattr(module, "config", None))


def _has_our_name(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) in _names


def keeps_sinks_out_of_weights(module: nn.Module) -> bool:
    """Whether the weights that the model returns are those without its sinks."""
    return getattr(getattr(module, "config", None), "model_type", None) in ("granite_swa", "granitemoe_swa")


def _judging(get_correct_attn_implementation: Any) -> Any:
    """Wraps the method that a model calls before it builds its layers, and if its implementation changes."""

    @functools.wraps(get_correct_attn_implementation)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = get_correct_attn_implementation(self, *args, **kwargs)
        if chosen in _names:
            kind = type(self)
            prepared = [_prepared(base, chosen) for base in kind.__mro__]
            if not any(prepared) and _computes_by_itself(kind):
                _refuse(kind, chosen)
            bools = kind._supports_sdpa or getattr(kind, "_supports_flex_attn", False)
            # A class from a table may not call torch's function, and add its mask instead.
            note_bool_masks(self.config, bools and not any(prepared))
            watch(self)
        return chosen

    return wrapped


def _refuse(kind: Any, name: str) -> None:
    """Raises ValueError; or warns, for a model that transformers accepts with "sdpa" nevertheless."""
    alone = f"{kind.__name__} computes attention by itself and does not ask for an implementation"
    if kind._supports_sdpa and not _tables(sys.modules[kind.__module__]):
        warnings.warn(f"{alone}: of {name!r} only models that it is made of make use", stacklevel=2)
        return
    raise ValueError(
        f'{alone}, so that it cannot run on {name!r}: use attn_implementation="eager"; where only a part of '
        f'a model is meant, {{"": "{name}", "vision_config": "eager"}} or the like'
    )


def _prepared(kind: type, name: str) -> bool:
    """Prepares a class of models; False if there is nothing to prepare, or it cannot be done."""
    package, _, model = kind.__module__.rpartition(".")[0].rpartition(".")
    if package != "transformers.models":
        return False
    module = sys.modules[kind.__module__]
    if _version < (5, 0) and transformers_457.replace_forward(model, module, _names, _attention_forward):
        return True
    tables = _tables(module)
    if model in (_WITH_TABLES if _version >= (5, 0) else transformers_457.WITH_TABLES):
        for table in tables:
            if "sdpa" in table:
                table.setdefault(name, _within_as_sdpa(table["sdpa"], table["eager"]))
    return bool(tables) and all(name in table for table in tables)


def _tables(module: ModuleType) -> list[dict[str, Any]]:
    """The tables of classes of layers in the module of a model."""
    found = [value for value in vars(module).values() if isinstance(value, dict)]
    return [table for table in found if inspect.isclass(table.get("eager"))]


def _computes_by_itself(kind: Any) -> bool:
    """Whether the layers in the module of a model would not ask for our function."""
    module = sys.modules.get(kind.__module__)
    try:
        inspect.getsource(module)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return False  # a module without a source, as in a notebook, cannot be judged
    assert module is not None
    return bool(_tables(module)) or not kind._can_set_attn_implementation()


@functools.cache
def _within_as_sdpa(sdpa_class: Any, eager_class: Any) -> Any:
    """The class with our kernels in the place of torch's, or the eager class if weights are asked for."""

    class Attention(sdpa_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if hasattr(self, "config"):
                # Falcon's class serves "eager" as well and looks which one it is.
                self.config = copy.copy(config)
                self.config._attn_implementation_internal = "sdpa"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _pytree.tree_map_only(LazyMask, LazyMask.additive, (args, kwargs))
            if isinstance(self, eager_class) and weights_are_wanted(self):
                return eager_class.forward(self, *args, **kwargs)
            with as_sdpa():
                return super().forward(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # pickle cannot find a class that is made here by its name.
            return _empty, (sdpa_class, eager_class), self.__dict__

    Attention.__name__ = Attention.__qualname__ = sdpa_class.__name__
    return Attention


def _empty(*classes: Any) -> Any:
    """An empty instance, which pickle and deepcopy fill."""
    made = _within_as_sdpa(*classes)
    return made.__new__(made)
