"""Text models of transformers on our kernels: logits, gradients, generation and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import DECODERS, TOKENS, VERSION, Trio, built, gradients, padding, tokens


@pytest.fixture(scope="module", params=DECODERS)
def trio(request: pytest.FixtureRequest) -> Trio:
    return Trio(built(DECODERS[request.param]()))


LAYERS = 2
STEPS = 7


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_and_gradients(trio: Trio, side: str) -> None:
    ids = tokens()
    mask = padding(ids, side)
    seen = mask.bool()
    cotangent = torch.randn(int(seen.sum()), TOKENS, dtype=torch.float64)

    def run(model: nn.Module) -> dict[str, Tensor]:
        given = {} if side == "none" else {"attention_mask": mask}
        logits = model(ids, use_cache=False, **given).logits[seen]
        grads = gradients(model, (logits * cotangent.to(logits)).sum())
        return {"logits": logits.detach(), **grads}

    # Each layer makes one call forward and one backward.
    trio.check(run, least_calls=2 * LAYERS)


# 4.57's static caches need keys and values of one size, with eager attention, too.
GENERATED = [
    (name, cache)
    for name in DECODERS
    for cache in ("dynamic", "static")
    if not (name == "deepseek-v3" and cache == "static" and VERSION < (5, 0))
]


@pytest.mark.parametrize(("trio", "cache"), GENERATED, indirect=["trio"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_generation(trio: Trio, side: str, cache: str) -> None:
    ids = tokens()
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            result = model.generate(
                ids,
                attention_mask=padding(ids, side),
                max_new_tokens=STEPS,
                min_new_tokens=STEPS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        # The tokens are compared, too, because later logits of different tokens are no judges.
        return {"tokens": result.sequences.double(), "logits": torch.stack(result.logits)}

    trio.check(run, least_calls=LAYERS * STEPS)


def test_bfloat16(trio: Trio) -> None:
    ids = tokens()
    lower = Trio(trio.ours.__class__(trio.ours.config), torch.bfloat16)
    for model in (lower.ours, lower.peer, lower.exact):
        model.load_state_dict(trio.ours.state_dict())
        model.eval()
    lower.exact.load_state_dict(lower.ours.state_dict())

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            mask = padding(ids, "left")
            return {"logits": model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]}

    lower.check(run, least_calls=LAYERS)


def test_attention_weights(trio: Trio) -> None:
    ids = tokens()

    def run(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            weights = model(ids, use_cache=False, output_attentions=True).attentions
        assert len(weights) == LAYERS
        return {f"layer {i}": layer for i, layer in enumerate(weights)}

    trio.check(run, least_calls=2 * LAYERS)
