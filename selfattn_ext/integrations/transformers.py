"""Attention of Hugging Face transformers through the kernels of this package.

    import selfattn_ext.integrations.transformers
    selfattn_ext.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="selfattn_ext")

For transformers 4.57 and newer. docs/transformers.md tells which models take it and what is different there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collecting import keep, request_for
from ..functional import scaled_dot_product_attention
from ..sparse import sparse_attention
from . import transformers_paged, transformers_support
from .positional_mask import LazyMask
from .transformers_masks import attention_mask as mask_function
from .transformers_weights import weights_are_wanted

__all__ = ["attention_forward", "mask_function", "register"]

_OLDEST = (4, 57)

# transformers looks for these in the name of an implementation and treats it accordingly.
_RESERVED = ("eager", "sdpa", "flash", "flex", "paged", "/", ":", "|")


def register(name: str = "selfattn_ext") -> None:
    """Makes ``attn_implementation=name`` known to transformers, for this process. It can be called again.

    Args:
        name: the name of the implementation, without any of transformers' own in it, such as "sdpa".

    Raises:
        ImportError: transformers is missing or older than 4.57.
        ValueError: the name is taken, or has a meaning for transformers.

    Example:
        >>> import selfattn_ext.integrations.transformers
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> selfattn_ext.integrations.transformers.register()
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="selfattn_ext")
        >>> model.config._attn_implementation
        'selfattn_ext'
    """
    attention, masks, version = _interfaces()
    if not isinstance(name, str) or not name or any(part in name for part in _RESERVED):
        raise ValueError(
            f"name must be a string without any of {', '.join(map(repr, _RESERVED))}, got {name!r}"
        )
    taken = dict(attention._global_mapping).get(name, attention_forward)
    if taken is not attention_forward:
        raise ValueError(f"name {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
    attention.register(name, attention_forward)
    masks.register(name, mask_function)
    transformers_support.register(name, version, attention_forward)


def _interfaces() -> tuple[Any, Any, tuple[int, ...]]:
    """transformers' AttentionInterface, AttentionMaskInterface and version."""
    wanted = ".".join(map(str, _OLDEST))
    install = "pip install --upgrade 'selfattn_ext[transformers]'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers {wanted} or newer is needed ({error}): {install}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        raise ImportError(
            f"transformers {wanted} or newer is needed, this is {transformers.__version__}: {install}"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface, version


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' AttentionInterface calls it in place of ``eager_attention_forward``.

    Args:
        module: the layer.
        query: (B, H, L, E).
        key: (B, Hk, S, E), where Hk divides H.
        value: (B, Hk, S, Ev).
        attention_mask: a :class:`LazyMask`, a bool or float mask broadcastable to (B, H, L, S), which may be
            longer than the keys, or None, which hides nothing.
        dropout: probability, 0 in evaluation.
        scaling: factor of the scores; 1 / sqrt(E) by default.
        is_causal: whether a call without a mask is causal, from the first key on, if it has more than one
            query. None stands for ``module.is_causal``, or for False if :func:`mask_function` makes the
            masks, as it leaves out none that hides a key.
        softcap: the bound of the scores, as in Gemma 2.
        s_aux: (H,) a logit per head that takes part in the softmax, as in GPT-OSS.
        sinks: (B, H, L, 1), such a logit for every query.
        position_bias: broadcastable to (B, H, L, S), added to the scores, as in T5.
        head_mask: broadcastable to (1, H, 1, 1), factors of the weights (4.57).
        indices: (B, L, K), the keys that each query sees among those that the mask shows, as
            :func:`selfattn_ext.sparse_attention` takes them: their places in the cache, -1 for none.
        block_indices: (B, G, L, K), the same by blocks of ``module.indexer.block_size`` keys, for G groups of
            neighbouring query heads, where G divides H.
        cache: the cache of continuous batching before transformers 5.24, which is refused.
        output_attentions: whether the weights are asked for.
        others: arguments of continuous batching, transformers' ``PagedAttentionArgs``, with which the tokens
            of all requests are packed. Arguments of other implementations are not used: a sliding window is
            in the mask.

    Returns:
        out (B, L, H, Ev), and the weights (B, H, L, S), after dropout, or None.

    Raises:
        ValueError: for ``cache``, ``block_indices`` of a layer that says no block size, a ``head_mask`` of
            another shape, an argument that continuous batching cannot have, and as
            :func:`selfattn_ext.scaled_dot_product_attention` and :func:`selfattn_ext.sparse_attention` do.

    Example:
        >>> from selfattn_ext.integrations.transformers import attention_forward
        >>> from transformers import AttentionInterface
        >>> AttentionInterface.register("my_attention", attention_forward)  # register() does this, too
    """
    if cache is not None:
        needed = ".".join(map(str, transformers_paged.OLDEST))
        raise ValueError(f"continuous batching on these kernels needs transformers {needed} or newer")
    scale = _legacy_scale(module, value) if scaling is None else scaling
    if transformers_paged.is_step(others):
        transformers_paged.refuse(
            attention_mask=attention_mask,
            sinks=sinks,
            position_bias=position_bias,
            head_mask=head_mask,
            indices=indices,
            block_indices=block_indices,
        )
        out = transformers_paged.attention_to_requests(
            module,
            query,
            key,
            value,
            others,
            dropout_p=dropout,
            scale=scale,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return out, None
    options: dict[str, Any] = {}
    visible: Tensor | None = None
    bias = position_bias
    keys = key.shape[2]
    if isinstance(attention_mask, LazyMask):
        if attention_mask.shape[3] == keys:
            options = attention_mask.options()
            visible = attention_mask.attn_mask()
        else:
            visible = attention_mask.dense()[..., :keys]
    elif attention_mask is not None:
        given = attention_mask[..., :keys]
        if given.dtype == torch.bool:
            visible = given
        else:
            bias = given if bias is None else bias + given
    else:
        if is_causal is None:
            is_causal = not transformers_support.makes_masks(module) and getattr(module, "is_causal", True)
        # The comparison comes first, as torch.compile would make an object of its own of one at the end.
        options["is_causal"] = query.shape[2] > 1 and bool(is_causal)

    weights_wanted = bool(output_attentions) or weights_are_wanted(module)
    request = request_for(module)
    share_of = sinks
    if s_aux is not None and weights_wanted and transformers_support.keeps_sinks_out_of_weights(module):
        share_of, s_aux = s_aux.view(-1, 1, 1), None
    selection = _selection(module, indices, block_indices, query.shape[1], key.shape[1])
    attention: Any = sparse_attention if selection else scaled_dot_product_attention
    results = attention(
        query,
        key,
        value,
        attn_mask=_combined(visible, bias, keys),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap or 0.0,
        sinks=s_aux,
        return_weights=weights_wanted,
        return_lse=share_of is not None,
        return_aux=request,
        **options,
        **selection,
    )
    if request is not None:
        *results, found = results
        keep(module, found, key.shape[1])
        results = results if len(results) > 1 else results[0]
    out, weights = results, None
    if weights_wanted:
        out, weights = results[:2]
    if share_of is not None:
        # The part of the softmax that a sink leaves to the keys.
        share = torch.sigmoid(results[-1].unsqueeze(-1) - share_of).to(query.dtype)
        out = (out if weights_wanted else results[0]) * share
        if weights is not None and sinks is not None:
            weights = weights * share
    if head_mask is not None:
        factor = _head_factor(head_mask, query.shape[1])
        out = out * factor
        weights = None if weights is None else weights * factor
    return out.transpose(1, 2).contiguous(), weights


def _combined(visible: Tensor | None, bias: Tensor | None, keys: int) -> Tensor | None:
    """One mask from the visible keys and the numbers that are added."""
    if bias is None:
        return visible
    bias = bias[..., :keys]
    return bias if visible is None else torch.where(visible, bias, -torch.inf)


def _selection(
    module: Any, indices: Tensor | None, block_indices: Tensor | None, heads: int, kv_heads: int
) -> dict[str, Any]:
    """The keys that a layer selects, as arguments of sparse_attention; none if it selects none."""
    selection: dict[str, Any] = {}
    if indices is not None:
        selection["indices"] = indices.unsqueeze(1)
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise ValueError(
                "block_indices need the number of keys of a block, module.indexer.block_size, which "
                f"{type(module).__name__} does not have"
            )
        groups = block_indices.shape[1]
        if groups not in (1, kv_heads):
            block_indices = block_indices.repeat_interleave(heads // groups, 1)
        selection |= {"block_indices": block_indices, "block_size": size}
    return selection


def _head_factor(head_mask: Tensor, heads: int) -> Tensor:
    """A head mask of 4.57, whose shape differs between models, as (1, H, 1, 1)."""
    if head_mask.numel() != heads:
        raise ValueError(
            f"head_mask must have one number per head, {heads}, and is of shape {tuple(head_mask.shape)}"
        )
    return head_mask.reshape(1, heads, 1, 1)


def _legacy_scale(module: Any, value: Tensor) -> float | None:
    """The scale of GPT-2 in 4.57, which passes none because its eager function knows it."""
    if not hasattr(module, "scale_attn_by_inverse_layer_idx"):
        return None
    scale: float = value.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale
