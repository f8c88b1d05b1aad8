"""as_flex with transformers models that call torch's flex_attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ran
import torch
from tolerances import assert_accurate
from torch import Tensor, nn
from transformers_models import DECODERS, built, gradients, padding, tokens

from selfattn_ext import as_flex

#: Models of transformers, and the side on which their tokens are padded.
CASES = (("llama gqa", "none"), ("llama gqa", "left"), ("gemma2", "left"), ("mistral", "right"))


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets transformers compile flex_attention without Inductor, which test_compiled_switches.py tests."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **kwargs: compiled(*args, **{"backend": "aot_eager", **kwargs})
    )
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(model: nn.Module, implementation: str, dtype: torch.dtype, side: str) -> dict[str, Tensor]:
    """Returns the logits outside of the padding, and the gradient of every parameter."""
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    model = model.to(dtype).train()
    ids = tokens()
    mask = padding(ids, side)
    results = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    return {"logits": results.logits.detach()[mask.bool()], **gradients(model, results.loss)}


@pytest.mark.parametrize(("name", "side"), CASES)
def test_transformers_train(name: str, side: str) -> None:
    model = built(DECODERS[name]())
    exact = step(copy.deepcopy(model), "eager", torch.float64, side)
    peer = step(copy.deepcopy(model), "eager", torch.float32, side)
    with as_flex():
        result = step(model, "flex_attention", torch.float32, side)
    assert result.keys() == exact.keys()
    for key, numbers in result.items():
        size = float(exact[key].abs().max().clamp(min=1e-3))
        assert_accurate(key, numbers / size, exact[key] / size, peer[key] / size, 8.0)


def test_transformers_run_on_the_kernels() -> None:
    """Without the switch, torch refuses to train."""
    model = built(DECODERS["llama gqa"]()).float()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        step(model, "flex_attention", torch.float32, "none")
    with as_flex():
        step(model, "flex_attention", torch.float32, "none")
        counted = ran.operators(lambda: step(model, "flex_attention", torch.float32, "none"))
    layers = model.config.num_hidden_layers
    assert counted["selfattn::attention_forward"] == counted["selfattn::attention_backward"] == layers


def test_a_compiled_transformer() -> None:
    model = built(DECODERS["llama gqa"]()).float()
    model.set_attn_implementation("flex_attention")
    ids = tokens()

    def run(forward: Callable[..., Any]) -> list[Tensor]:
        loss = forward(ids, labels=ids, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])]

    with as_flex():
        eager, compiled = run(model), run(torch.compile(model))
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)
