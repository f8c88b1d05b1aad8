"""A small model of every architecture of the installed transformers, from its configuration.

No architecture is described here. Its default configuration is made, each number in it and in its
sub-configurations is cut down by the meaning of its name (a width, a number of layers, of heads, of tokens),
and the class is called again with these numbers. :data:`EXCEPTIONS` has what names cannot tell.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto
from zoo_exceptions import EXCEPTIONS

WIDTH = 64
HEADS = 4
HEAD_DIM = WIDTH // HEADS
INNER = 96
LAYERS = 2
VOCABULARY = 256
POSITIONS = 128
EXPERTS = 4
MOST_PARAMETERS = 150e6

#: Kinds of models in the order of preference: models that generate give most to judge.
KINDS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_VISION_2_SEQ_MAPPING",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)


def kinds(config_class: Any) -> list[Any]:
    """Returns the model classes of a configuration, the preferred one first."""
    found: list[Any] = []
    every = [name for name in vars(modeling_auto) if name.endswith("_MAPPING") and name not in KINDS]
    for name in (*KINDS, *every):
        mapping = getattr(modeling_auto, name, None)
        if mapping is None:
            continue
        try:
            model = mapping.get(config_class, None)
        except Exception:
            continue
        for one in model if isinstance(model, (tuple, list)) else (model,):
            if one is not None and one not in found:
                found.append(one)
    return found or _parts(config_class)


def _parts(config_class: Any) -> list[Any]:
    """Returns the classes that take a configuration of a part of other models, which no mapping has."""
    try:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return []
    found = [
        one
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
        if vars(one).get("config_class", vars(one).get("config")) is config_class
        or _annotated(one) is config_class
        if not name.endswith("PreTrainedModel")
    ]
    return found[::-1]


def _annotated(model_class: Any) -> Any:
    """Returns the configuration that a model class names, in transformers 5 by an annotation."""
    said = vars(model_class).get("__annotations__", {}).get("config")
    return (
        getattr(importlib.import_module(model_class.__module__), said, None)
        if isinstance(said, str)
        else said
    )


def architectures() -> list[str]:
    """Returns the model types of all configurations, in transformers' order."""
    return list(configuration_auto.CONFIG_MAPPING_NAMES)


# The rules tell a number's meaning by its name; the first pattern that matches the whole name decides.
_SAME = object()
_RULES: list[tuple[str, Any]] = [
    (r"(num_feat_extract|max_depth|num_conv|vision_feature|num_feature).*", _SAME),
    (r".*(num_labels|_ratio|_index|_stride|_kernel|kernel_size|num_channels|n_fft|hop_length)", _SAME),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|n_dense_layers", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", _SAME),
    (r".*(layers|n_layer|depth|num_blocks|num_hidden_layers|num_layer)", LAYERS),
    (r".*(num_key_value_heads|n_kv_heads|num_kv_heads|n_head_kv|kv_heads)", "kv"),
    (r".*(attention_heads|num_heads|n_heads?|num_attn_heads|nhead|n_attn_heads)", HEADS),
    (r"(linear|mamba|ssm|lin)_num_(key|value)_heads", HEADS),
    (r".*(head_dim|d_kv|kv_channels|head_size|dim_head|d_head)", HEAD_DIM),
    (r".*lora_rank", HEAD_DIM),
    (r".*(vocab_size|vocabulary_size|codebook_size|num_embeddings)", VOCABULARY),
    (
        r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length)",
        POSITIONS,
    ),
    (r".*(sliding_window|attention_window|attention_chunk_size)", 5),
    (r"index_topk|indexer_topk", 4),
    (r".*(max_source_positions|max_target_positions|max_text_positions)", POSITIONS),
    (
        r".*(expert_per_tok|experts_per_tok|experts_per_token|moe_k|num_selected_experts|moe_topk|top_k_experts)",
        2,
    ),
    (r".*(n_group|topk_group|num_expert_group)", 1),
    (r".*(n_shared_experts|num_shared_experts)", 1),
    (r".*(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", EXPERTS),
    (r".*(num_queries|num_query_tokens|num_latents|num_denoising)", 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|inner_dim|n_inner|feedforward_dim)", INNER),
    (r".*(intermediate_dim|ffn_size|linear_units|d_inner|ff_dim|feedforward_size)", INNER),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|embed_dim|n_embd|width|embedding_size|embedding_dim|emb_dim"
        r"|embd_dim|dim|proj_dim|projection_dim|output_dim|d_embed|hidden_channels|projection_size)",
        WIDTH,
    ),
]
_PATTERNS = [(re.compile(pattern), value) for pattern, value in _RULES]

_TOKEN = re.compile(r".*_(token|token_id|token_ids|token_index|token_idx|tokens_id)")


class NotBuilt(Exception):
    """Says why no small model of an architecture could be made."""


#: Numbers that replace None, because a model needs them.
_MISSING = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "prediction_length": 8,
    "num_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "top_k_experts": 2,
}


def shrunk(config: Any, tokens: dict[int, int] | None = None, wide: bool = False) -> Any:
    """Returns a small configuration of the same class.

    Args:
        config: as its class makes it.
        tokens: the small token ids of large ones, to be the same in all sub-configurations.
        wide: leave widths and heads as they are.
    """
    tokens = {} if tokens is None else tokens
    values: dict[str, Any] = {}
    given = dict(_fields(config))
    staged = any(
        isinstance(given.get(name), (list, tuple)) for name in ("depths", "num_heads", "hidden_sizes")
    )
    chosen = _chosen_layers(given)
    for name, value in given.items():
        values[name] = _small(name, value, given, tokens, chosen, wide or staged)
    has_sections = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
    if has_sections and values.get("rope_parameters"):
        values["rope_parameters"] = _with_sections(values["rope_parameters"])
    if staged and isinstance(given.get("window_size"), int):
        values["window_size"] = 2
    if isinstance(getattr(config, "_out_indices", None), list) and staged:
        values["out_indices"] = list(config._out_indices)
    values.update(EXCEPTIONS.get(getattr(config, "model_type", ""), {}))
    return type(config)(**values)


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    base = transformers.PretrainedConfig
    if dataclasses.is_dataclass(config):
        common = (
            {field.name for field in dataclasses.fields(base)} if dataclasses.is_dataclass(base) else set()
        )
        names = [field.name for field in dataclasses.fields(config) if field.init]
    else:
        common = set(inspect.signature(base.__init__).parameters)
        names = list(inspect.signature(type(config).__init__).parameters)
    held = vars(config)
    for name in names:
        if name in held and (name not in common or _TOKEN.fullmatch(name)):
            yield name, held[name]


def _chosen_layers(given: dict[str, Any]) -> list[int] | None:
    """Returns the layers to keep: one of each kind, and at least two."""
    count = next(
        (v for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(v := given.get(n), int)), 0
    )
    lists = [v for v in given.values() if isinstance(v, (list, tuple)) and len(v) == count]
    if not lists or count < 2:
        return None
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([one[layer] for one in lists if not isinstance(one[layer], float)]), layer)
    chosen = sorted(kinds.values())[:6]
    if len(chosen) < LAYERS:
        chosen = sorted({*chosen, *range(LAYERS)})[:LAYERS]
    return chosen


def _small(
    name: str, value: Any, given: dict[str, Any], tokens: dict[int, int], chosen: list[int] | None, wide: bool
) -> Any:
    if isinstance(value, transformers.PretrainedConfig):
        return shrunk(value, tokens, wide)
    if name.startswith("use_pretrained") or name == "is_decoder":
        return False if name != "is_decoder" else value
    if value is None and not wide:
        return _MISSING.get(name)
    if isinstance(value, bool) or value is None:
        return value
    if name == "image_size" or name.endswith("_image_size"):
        patch = given.get("patch_size", 16)
        patch = patch if isinstance(patch, int) else max(patch, default=16) if patch else 16
        size = max(4 * patch, 64 if 64 % patch == 0 else 4 * patch)
        if isinstance(value, (list, tuple)):
            return type(value)(size for _ in value)
        return min(value, size) if isinstance(value, int) else value
    if _TOKEN.fullmatch(name):
        return _small_token(value, tokens)
    if isinstance(value, (list, tuple)):
        count = given.get("num_hidden_layers", given.get("n_layer", given.get("num_layers")))
        if chosen is not None and len(value) == count:
            return type(value)(value[layer] for layer in chosen)
        if name in ("depths", "num_layers_per_stage") and all(isinstance(one, int) for one in value):
            return type(value)(min(one, 2) for one in value)
        return value
    if not isinstance(value, int) or value <= 1:
        return value
    if chosen is not None and name in ("num_hidden_layers", "n_layer", "num_layers"):
        return len(chosen)
    small = next((small for pattern, small in _PATTERNS if pattern.fullmatch(name)), _SAME)
    if small is _SAME:
        return value
    if small == "kv":
        heads = next((given[n] for n in ("num_attention_heads", "num_heads", "n_head") if n in given), None)
        if wide:
            return value
        return HEADS if value == heads else min(value, 2)
    if wide and small in (WIDTH, HEADS, HEAD_DIM, INNER):
        return value
    return min(value, small)


def _small_token(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_small_token(one, tokens) for one in value)
    if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY - 32:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


def _with_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters whose sections for time, height and width fit the small heads."""
    if rope and all(isinstance(one, dict) for one in rope.values()):
        return {name: _with_sections(one) for name, one in rope.items()}
    half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1)) // 2
    quarter = max(half // 4, 1)
    return {**rope, "mrope_section": [half - 2 * quarter, quarter, quarter]}


def randomized(model: nn.Module, seed: int = 1) -> nn.Module:
    """Sets weights so large that attention matters: with initial weights, all scores are nearly equal."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan = 1 if id(parameter) in embeddings else math.prod(parameter.shape[1:])
                if parameter.dim() == 3 and "Expert" in repr(type(parameter)):
                    fan = parameter.shape[-1]
                parameter.normal_(std=min(1.3 / math.sqrt(max(fan, 1)), 0.7), generator=generator)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def small_config(model_type: str, wide: bool = False) -> Any:
    try:
        config = configuration_auto.CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise NotBuilt(f"no default configuration: {last_line(error)}") from error
    try:
        return shrunk(config, wide=wide)
    except Exception as error:
        raise NotBuilt(f"small configuration: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if len(lines[0]) < 20 else lines[0]}"[:220]


def built(config: Any, kind: Any, implementation: str) -> nn.Module:
    """Builds a model of the class on an attention implementation, with the same weights each time."""
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation)
    return randomized(model.float())


def refuse_large(kind: Any, config: Any) -> None:
    with torch.device("meta"):
        size = sum(one.numel() for one in kind._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"{size / 1e6:.0f} million parameters")
