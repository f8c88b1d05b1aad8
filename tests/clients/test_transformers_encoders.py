"""Models of transformers with an encoder, on our kernels, for text, images and sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers_models import TOKENS, VERSION, Trio, built, gradients, padding, tokens

_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TOKENS = {"vocab_size": TOKENS, "pad_token_id": 0}


@dataclass(frozen=True)
class Model:
    config: Callable[[], Any]
    kind: Any
    #: The inputs, given a side of padding.
    inputs: Callable[[str], dict[str, Tensor]]
    #: The number of our operators' calls in a forward and a backward.
    calls: int = 4


def _text(side: str) -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, **({} if side == "none" else {"attention_mask": padding(ids, side)})}


def _pair(side: str) -> dict[str, Tensor]:
    """Returns a text, and the beginning of another text that the model continues."""
    return {**_text(side), "decoder_input_ids": tokens(length=6) + 1}


def _image(side: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}


def _sound(side: str) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "decoder_input_ids": tokens(length=6) + 1}


_T5 = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART = {**_TOKENS, "d_model": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
_BART |= {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip

MODELS = {
    "vit": Model(
        lambda: transformers.ViTConfig(**_ENCODER, image_size=16, patch_size=4, num_labels=5),
        transformers.AutoModelForImageClassification,
        _image,
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
        calls=12,
    ),
    "bart": Model(
        lambda: transformers.BartConfig(**_BART, decoder_start_token_id=2, forced_eos_token_id=None),
        transformers.AutoModelForSeq2SeqLM,
        _pair,
        calls=12,
    ),
    "bert": Model(
        lambda: transformers.BertConfig(**_ENCODER, **_TOKENS, max_position_embeddings=64),
        transformers.AutoModelForMaskedLM,
        _text,
    ),
    "t5": Model(
        lambda: transformers.T5Config(
            **_T5,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=9,
            decoder_start_token_id=0,
        ),
        transformers.AutoModelForSeq2SeqLM,
        _pair,
        calls=12,
    ),
}
# transformers 4.57 computes this model's weights with its own formula.
WEIGHTLESS = ["bert"] if VERSION < (5, 0) else []
TEXT = [name for name, model in MODELS.items() if model.inputs in (_text, _pair)]
GENERATING = [name for name, model in MODELS.items() if model.inputs in (_pair, _sound)]


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> tuple[Model, Trio]:
    model = MODELS[request.param]
    return model, Trio(built(model.config(), model.kind))


def in_dtype(inputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


CASES = [
    (name, side) for name in MODELS for side in ("none", "left", "right") if name in TEXT or side == "none"
]


@pytest.mark.parametrize(("trio", "side"), CASES, indirect=["trio"])
def test_logits_and_gradients(trio: tuple[Model, Trio], side: str) -> None:
    described, models = trio
    inputs = described.inputs(side)
    cotangent: Tensor | None = None

    def run(model: nn.Module) -> dict[str, Tensor]:
        nonlocal cotangent
        given = in_dtype(inputs, model)
        logits = model(**given).logits
        if "attention_mask" in given and "decoder_input_ids" not in given:
            logits = logits[given["attention_mask"].bool()]
        if cotangent is None:
            cotangent = torch.randn(logits.shape, dtype=torch.float64)
        grads = gradients(model, (logits * cotangent.to(logits)).sum())
        return {"logits": logits.detach(), **grads}

    results = models.check(run, least_calls=described.calls)
    assert len(results) > 10


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("trio", GENERATING, indirect=True)
def test_generation(trio: tuple[Model, Trio], cache: str) -> None:
    described, models = trio
    inputs = described.inputs("left")
    del inputs["decoder_input_ids"]
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}

    def run(model: nn.Module) -> dict[str, Tensor]:
        given = in_dtype(inputs, model)
        with torch.no_grad():
            encoder = model.get_encoder()(**given)
            result = transformers.GenerationMixin.generate(
                model,
                encoder_outputs=encoder,
                **({"attention_mask": given["attention_mask"]} if "attention_mask" in given else {}),
                decoder_input_ids=tokens(length=3) + 1,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        return {"tokens": result.sequences.double(), "logits": torch.stack(result.logits)}

    models.check(run, least_calls=2 * 2 * 5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name: str) -> None:
    described = MODELS[name]
    inputs = described.inputs("left")
    lower = Trio(built(described.config(), described.kind), torch.bfloat16)

    def run(model: nn.Module) -> dict[str, Tensor]:
        given = in_dtype(inputs, model)
        with torch.no_grad():
            logits = model(**given).logits
        return {"logits": logits}

    lower.check(run, least_calls=described.calls // 2)


@pytest.mark.parametrize("trio", MODELS, indirect=True)
def test_attention_weights(trio: tuple[Model, Trio]) -> None:
    described, models = trio
    inputs = described.inputs("none")

    def run(model: nn.Module) -> dict[str, Tensor]:
        given = in_dtype(inputs, model)
        with torch.no_grad():
            result = model(**given, output_attentions=True)
        found = {}
        for part in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
            for i, weights in enumerate(getattr(result, part, None) or ()):
                found[f"{part} {i}"] = weights
        assert len(found) == described.calls // 2
        return found

    name = models.ours.config.model_type
    models.check(run, least_calls=0 if name in WEIGHTLESS else described.calls)
