"""Statistics of transformers' models, judged by the weights of the same models.

test_transformers_results.py compares these weights with those of eager attention.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers_models import DECODERS, built, generated, text

from selfattn_ext import AuxRequest, collect_statistics

REQUEST = AuxRequest(max_scores=True, entropy=True, key_weights="kv_heads")
#: With grouped heads, with windows, and with capped scores.
MODELS = ("gpt2", "llama gqa", "mistral", "gemma2")


def entropy_of(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


@pytest.mark.parametrize("name", MODELS)
def test_a_forward(name: str) -> None:
    """Entropies and weights of keys are those of the weights; padding has no part in them."""
    model = built(DECODERS[name]()).double()
    inputs = text("left")
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        of_layers = model(**inputs, output_attentions=True).attentions
    with collect_statistics(model, REQUEST) as statistics:
        out = model(**inputs)
    assert [len(calls) for calls in statistics.values()] == [1] * len(of_layers)
    for (found,), weights in zip(statistics.values(), of_layers, strict=True):
        rows = seen[:, None].expand(found.entropy.shape)
        torch.testing.assert_close(found.entropy[rows], entropy_of(weights)[rows], rtol=1e-9, atol=1e-9)
        assert found.max_scores[rows].isfinite().all()
        of_keys = weights.sum(2).unflatten(1, (found.key_weights.shape[1], -1)).sum(2)
        torch.testing.assert_close(found.key_weights, of_keys, rtol=1e-9, atol=1e-9)
        assert (found.key_weights.mT[~seen] == 0).all()
    sum(calls[0].entropy.mean() for calls in statistics.values()).backward()
    assert out.logits.isfinite().all()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_steps_of_a_generation() -> None:
    """A call for the prompt, and one for each further token."""
    model = built(DECODERS["llama gqa"]())
    with collect_statistics(model, AuxRequest(entropy=True)) as statistics:
        generated(model, text("none"), 3)
    for calls in statistics.values():
        assert [call.entropy.shape[-1] for call in calls] == [11, 1, 1]
