"""The masks of Hugging Face transformers become rules that the kernels evaluate.

transformers describes the visible keys of each query by a function of (batch, head, query, key) and asks the
attention implementation for a mask of it. Those functions that say "causal", "sliding window" or "everybody"
are recognised here and become a :class:`PositionalMask`, with the padding as a row of visible keys per batch
entry: no (L, S) tensor. Any other function becomes a :class:`VisibleMask` of the elements.

Note [What a model may do with its mask]
    Many models slice their masks, join them with others, or compute a part of their attention by themselves
    and add the mask to scores. The masks of "eager", which are added, allow all of this; so both classes turn
    into these if a model computes with them. While a graph is traced a mask must be a plain tensor. Models
    that transformers itself runs on bool masks, by "sdpa" or flex_attention, get those, of which the kernels
    skip what is hidden; all other models get the mask of "eager".

    A mask is left out if "eager" leaves it out. So "no mask" hides nothing, whatever the layer says about
    being causal; a model that appends to its mask has one, and one that counts on none has none.

Note [The position of the queries]
    Query 0 stands at some position among the keys: 0 in training, the number of cached tokens in generation,
    less what a sliding cache has dropped. transformers 5 tells it as ``q_offset``, a number or, for static
    caches, a tensor; 4.57 as the tensor ``cache_position``. On the CPU a tensor's value is read. On a GPU
    that would wait for it, which is done only where transformers does it for "sdpa", and else the mask is a
    tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..arguments import split_blocks
from ..capture import is_capturing
from .positional_mask import PositionalMask, VisibleMask

__all__ = ["attention_mask", "captured", "note_bool_masks"]

Window = tuple[int, int]


# The classes of configurations of which some model takes bool masks, and those of which one does not.
_with_bool: set[type] = set()
_without_bool: set[type] = set()


def note_bool_masks(config: Any, taken: bool) -> None:
    """Remembers whether a model of this configuration takes bool masks; all that share its class must."""
    (_with_bool if taken else _without_bool).add(type(config))


def attention_mask(**arguments: Any) -> Tensor | None:
    """The mask that transformers' AttentionMaskInterface asks for.

    Args:
        arguments: those of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        None if queries see every key and that is allowed; a mask that is computed when it is needed; or a
        plain mask (B, 1, L, S) if a graph is or may be traced: Note [What a model may do with its mask].

    Example:
        >>> from selfattn_ext.integrations.transformers import mask_function
        >>> from transformers import AttentionMaskInterface
        >>> AttentionMaskInterface.register("my_attention", mask_function)  # register() does this, too
    """
    from transformers import masking_utils

    if _is_tracing(arguments):
        return _plain_mask(arguments, masking_utils)
    queries, keys = _query_length(arguments), arguments["kv_length"]
    window = _window(arguments["mask_function"], masking_utils)
    offset = None if window is None else _query_offset(arguments)
    shown: Tensor | None = None
    if window is not None and offset is not None:
        shown = _visible_keys(arguments, queries, offset, hides_later=window[1] == 0)
        if queries == 1 and shown is None and _hides_nothing(window, offset, keys):
            window = (-1, -1)
        if window == (-1, -1) and shown is None and arguments.get("allow_is_bidirectional_skip", False):
            return None
    if queries == 1 and not arguments.get("allow_is_causal_skip", True):
        # This decoding step may be compiled, and an offset must not be frozen into it.
        return _plain_mask(arguments, masking_utils)
    dtype = arguments.get("dtype", torch.float32)
    if window is None or offset is None:
        visible = masking_utils.sdpa_mask(**{**arguments, **_NO_SKIP})
        return VisibleMask(visible, dtype)
    device = arguments.get("device")
    if device is None:
        device = arguments["cache_position"].device
    return PositionalMask((arguments["batch_size"], queries, keys), window, offset, shown, device, dtype)


_NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


def _plain_mask(arguments: dict[str, Any], masking_utils: Any) -> Tensor | None:
    """A mask of transformers' own, in the form that the model takes."""
    kind = type(arguments.get("config"))
    if kind in _with_bool and kind not in _without_bool:
        return masking_utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    return masking_utils.eager_mask(**arguments)


def _window(function: Callable[..., Any], masking_utils: Any) -> Window | None:
    """The (left, right) of a mask function of transformers, or None if it is more than that."""
    if function is masking_utils.causal_mask_function:
        return (-1, 0)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return (-1, -1)
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    name = function.__qualname__.split(".")[0]
    around = captured(function)
    if name == "and_masks":
        windows = [_window(part, masking_utils) for part in around["mask_functions"]]
        return None if None in windows else _narrowest(windows)
    size = around.get("sliding_window")
    if isinstance(size, int) and size > 0:
        if name == "sliding_window_overlay":
            return (size - 1, -1)
        if name == "sliding_window_bidirectional_overlay":
            return (size, size)
    if name == "packed_sequence_mask_function" and _is_one_sequence(around["packed_sequence_mask"]):
        return (-1, -1)
    return None


def captured(function: Any) -> dict[str, Any]:
    """The variables around a nested function, by name; none for an object that is no function."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _narrowest(windows: list[Any]) -> Window:
    """The window that lies within all of the windows."""

    def side(index: int) -> int:
        return min((window[index] for window in windows if window[index] >= 0), default=-1)

    return (side(0), side(1))


def _is_one_sequence(indices: Tensor) -> bool:
    """Whether (B, L) indices name one packed sequence per batch entry; False if they are on a GPU.

    transformers 4.57 gives such a mask to every model that is called without cache and mask.
    """
    return indices.device.type == "cpu" and bool((indices == indices[:, :1]).all())


def _query_length(arguments: dict[str, Any]) -> int:
    if "cache_position" in arguments:
        return arguments["cache_position"].shape[0]
    return arguments["q_length"]


def _query_offset(arguments: dict[str, Any]) -> int | None:
    """The position of query 0 among the keys, None if unknown: Note [The position of the queries]."""
    keys, key_offset = arguments["kv_length"], arguments["kv_offset"]
    queries = _query_length(arguments)
    skips = arguments.get("allow_is_causal_skip", True)
    if isinstance(key_offset, Tensor):
        return None
    if "cache_position" in arguments:
        positions = arguments["cache_position"]
        if positions.device.type != "cpu":
            # transformers assumes these offsets if it leaves a mask out.
            return keys - queries if skips and (queries in (1, keys)) else None
        first = int(positions[0]) if queries else 0
        if queries > 1 and not torch.equal(positions, torch.arange(first, first + queries)):
            return None
        return first - key_offset
    offset = arguments["q_offset"]
    if isinstance(offset, Tensor):
        if offset.device.type != "cpu" and (queries == 1 or not skips):
            return None
        offset = int(offset)
    return offset - key_offset


def _visible_keys(arguments: dict[str, Any], queries: int, offset: int, hides_later: bool) -> Tensor | None:
    """The padding as (B, S) bool, or None if it hides nothing that the rule shows. Under context_parallel S
    counts the keys of all ranks.
    """
    padding = arguments.get("attention_mask")
    if padding is None:
        return None
    if split_blocks.any_open():
        # This rank has the padding of its own tokens, but queries see the keys of all ranks.
        everybody = split_blocks.whole(padding.to(torch.uint8), 1).bool()
        return None if bool(everybody.all()) else everybody
    keys, start = arguments["kv_length"], arguments["kv_offset"]
    padding = padding[:, start : start + keys]
    told = padding.shape[1]
    # A GPU is asked for values if transformers asks, too; for the row of one query that is not worth it.
    may_look = padding.device.type == "cpu" or queries > 1
    told_enough = told == keys or (hides_later and offset + queries <= told)
    if told_enough and may_look and bool(padding.all()):
        return None
    return torch.nn.functional.pad(padding, (0, keys - told)) if told < keys else padding


def _hides_nothing(window: Window, offset: int, keys: int) -> bool:
    """Whether a query at ``offset`` sees all keys."""
    left, right = window
    return (left < 0 or offset - left <= 0) and (right < 0 or offset + right >= keys - 1)


def _is_tracing(arguments: dict[str, Any]) -> bool:
    """Whether values cannot be read, because the calls become a graph."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta or is_capturing(tensor) for tensor in tensors)
