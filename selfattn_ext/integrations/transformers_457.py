"""Models of transformers 4.57 that do not ask AttentionInterface: BERT's kind and T5.

BERT and others take their attention from a table of classes in the module of the model:
see transformers_support.py. T5 computes its attention inline; its forward is written here once more, for
models that are given our name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from types import ModuleType
from typing import Any

from torch import Tensor

__all__ = ["WITH_TABLES", "replace_forward"]

# The "sdpa" classes of these take the mask that their models make for unknown names. Others, DistilBERT's
# among them, do not.
WITH_TABLES = {
    "albert", "beit", "bert", "camembert", "jetmoe", "nemotron", "olmoe", "phimoe", "qwen2_moe", "roberta",
    "stablelm", "xlm_roberta", "xlm_roberta_xl",
}  # fmt: skip
_LIKE_T5 = {"t5", "mt5"}


def replace_forward(
    model: str, module: ModuleType, names: Container[str], attention_forward: Callable[..., Any]
) -> bool:
    """Has the T5Attention of a module attend by that function for these names; False if it has none."""
    if model not in _LIKE_T5:
        return False
    for kind in [value for name, value in vars(module).items() if name.endswith("T5Attention")]:
        if not hasattr(kind.forward, "of_transformers"):
            kind.__init__ = _remembering(kind.__init__)
            kind.forward = _choosing(kind.forward, names, attention_forward)
    return True


def _remembering(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        self.config = config

    return wrapped


def _choosing(forward: Any, names: Container[str], attention_forward: Callable[..., Any]) -> Any:
    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A layer that was built before register() has no config.
        config = getattr(self, "config", None)
        ours = config is not None and config._attn_implementation in names
        return (
            _t5_forward(attention_forward, self, *args, **kwargs) if ours else forward(self, *args, **kwargs)
        )

    wrapped.of_transformers = forward  # type: ignore[attr-defined]
    return wrapped


def _t5_forward(
    attention_forward: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    layer_head_mask: Tensor | None = None,
    query_length: int | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    cache_position: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """T5Attention.forward of transformers, whose arguments and results these are."""
    length = hidden_states.shape[1]
    query = _heads(self, self.q(hidden_states))
    key, value = _keys_and_values(self, hidden_states, key_value_states, past_key_values, cache_position)
    if position_bias is None:
        if self.has_relative_attention_bias:
            total = length if query_length is None else query_length
            position_bias = self.compute_bias(total, key.shape[2], query.device, cache_position)
            position_bias = position_bias[:, :, -length:]
        else:
            position_bias = query.new_zeros(1, self.n_heads + len(self.pruned_heads), 1, 1)
        if mask is not None:
            position_bias = position_bias + mask[..., : key.shape[2]]
    added = position_bias
    if self.pruned_heads:
        added = added[:, [head for head in range(added.shape[1]) if head not in self.pruned_heads]]
    out, weights = attention_forward(
        self,
        query,
        key,
        value,
        None,
        dropout=self.dropout if self.training else 0.0,
        scaling=1.0,
        is_causal=False,
        position_bias=added,
        head_mask=layer_head_mask,
        output_attentions=output_attentions,
    )
    results = (self.o(out.flatten(2)), position_bias)
    return (*results, weights) if output_attentions else results


def _heads(self: Any, states: Tensor) -> Tensor:
    """(B, L, H * E) as (B, H, L, E)."""
    return states.unflatten(2, (self.n_heads, self.key_value_proj_dim)).transpose(1, 2)


def _keys_and_values(
    self: Any, hidden_states: Tensor, encoded: Tensor | None, cache: Any, cache_position: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer of T5, which go through the cache if there is one."""
    both = hasattr(cache, "is_updated")  # a cache for both kinds of attention
    of_layer = cache
    if both:
        of_layer = cache.self_attention_cache if encoded is None else cache.cross_attention_cache
        if encoded is not None and cache.is_updated.get(self.layer_idx):
            stored = of_layer.layers[self.layer_idx]
            return stored.keys, stored.values
    states = hidden_states if encoded is None else encoded
    key, value = _heads(self, self.k(states)), _heads(self, self.v(states))
    if cache is not None:
        position = cache_position if encoded is None else None
        key, value = of_layer.update(key, value, self.layer_idx, {"cache_position": position})
        if both and encoded is not None:
            cache.is_updated[self.layer_idx] = True
    return key, value
