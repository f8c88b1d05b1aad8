"""Continuous batching of transformers: the tokens of many requests in one call, over a cache in pages.

transformers' ContinuousBatchingManager packs prompts, parts of prompts and single tokens of its requests end
to end into one sequence of the batch. Their keys and values lie in pages, which requests with the same
beginning share. A causal rule, and the window of a layer, hold within each request; no mask is made.

Note [Two forms of a step]
    If each request of a step has one token, and no layer of the model has a window, transformers gives a
    block table and the pages: the new keys and values are written, and all of them are read where they lie.
    Before any other step transformers has updated its cache, and gives the keys and values of all requests,
    packed. It has the first form for FlashAttention on GPUs alone, until :func:`register` lets ours have it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..flex.graphs import outside_of_graphs
from ..kv_cache import attention_with_kvcache
from ..varlen import varlen_attention

__all__ = ["OLDEST", "attention_to_requests", "is_step", "refuse", "register"]

#: The first version of transformers whose layers update the paged cache before they call attention.
OLDEST = (5, 24)


def register(is_ours: Callable[[Any], bool]) -> None:
    """Has continuous batching take models of whose configuration ``is_ours`` says so. It is called once."""
    # A later transformers without these names refuses our implementation by itself; all else works there.
    with contextlib.suppress(ImportError, AttributeError):
        from transformers.generation.continuous_batching import continuous_api, initialization

        manager = continuous_api.ContinuousBatchingManager
        ensure = initialization.ensure_decode_fast_path_is_available
        manager.switch_to_cb_friendly_attn = _accepting(manager.switch_to_cb_friendly_attn, is_ours)
        initialization.ensure_decode_fast_path_is_available = _with_block_tables(
            ensure, is_ours, initialization
        )


def _accepting(switch: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Wraps the method that exchanges or refuses a model's implementation: ours stays."""

    @functools.wraps(switch)
    def wrapped(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(model.config.get_text_config()):
            switch(self, model, *args, **kwargs)

    return wrapped


def _with_block_tables(ensure: Any, is_ours: Callable[[Any], bool], initialization: Any) -> Any:
    """Wraps the function that gives block tables up: ours takes them wherever the cache has them."""

    @functools.wraps(ensure)
    def wrapped(config: Any, *args: Any, **kwargs: Any) -> None:
        kinds = initialization.ATTN_TYPE_TO_ALLOCATOR
        groups = initialization.group_layers_by_attn_type(config)
        if not (is_ours(config) and all(kinds[group].supports_block_table for group in groups)):
            ensure(config, *args, **kwargs)

    return wrapped


def is_step(arguments: dict[str, Any]) -> bool:
    """Whether an attention function's further arguments are those of continuous batching."""
    return "write_index" in arguments


def refuse(**arguments: Any) -> None:
    """Raises ValueError for arguments, made for a padded batch, of which one is not None."""
    if given := [name for name, argument in arguments.items() if argument is not None]:
        raise ValueError(f"continuous batching takes no {', '.join(given)}")


def attention_to_requests(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any], **options: Any
) -> Tensor:
    """Attention of a step, whose requests see nothing of each other.

    Args:
        module: the layer.
        query: (1, H, T, E), the T new tokens of all requests.
        key: (1, Hk, S, E): of the new tokens, or of all tokens of all requests: Note [Two forms of a step].
        value: (1, Hk, S, E).
        arguments: what transformers' PagedAttentionArgs hold, for this layer.
        options: of :func:`selfattn_ext.varlen_attention`.

    Returns:
        out (1, T, H, E).
    """
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    starts, key_starts = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"]
    lengths = key_starts.diff()
    if arguments.get("block_table") is not None:
        pages = arguments["k_cache"], arguments["v_cache"], arguments["block_table"]
        _append(*pages, key, value, lengths)
        out = attention_with_kvcache(
            query.unsqueeze(1), *pages[:2], None, None, lengths, pages[2], layout="blhd", **options
        )
        return out.transpose(0, 1)
    out = varlen_attention(
        query,
        key,
        value,
        starts,
        key_starts,
        arguments["max_length_q"],
        arguments["max_length_k"],
        is_causal=True,
        enable_gqa=True,
        window_size=(_window(module) - 1, -1),
        query_offset=lengths - starts.diff(),
        **options,
    )
    return out.unsqueeze(0)


# transformers excludes its own update for the same reason: a compiled write would copy the whole cache.
@outside_of_graphs
def _append(
    key_pages: Tensor, value_pages: Tensor, block_table: Tensor, key: Tensor, value: Tensor, lengths: Tensor
) -> None:
    """Writes the last key and value (B, Hk, E) of each request, whose lengths (B,) count them already.

    The operator that appends is not used: the pages of keys, as views, overlap those of values, and only the
    block table keeps them apart. A length of 0 stands for a request that fills the batch up. It writes zeros
    to page 0, which no request has, and which transformers keeps at zero.
    """
    is_request = lengths > 0
    last = (lengths - 1).clamp(min=0).long()
    page_size = key_pages.shape[1]
    pages = block_table.gather(1, (last // page_size).unsqueeze(1)).squeeze(1)
    rows = torch.where(is_request, pages, 0), last % page_size
    for cache, new in ((key_pages, key), (value_pages, value)):
        cache[rows] = torch.where(is_request[:, None, None], new, 0)


def _window(module: Any) -> int:
    """The window of a layer in tokens, by the rule by which the cache keeps its keys; 0 for none."""
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return 0
    return getattr(module.config, "sliding_window", None) or 0
