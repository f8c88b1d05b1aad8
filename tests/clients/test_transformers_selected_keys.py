"""Models of transformers that select keys: which kernels compute them, with which caches, in which numbers.

test_transformers_results.py compares logits and gradients of three such models with those of eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers_models import (
    LATENT,
    SIZES,
    VERSION,
    Trio,
    built,
    generated,
    gradients,
    kernel_calls,
    logits_of,
    text,
)

if VERSION < (5, 24):
    pytest.skip("transformers 5.24 has the first models that pass indices", allow_module_level=True)

_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
_INDEXED = {**LATENT, **_EXPERTS, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
_BLOCKS = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["minimax_m3_sparse", "minimax_m3_sparse"],
    "index_block_size": 3,
    "index_topk_blocks": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_local_blocks": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}

#: The second layer of "shared" attends to the keys that its first layer has selected.
CONFIGS: dict[str, Callable[[], Any]] = {
    "keys": lambda: transformers.DeepseekV32Config(**_INDEXED),
    "shared keys": lambda: transformers.GlmMoeDsaConfig(**_INDEXED, indexer_types=["full", "shared"]),
    "blocks": lambda: transformers.MiniMaxM3VLTextConfig(**_BLOCKS),
}


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> Trio:
    return Trio(built(CONFIGS[request.param]()))


@pytest.mark.parametrize("trio", CONFIGS, indirect=True)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_no_mask_is_made(trio: Trio, side: str) -> None:
    """Forward and backward run from lists of keys, beside the mask of the padding: (B, 1, 1, S), if any."""
    inputs = text(side)
    with kernel_calls() as calls:
        logits = logits_of(trio.ours, inputs)
        gradients(trio.ours, logits.sum())
    assert calls.count("sorted_selection.default") == 2
    assert not any("masked" in call for call in calls), calls


@pytest.mark.parametrize("trio", CONFIGS, indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation(trio: Trio, cache: str, side: str) -> None:
    """The indices are places in the cache, a static one longer than the text."""
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    inputs = text(side)
    trio.check(lambda model: generated(model, inputs, 3, **options), least_calls=2 * 2 * 3)


@pytest.mark.parametrize("trio", CONFIGS, indirect=True)
def test_weights(trio: Trio) -> None:
    """Weights are 0 outside of the selection, and the logits with them are those without."""
    inputs = text("left")
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        result = trio.ours(**inputs, output_attentions=True)
        plain = trio.ours(**inputs)[0]
        torch.testing.assert_close(result[0][seen], plain[seen])
        most = 4 if hasattr(trio.ours.config, "index_topk") else 6
        for weights in result.attentions:
            assert int((weights > 0).sum(-1).max()) == most
