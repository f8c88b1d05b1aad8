"""Statistics that layers return, and those that collect_statistics keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from selfattn_ext import (
    AuxOutput,
    AuxRequest,
    MultiheadAttention,
    MultiHeadSelfAttention,
    SelfAttention,
    collect_statistics,
)

EVERYTHING = AuxRequest(True, True, True, True, "kv_heads")
X = torch.randn(2, 6, 32)


def assert_of_weights(aux: AuxOutput, weights: torch.Tensor) -> None:
    """Asserts that statistics are those of these weights."""
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    torch.testing.assert_close(aux.entropy, entropy)
    torch.testing.assert_close(aux.lse - aux.mean_score, entropy)
    torch.testing.assert_close(aux.max_scores - aux.lse, weights.amax(-1).log())


@pytest.mark.parametrize("x", [X, X[0]])
def test_a_single_head(x: torch.Tensor) -> None:
    _, weights, aux = SelfAttention(32)(x, is_causal=True, return_aux=EVERYTHING)
    assert_of_weights(aux, weights)
    torch.testing.assert_close(aux.key_weights, weights.sum(-2))


def test_several_heads() -> None:
    layer = MultiHeadSelfAttention(32, 4)
    out, weights, aux = layer(X, is_causal=True, return_weights=True, return_aux=EVERYTHING)
    assert_of_weights(aux, weights)
    torch.testing.assert_close(aux.key_weights, weights.sum(-2))
    again, other = layer(X, is_causal=True, return_aux=EVERYTHING)
    assert torch.equal(out, again)
    assert torch.equal(aux.entropy, other.entropy)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"num_kv_heads": 2}])
def test_the_drop_in(batched: bool, options: dict[str, Any]) -> None:
    layer = MultiheadAttention(32, 4, batch_first=True, **options)
    x = X if batched else X[0]
    _, weights, aux = layer(x, x, x, average_attn_weights=False, return_aux=EVERYTHING)
    assert_of_weights(aux, weights)
    of_heads = weights.sum(-2)
    if "num_kv_heads" in options:
        of_heads = of_heads.unflatten(-2, (2, 2)).sum(-2)
    torch.testing.assert_close(aux.key_weights, of_heads)
    assert layer(x, x, x, need_weights=False, return_aux=AuxRequest(lse=True))[1] is None


def test_nested_tensors_are_refused() -> None:
    layer = MultiheadAttention(32, 4, batch_first=True)
    nested = torch.nested.nested_tensor([X[0], X[1][:3]])
    with pytest.raises(ValueError, match="return_aux must be None for nested tensors"):
        layer(nested, nested, nested, return_aux=EVERYTHING)


def test_a_model_is_collected() -> None:
    """Every call of every layer, by its name, with gradients; results of calls stay as they are."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    for layer in model.layers:
        own = MultiheadAttention(32, 4, batch_first=True)
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    plain = model(X)
    with collect_statistics(model) as usual, collect_statistics(model.layers[1], EVERYTHING) as all_of_one:
        out = model(X)
        model(X[:1])
    assert torch.equal(out, plain)
    assert list(usual) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert list(all_of_one) == ["self_attn"]
    first, second = usual["layers.1.self_attn"]
    assert (first.entropy.shape, second.entropy.shape) == ((2, 4, 6), (1, 4, 6))
    assert first.key_weights is first.mean_score is None
    assert all_of_one["self_attn"][0].key_weights.shape == (2, 4, 6)
    weight = model.layers[0].self_attn.in_proj_weight
    assert torch.autograd.grad(first.entropy.sum(), weight)[0].abs().sum() > 0
    model(X)
    assert len(usual["layers.1.self_attn"]) == 2


def test_what_a_layer_is_asked_for_itself() -> None:
    layer = MultiHeadSelfAttention(32, 4)
    with collect_statistics(layer, AuxRequest(key_weights="kv_heads")) as kept:
        _, aux = layer(X, return_aux=AuxRequest(entropy=True))
    assert [part is None for part in aux] == [True, True, False, True, True]
    assert kept[""][0].key_weights.shape == (2, 4, 6)
    assert kept[""][0].entropy is None


def test_a_block_that_has_seen_nothing() -> None:
    said = "no layer of the model has computed attention by this package"
    with pytest.raises(RuntimeError, match=said), collect_statistics(nn.Linear(2, 2)):
        pass
    with pytest.raises(ZeroDivisionError), collect_statistics(nn.Linear(2, 2)):
        raise ZeroDivisionError


def test_something_else_is_refused() -> None:
    with (
        pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, but it is int"),
        collect_statistics(3),
    ):
        pass
    with pytest.raises(TypeError, match="AuxRequest"), collect_statistics(nn.Linear(2, 2), "entropy"):
        pass
