"""Models of transformers on our kernels: logits, gradients, generation and weights.

They are for text, images and sound; layers of some choose the keys of each query, by index or by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers_models import (
    DECODERS,
    LATENT,
    SIZES,
    T5,
    TOKENS,
    VERSION,
    Trio,
    built,
    generated,
    gradients,
    image,
    in_dtype,
    logits_of,
    pair,
    text,
    tokens,
)


@dataclass(frozen=True)
class Model:
    config: Callable[[], Any]
    kind: Any = transformers.AutoModelForCausalLM
    #: The inputs, given a side of padding.
    inputs: Callable[[str], dict[str, Tensor]] = text
    #: The numbers of our operators' calls, in a forward and in a step that generates a token.
    calls: int = 2
    step_calls: int = 2


def _sound(side: str) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "decoder_input_ids": tokens(length=6) + 1}


_BART = {"vocab_size": TOKENS, "d_model": 32, "max_position_embeddings": 64}
_BART |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BART |= {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip

#: Models with an encoder.
ENCODERS = {
    "vit": Model(
        lambda: transformers.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5),
        transformers.AutoModelForImageClassification,
        image,
    ),
    "whisper": Model(
        lambda: transformers.WhisperConfig(
            **{**_BART, "max_target_positions": 32, "max_source_positions": 24},
            num_mel_bins=8,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        transformers.AutoModelForSpeechSeq2Seq,
        _sound,
        calls=6,
        step_calls=4,
    ),
    "bart": Model(
        lambda: transformers.BartConfig(**_BART, decoder_start_token_id=2, forced_eos_token_id=None),
        transformers.AutoModelForSeq2SeqLM,
        pair,
        calls=6,
        step_calls=4,
    ),
    "bert": Model(lambda: transformers.BertConfig(**SIZES), transformers.AutoModelForMaskedLM),
    "t5": Model(
        lambda: transformers.T5Config(
            **T5, relative_attention_num_buckets=8, relative_attention_max_distance=9
        ),
        transformers.AutoModelForSeq2SeqLM,
        pair,
        calls=6,
        step_calls=4,
    ),
}

_INDEX = {**LATENT, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
_INDEX |= {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
_BLOCKS = {
    **SIZES,
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
#: Models that choose keys, which older versions do not have.
CHOOSING = {
    "deepseek-v3.2": Model(lambda: transformers.DeepseekV32Config(**_INDEX)),
    "glm-moe-dsa": Model(lambda: transformers.GlmMoeDsaConfig(**_INDEX)),
    "minimax-m3": Model(lambda: transformers.MiniMaxM3VLTextConfig(**_BLOCKS), transformers.AutoModel),
}
DENSE = {name: Model(config) for name, config in DECODERS.items()} | ENCODERS
MODELS = DENSE | (CHOOSING if VERSION >= (5, 24) else {})
# transformers 4.57 computes this model's weights with its own formula.
WEIGHTLESS = ["bert"] if VERSION < (5, 0) else []


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> tuple[Model, Trio]:
    model = MODELS[request.param]
    return model, Trio(built(model.config(), model.kind))


PADDED = [
    (name, side)
    for name, model in MODELS.items()
    for side in ("none", "left", "right")
    if side == "none" or model.inputs in (text, pair)
]


@pytest.mark.parametrize(("trio", "side"), PADDED, indirect=["trio"])
def test_logits_and_gradients(trio: tuple[Model, Trio], side: str) -> None:
    described, models = trio
    inputs = described.inputs(side)

    def run(model: nn.Module) -> dict[str, Tensor]:
        logits = logits_of(model, inputs)
        generator = torch.Generator().manual_seed(4)
        cotangent = torch.randn(logits.shape, dtype=torch.float64, generator=generator)
        grads = gradients(model, (logits * cotangent.to(logits)).sum())
        return {"logits": logits.detach(), **grads}

    # The backward makes as many calls as the forward.
    results = models.check(run, least_calls=2 * described.calls)
    assert len(results) > 10


GENERATED = [(name, side) for name in DECODERS for side in ("none", "left")]
GENERATED += [(name, "left") for name in ("whisper", "bart", "t5")]
GENERATED = [(*one, cache) for one in GENERATED for cache in ("dynamic", "static")]
GENERATED += [(name, "left", "dynamic") for name in MODELS if name in ("deepseek-v3.2", "glm-moe-dsa")]
if VERSION < (5, 0):
    # 4.57's static caches need keys and values of one size, with eager attention, too.
    GENERATED = [one for one in GENERATED if one[0] != "deepseek-v3" or one[2] != "static"]


@pytest.mark.parametrize(("trio", "side", "cache"), GENERATED, indirect=["trio"])
def test_generation(trio: tuple[Model, Trio], side: str, cache: str) -> None:
    described, models = trio
    inputs = described.inputs(side)
    inputs.pop("decoder_attention_mask", None)
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    models.check(lambda model: generated(model, inputs, 6, **options), least_calls=6 * described.step_calls)


@pytest.mark.parametrize("name", DENSE)
def test_bfloat16(name: str) -> None:
    described = MODELS[name]
    inputs = described.inputs("left")

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": logits_of(model, inputs)}

    lower = Trio(built(described.config(), described.kind), torch.bfloat16)
    lower.check(run, least_calls=described.calls)


@pytest.mark.parametrize("trio", DENSE, indirect=True)
def test_attention_weights(trio: tuple[Model, Trio]) -> None:
    described, models = trio
    inputs = described.inputs("none")

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            result = model(**in_dtype(inputs, model), output_attentions=True)
        found = {}
        for part in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
            for i, weights in enumerate(getattr(result, part, None) or ()):
                found[f"{part} {i}"] = weights
        assert len(found) == described.calls
        return found

    name = models.ours.config.model_type
    models.check(run, least_calls=0 if name in WEIGHTLESS else 2 * described.calls)
