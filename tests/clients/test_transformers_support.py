"""Models of transformers that compute attention themselves: right on our kernels, or refused."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers_models import (
    DECODERS,
    NAME,
    SIZES,
    TOKENS,
    VERSION,
    Trio,
    as_implementation,
    built,
    kernel_calls,
    logits_of,
    mask_arguments,
    text,
    tokens,
)

from selfattn_ext.integrations import transformers as integration

#: Configurations whose models do not ask the table of attention functions, and their arguments.
OWN: dict[str, dict[str, Any]] = {
    "Bloom": {**SIZES, "n_layer": 2, "n_head": 4},
    "Mpt": {"vocab_size": TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "CodeGen": {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "XGLM": {"vocab_size": TOKENS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "RoFormer": SIZES,
    "RemBert": SIZES,
    "MegatronBert": SIZES,
    "MPNet": SIZES,
    "Nystromformer": SIZES,
    # These models have tables of classes, but none for "sdpa".
    "GPTJ": {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "GPTNeo": {
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "Git": {**SIZES, "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}},
}


#: Later versions of these models ask the table; then test_transformers_zoo.py tests them.
LATER = ("CodeGen", "GPTJ")


def asks(name: str) -> bool:
    """Says whether a model's module imports the table of attention functions."""
    return hasattr(sys.modules[getattr(transformers, f"{name}Model").__module__], "ALL_ATTENTION_FUNCTIONS")


def config_of(name: str, sizes: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}Config")(**sizes)


@pytest.mark.parametrize("name", [name for name in OWN if name not in LATER or not asks(name)])
def test_a_model_that_asks_nobody_is_refused(name: str) -> None:
    config = config_of(name, OWN[name])
    kind = getattr(transformers, f"{name}Model")
    with pytest.raises(
        ValueError, match=rf"Git|{kind.__name__} computes attention by itself .* 'selfattn_ext'"
    ):
        kind._from_config(config, attn_implementation=NAME)
    kind._from_config(config, attn_implementation="eager")


def grounding_dino() -> Any:
    text = {**SIZES, "num_hidden_layers": 1, "model_type": "bert"}
    return transformers.GroundingDinoConfig(
        text_config=text,
        backbone_config=transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2),
        use_timm_backbone=False,
        backbone=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_feature_levels=2,
    )


def test_parts_of_a_model_take_the_name() -> None:
    kind = transformers.GroundingDinoModel
    with pytest.raises(
        ValueError, match=r'GroundingDinoModel computes .* \{"": "selfattn_ext", "vision_config"'
    ):
        kind._from_config(grounding_dino(), attn_implementation=NAME)
    model = kind._from_config(grounding_dino(), attn_implementation={"": "eager", "text_config": NAME})
    assert model.text_backbone.config._attn_implementation == NAME
    assert model.config._attn_implementation == "eager"


def test_a_model_that_is_let_pass_warns() -> None:
    class Letting(transformers.BloomModel):
        pass

    Letting.__module__ = transformers.BloomModel.__module__
    config = transformers.BloomConfig(**OWN["Bloom"])
    with pytest.raises(ValueError, match="Letting computes attention by itself"):
        Letting._from_config(config, attn_implementation=NAME)
    Letting._supports_sdpa = True
    with pytest.warns(UserWarning, match="of 'selfattn_ext' only models that it is made of make use"):
        Letting._from_config(config, attn_implementation=NAME)


def test_a_model_of_a_notebook_is_taken() -> None:
    """The source of its attention cannot be read."""
    module = types.ModuleType("cells_of_a_notebook")
    sys.modules[module.__name__] = module
    kind = types.new_class("OfANotebook", (transformers.LlamaPreTrainedModel,))
    kind.__module__ = module.__name__
    kind.__init__ = lambda self, config: transformers.LlamaPreTrainedModel.__init__(self, config)
    model = kind._from_config(DECODERS["llama gqa"](), attn_implementation=NAME)
    assert model.config._attn_implementation == NAME


@pytest.mark.skipif(VERSION < (5, 0), reason="4.57 has no such table for Falcon's masks")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("alibi", [False, True])
def test_classes_from_a_table(alibi: bool, side: str) -> None:
    model = built(transformers.FalconConfig(**SIZES, alibi=alibi))
    models, inputs = Trio(model), text(side)
    if alibi:
        # transformers' "eager" adds the slopes twice: to the scores, and by the mask.
        models.peer = as_implementation(copy.deepcopy(model), "sdpa")

    def run(model: nn.Module, **more: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": logits_of(model, inputs, **more)}

    for ours in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        models.ours = ours
        models.check(run, least_calls=2)
    if not alibi:
        # The class computes weights by the formula, which adds the mask to the scores.
        models.check(lambda model: run(model, output_attentions=True), least_calls=0)


# Masks that models compute with come next.


@pytest.mark.parametrize("takes_bool", [True, False])
def test_a_mask_that_must_be_there_is_there(takes_bool: bool) -> None:
    """The mask of one query that sees all keys is left out only if the model allows it."""
    config = DECODERS["llama gqa" if takes_bool else "gpt2"]()
    if takes_bool:
        built(config)
    else:
        config = type("Unknown", (), {})()
    for causal, bidirectional in ((True, False), (False, True), (False, False)):
        for function in ("causal_mask_function", "bidirectional_mask_function"):
            rule = getattr(masking_utils, function, None)
            if rule is None:
                continue  # 4.57 has no bidirectional rule
            mask = integration.mask_function(
                **mask_arguments(1, 8, 9, mask_function=rule, config=config),
                allow_is_causal_skip=causal,
                allow_is_bidirectional_skip=bidirectional,
            )
            assert (mask is None) == bidirectional
            if mask is not None:
                assert mask.shape == (2, 1, 1, 9)
                assert bool(mask.all()) == takes_bool if mask.dtype == torch.bool else bool((mask == 0).all())
            if not causal and not bidirectional:
                # This is a step that may be compiled.
                assert type(mask) is Tensor
                assert mask.dtype == (torch.bool if takes_bool else torch.float32)


# Calls without a mask hide no key.


def test_no_mask_hides_nothing_in_a_layer_that_says_causal() -> None:
    model = built(DECODERS["llama gqa"]())
    layer = model.model.layers[0].self_attn
    assert layer.is_causal
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)

    def weights(module: nn.Module, **more: Any) -> Tensor:
        found = integration.attention_forward(
            module, query, key, value, None, output_attentions=True, **more
        )[1]
        assert found is not None
        return found

    assert bool((weights(layer) > 0).all())
    assert torch.equal(weights(layer, is_causal=True) > 0, torch.ones(1, 4, 5, 5).tril() > 0)
    # Other code that makes masks may leave out a causal one.
    other = nn.Module()
    other.is_causal = True
    assert torch.equal(weights(other) > 0, torch.ones(1, 4, 5, 5).tril() > 0)


# The last tests are about weights.


@pytest.mark.skipif(VERSION < (5, 0), reason="4.57 has no such models")
@pytest.mark.parametrize("name", ["GraniteSWA", "GraniteMoeSWA"])
def test_weights_without_the_sinks(name: str) -> None:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if "Moe" in name else {}
    config = config_of(name, {**SIZES, "num_key_value_heads": 2, "sliding_window": 4, **more})
    model = built(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.fill_(1.5)
    ids = tokens()
    with torch.no_grad():
        ours = model(ids, output_attentions=True, use_cache=False)
        alone = model(ids, use_cache=False)
        model.set_attn_implementation("eager")
        theirs = model(ids, output_attentions=True, use_cache=False)
    for layer, expected in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(layer, expected)
    torch.testing.assert_close(ours.logits, theirs.logits)
    torch.testing.assert_close(alone.logits, theirs.logits)


@pytest.mark.skipif(VERSION < (5, 0), reason="4.57's Pix2Struct is refused")
def test_weights_that_a_model_gathers_by_itself() -> None:
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 32, "d_ff": 48, "d_kv": 8}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 16}
    config = transformers.Pix2StructVisionConfig(**vision)
    model = transformers.Pix2StructVisionModel._from_config(config, attn_implementation=NAME).eval()
    patches = torch.randn(2, 9, 2 + 32)
    patches[..., :2] = torch.arange(9)[:, None] + 1
    with torch.no_grad():
        found = model(flattened_patches=patches, output_attentions=True).attentions
        assert [layer.shape for layer in found] == [(2, 4, 9, 9)] * 2
        torch.testing.assert_close(found[0].sum(-1), torch.ones(2, 4, 9))
        with kernel_calls() as calls:
            assert model(flattened_patches=patches).attentions is None
        assert not any("weights" in call for call in calls)
        # A call that fails does not change later calls.
        with pytest.raises(RuntimeError):
            model(flattened_patches=patches[..., :5], output_attentions=True)
        with kernel_calls() as calls:
            model(flattened_patches=patches)
        assert not any("weights" in call for call in calls)
