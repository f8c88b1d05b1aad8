"""Models of transformers whose layers choose the keys of each query, by index or by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers_models import _SIZES, VERSION, Trio, as_implementation, built, gradients, padding, tokens

pytestmark = pytest.mark.skipif(VERSION < (5, 24), reason="older versions do not have these models")

_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
_BLOCKS = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["minimax_m3_sparse", "full_attention"],
    "index_block_size": 3,
    "index_topk_blocks": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_local_blocks": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
MODELS: dict[str, Callable[[], Any]] = {
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(**_LATENT),
    "glm-moe-dsa": lambda: transformers.GlmMoeDsaConfig(**_LATENT),
    "minimax-m3": lambda: transformers.MiniMaxM3VLTextConfig(**_BLOCKS),
}


def model_of(name: str) -> nn.Module:
    kind = transformers.AutoModel if name == "minimax-m3" else transformers.AutoModelForCausalLM
    return built(MODELS[name](), kind)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients(name: str, side: str) -> None:
    ids = tokens()
    mask = padding(ids, side)

    def run(model: nn.Module) -> dict[str, Tensor]:
        output = model(ids, attention_mask=mask, use_cache=False)[0]
        seen = output[mask.bool()]
        return {"output": seen.detach(), **gradients(model, seen.square().mean())}

    Trio(model_of(name)).check(run, least_calls=2)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "minimax-m3"])
def test_generating(name: str) -> None:
    model, ids = model_of(name), tokens()
    options = {"attention_mask": padding(ids, "left"), "max_new_tokens": 8, "do_sample": False}
    ours = model.generate(ids, **options)
    assert torch.equal(ours, as_implementation(model, "eager").generate(ids, **options))
