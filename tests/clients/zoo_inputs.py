"""Inputs for the models of the zoo, made from the names of their forward's parameters.

A name may mean several kinds of tensors ("pixel_values" is an image, a video or a list of patches). Each name
has a list of ways to make the tensor, which are tried until eager attention takes one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import VOCABULARY

BATCH = 2
LENGTH = 11
DECODED = 7
HIDDEN = 3
GRID = (1, 4, 4)

Inputs = dict[str, Any]
Ways = list[Callable[[], Any]]


def parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


#: Sets of inputs besides the main input and the required ones; the first set that works is taken.
_BESIDE: tuple[tuple[str, ...], ...] = (
    (),
    ("decoder_input_ids",),
    ("pixel_values",),
    ("pixel_values", "decoder_input_ids"),
    ("input_ids",),
    ("input_features",),
    ("input_features", "decoder_input_ids"),
    ("input_features", "input_features_mask"),
    ("input_ids", "decoder_input_ids"),
    ("input_ids", "bbox"),
    ("input_ids", "bbox", "pixel_values"),
    ("input_ids", "pixel_values", "pixel_mask"),
    ("pixel_values", "input_points"),
    ("visual_feats", "visual_pos"),
    ("encoder_hidden_states",),
    ("input_ids", "input_values"),
    ("pixel_values_videos", "input_values"),
    ("actions", "rewards", "returns_to_go", "timesteps"),
    ("pixel_values", "image_grid_thw"),
    ("pixel_values", "input_ids", "image_grid_thw"),
    ("future_values", "future_time_features"),
)
_MOST_WAYS = 24


def candidates(model: nn.Module) -> Iterator[Inputs]:
    """Yields sets of inputs, the simplest first; a model gets the first set that eager attention takes."""
    accepted = parameters(model)
    main = getattr(model, "main_input_name", "input_ids")
    needed = set(main if isinstance(main, list) else [main])
    for name, one in accepted.items():
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            needed.add(name)
    tried: list[list[str]] = []
    for beside in _BESIDE:
        names = sorted(name for name in {*needed, *beside} if name in accepted)
        if not names or names in tried or not all(beside_one in accepted for beside_one in beside):
            continue
        tried.append(names)
        ways = [_ways(name, model.config) for name in names]
        if not all(ways):
            continue
        choices = sorted(
            itertools.product(*(range(len(one)) for one in ways)), key=lambda choice: sum(choice)
        )
        for choice in choices[:_MOST_WAYS]:
            yield {name: one[way]() for name, one, way in zip(names, ways, choice, strict=True)}


def find(config: Any, *names: str, default: Any = None) -> Any:
    """Returns the value of the first of the names in the configuration, or else in one within it."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for value in vars(config).values():
        if hasattr(value, "to_diff_dict"):
            found = find(value, *names)
            if found is not None:
                return found
    return default


def whole(value: Any) -> int:
    """Returns a number of which some configurations have one per axis."""
    return int(value[-1]) if isinstance(value, (list, tuple)) else int(value)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(length: int = LENGTH, seed: int = 2, most: int = VOCABULARY - 40) -> Tensor:
    return torch.randint(
        min(5, most - 1), most, (BATCH, length), generator=torch.Generator().manual_seed(seed)
    )


def _ways(name: str, config: Any) -> Ways:
    """Returns ways to make the input of this name, the usual one first, or none for an unknown name."""
    for names, make in _KNOWN:
        if name in names:
            return make(name, config)
    return []


def _tokens(name: str, config: Any) -> Ways:
    vocabulary = find(config, "vocab_size", "num_text_tokens", default=VOCABULARY)
    most = min(vocabulary, VOCABULARY) if isinstance(vocabulary, int) else VOCABULARY
    most = most - 40 if most > 60 else most
    length, seed = (DECODED, 4) if name.startswith("decoder") else (LENGTH, 2)
    books = whole(find(config, "num_codebooks", "num_quantizers", default=4))
    return [
        lambda: ids(length, seed, most),
        lambda: torch.stack([ids(length, book, most) for book in range(books)], dim=-1),
        lambda: ids(length, seed, most).repeat_interleave(books, 0),
        lambda: ids(24, seed, most),
        lambda: torch.stack([ids(length, book, most) for book in range(books + 1)], dim=-1),
        lambda: torch.stack([ids(length, book, most) for book in range(books)], dim=1),
    ]


def _image(name: str, config: Any) -> Ways:
    size = find(config, "image_size", "img_size", default=64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    frames = find(config, "num_frames", "frames_per_clip", default=4)
    images: Ways = [lambda: random(BATCH, channels, height, width)]
    videos: Ways = [
        lambda: random(BATCH, frames, channels, height, width),
        lambda: random(BATCH, channels, frames, height, width),
    ]
    sized: Ways = [lambda edge=edge: random(BATCH, channels, edge, edge) for edge in (64, 128, 224)]  # type: ignore[misc]
    patches: Ways = [lambda: _patches(config), lambda: _patches(config).unflatten(0, (BATCH, -1))]
    if "videos" in name or "video" in type(config).__name__.lower():
        return [*videos, *patches, *images]
    return [*images, *patches, *sized, *videos, lambda: random(BATCH, 2, channels, height, width)]


def _patches(config: Any) -> Tensor:
    patch = whole(find(config, "patch_size", default=16))
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    return random(
        BATCH * 16, channels * patch * patch * whole(find(config, "temporal_patch_size", default=1))
    )


def _hidden(name: str, config: Any) -> Ways:
    width = whole(find(config, "hidden_size", "d_model", "embed_dim", default=64))
    encoder = whole(find(config, "encoder_hidden_size", default=width))
    if name == "encoder_hidden_states":
        return [lambda: random(BATCH, LENGTH, encoder)]
    return [lambda: random(BATCH, LENGTH, width), lambda: _patches(config), lambda: random(BATCH * 16, width)]


def _audio(name: str, config: Any) -> Ways:
    mels = whole(find(config, "num_mel_bins", "feature_projection_input_dim", "input_feat_size", default=80))
    for other in ("input_feat_per_channel", "feature_size", "input_dim"):
        mels = getattr(config, other, mels)
    frames = 2 * whole(find(config, "max_source_positions", default=64))
    length = whole(find(config, "max_length", default=64))
    waves: Ways = [
        lambda: random(BATCH, 4000) * 0.3,
        lambda: random(BATCH, 1, 3840) * 0.3,
        lambda: random(BATCH, length, mels),
        lambda: random(BATCH, 16000) * 0.3,
    ]
    spectra: Ways = [
        lambda: random(BATCH, mels, frames),
        lambda: random(BATCH, 64, mels),
        lambda: random(BATCH, mels, 64),
        lambda: random(BATCH, 1, whole(find(config, "spec_size", default=1024)), mels),
    ]
    return waves + spectra if name in ("input_values", "inputs", "audio") else spectra + waves


def _series(name: str, config: Any) -> Ways:
    lags = max(find(config, "lags_sequence", default=[0]))
    past, future = (
        whole(find(config, "context_length", default=64)),
        find(config, "prediction_length", default=8),
    )
    length = future if name.startswith("future") else past + lags
    if name.endswith("time_features"):
        return [lambda: random(BATCH, length, find(config, "num_time_features", default=0))]
    if name == "past_observed_mask":
        return [lambda: torch.ones(BATCH, length)]
    channels = find(config, "num_input_channels", default=1)
    return [lambda: random(BATCH, length), lambda: random(BATCH, length, channels)]


def _boxes(name: str, config: Any) -> Ways:
    corners = torch.tensor([10, 20, 30, 40]) + torch.arange(LENGTH)[:, None]
    return [lambda: corners.expand(BATCH, LENGTH, 4).clone(), lambda: random(BATCH, LENGTH, 8) * 0.1]


def _exactly(value: Callable[[Any], Any]) -> Callable[[str, Any], Ways]:
    return lambda name, config: [lambda: value(config)]


def _flattened(config: Any) -> Tensor:
    """Returns Pix2Struct's patches, each with its row and column in front."""
    width = config.vision_config.patch_embed_hidden_size if hasattr(config, "vision_config") else 64
    place = torch.stack([torch.arange(16) // 4, torch.arange(16) % 4], -1) + 1.0
    return torch.cat([place.expand(BATCH, 16, 2), random(BATCH, 16, width)], -1)


_KNOWN: list[tuple[tuple[str, ...], Callable[[str, Any], Ways]]] = [
    (("input_ids", "decoder_input_ids", "task_inputs", "qformer_input_ids", "tasks_input_ids"), _tokens),
    (("pixel_values", "pixel_values_videos", "prompt_pixel_values"), _image),
    (("input_features", "audio_features", "input_values", "audio_mel", "inputs"), _audio),
    (("inputs_embeds", "hidden_states", "encoder_hidden_states", "query_embeds", "noise_embeds"), _hidden),
    (("grid_thw", "image_grid_thw"), _exactly(lambda config: torch.tensor([GRID] * BATCH))),
    (("merge_sizes",), _exactly(lambda config: torch.full((BATCH,), 2))),
    (("spatial_shapes",), _exactly(lambda config: torch.tensor([GRID[1:]] * BATCH))),
    (("pixel_attention_mask",), _exactly(lambda config: torch.ones(BATCH, 16, dtype=torch.long))),
    (("pixel_mask",), _exactly(lambda config: torch.ones(BATCH, 64, 64, dtype=torch.long))),
    (("bbox",), _boxes),
    (("input_points",), _exactly(lambda config: random(BATCH, 1, 2, 2).abs() * 20)),
    (
        ("visual_feats",),
        _exactly(lambda config: random(BATCH, 5, find(config, "visual_feat_dim", default=64))),
    ),
    (("visual_pos",), _exactly(lambda config: random(BATCH, 5, find(config, "visual_pos_dim", default=4)))),
    (("flattened_patches",), _exactly(_flattened)),
    (("latents",), _exactly(lambda config: random(BATCH, find(config, "hidden_size"), 8))),
    (("states",), _exactly(lambda config: random(BATCH, 5, config.state_dim))),
    (("actions",), _exactly(lambda config: random(BATCH, 5, config.act_dim))),
    (("rewards", "returns_to_go"), _exactly(lambda config: random(BATCH, 5, 1))),
    (("timesteps",), _exactly(lambda config: torch.arange(5).expand(BATCH, 5))),
    (
        ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features"),
        _series,
    ),
    (
        ("input_features_mask", "audio_mel_mask"),
        lambda name, config: [
            lambda: torch.ones(BATCH, 64, dtype=torch.bool),
            lambda: torch.ones(
                BATCH, 2 * whole(find(config, "max_source_positions", default=64)), dtype=torch.bool
            ),
        ],
    ),
]


def padded(inputs: Inputs, accepted: dict[str, Any]) -> Iterator[tuple[str, Inputs, Inputs | None]]:
    """Yields paddings of the first row: the name, the inputs with it, and inputs with other hidden tokens.

    The last inputs tell which rows are padding, where queries that see no key may have different results.
    """
    text = inputs.get("input_ids")
    if text is not None and text.dim() == 2 and text.shape[0] == BATCH and "attention_mask" in accepted:
        for side in ("left", "right"):
            given, other = dict(inputs), dict(inputs)
            for name, mask_name, count in (
                ("input_ids", "attention_mask", HIDDEN),
                ("decoder_input_ids", "decoder_attention_mask", HIDDEN - 1),
            ):
                tokens = inputs.get(name)
                if (
                    tokens is None
                    or mask_name not in accepted
                    or tokens.shape[0] != BATCH
                    or tokens.dim() != 2
                ):
                    continue
                hidden = slice(0, count) if side == "left" else slice(-count, None)
                given[mask_name] = other[mask_name] = torch.ones_like(tokens)
                given[mask_name][0, hidden] = 0
                other[name] = tokens.clone()
                other[name][0, hidden] = other[name][0, hidden].flip(-1) + 1
            yield f"{side} padding", given, other
    for name in ("input_features", "input_values"):
        sound = inputs.get(name)
        if sound is None or sound.dim() not in (2, 3):
            continue
        for mask_name in ("input_features_mask", "attention_mask", "padding_mask"):
            if mask_name not in accepted or (mask_name == "attention_mask" and "input_ids" in inputs):
                continue
            for length in (one for one in dict.fromkeys(sound.shape[1:]) if one > 1):
                mask = torch.ones(BATCH, length, dtype=torch.long)
                mask[0, length * 2 // 3 :] = 0
                yield f"{mask_name} of {length}", {**inputs, mask_name: mask}, None
    if "pixel_values" in inputs and "pixel_mask" in accepted and inputs["pixel_values"].dim() == 4:
        mask = torch.ones(BATCH, *inputs["pixel_values"].shape[2:], dtype=torch.long)
        mask[0, :, mask.shape[2] * 2 // 3 :] = 0
        yield "pixel mask", {**inputs, "pixel_mask": mask}, None
