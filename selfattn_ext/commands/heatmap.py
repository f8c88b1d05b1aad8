"""The subcommand ``heatmap``: a picture of saved attention weights, or of a small example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfattn_ext import attention_weights, viz
from selfattn_ext.terminal import PICTURE_FORMATS, CommandError, check_output, describe

EXAMPLE = "the cat sat on the mat because the mat was warm and the cat was tired"


@dataclass(frozen=True)
class Options:
    """The options of the command line; see ``python -m selfattn_ext heatmap --help``."""

    file: Path | None = None
    tokens: Sequence[str] | None = None
    layer: int | None = None
    head: int | None = None
    title: str | None = None
    out: Path = Path("attention.png")


def run(options: Options) -> int:
    """Draws the picture and prints where it is. Returns 0.

    Raises:
        CommandError: the file is not a tensor of attention weights, or the labels do not fit.
        ImportError: matplotlib or seaborn is missing.
    """
    check_output("--out", options.out, PICTURE_FORMATS)
    viz.require()
    words = EXAMPLE.split()
    tokens, title = options.tokens, options.title
    if options.file is None:
        weights, tokens = example(words), tokens or words
        title = title or "softmax(scale · E Eᵀ) of word vectors E: words attend to their like"
    else:
        weights = load(options.file)
    weights = _pick(weights, options.layer, options.head)
    try:
        drawing = _plotter(weights)(weights, tokens, title=title)
        print(f"attention heatmap: {viz.save(drawing, options.out)}")
    except (TypeError, ValueError) as error:
        raise CommandError(describe(error)) from error
    except OSError as error:
        raise CommandError(f"--out {options.out}: cannot be written: {error.strerror or error}") from error
    return 0


def example(words: Sequence[str]) -> torch.Tensor:
    """Returns causal attention weights (words, words), where each word is a fixed random vector."""
    generator = torch.Generator().manual_seed(0)
    vectors = {word: torch.randn(32, generator=generator) for word in dict.fromkeys(words)}
    embedded = torch.stack([vectors[word] for word in words])
    return attention_weights(embedded, embedded, is_causal=True, scale=0.125)


def load(path: Path) -> Any:
    """Loads the tensor in a file of torch.save (.pt, .pth) or numpy.save (.npy).

    A file of torch.save may also hold a list of tensors.

    Raises:
        CommandError: the file is missing, of another kind, or holds something else.
    """
    if not path.is_file():
        raise CommandError(f"no such file: {path}")
    suffix = path.suffix.lower()
    if suffix not in (".pt", ".pth", ".npy"):
        raise CommandError(f"{path}: expected a file of torch.save (.pt, .pth) or numpy.save (.npy)")
    try:
        loaded = (
            _load_numpy(path) if suffix == ".npy" else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:  # unpickling a foreign file can raise anything
        raise CommandError(f"{path} cannot be read: {describe(error)}") from error
    parts = loaded if isinstance(loaded, (list, tuple)) and loaded else [loaded]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise CommandError(
            f"{path} holds a {type(loaded).__name__}; expected a tensor or a list of tensors, one per layer"
        )
    return loaded


def _load_numpy(path: Path) -> torch.Tensor:
    import numpy

    return torch.from_numpy(numpy.load(path, allow_pickle=False))


def _pick(weights: Any, layer: int | None, head: int | None) -> Any:
    """Returns the layer and the head that the options name, or all of them."""
    layered = not isinstance(weights, torch.Tensor) or weights.dim() == 4
    if layer is not None:
        if not layered:
            raise CommandError(
                f"--layer {layer}: the weights have no layers, their shape is {tuple(weights.shape)}"
            )
        weights = _at("--layer", weights, layer)
        layered = False
    if head is not None:
        if layered:
            raise CommandError(f"--head {head} needs --layer too: the weights have several layers")
        if weights.dim() != 3:
            raise CommandError(
                f"--head {head}: the weights have no heads, their shape is {tuple(weights.shape)}"
            )
        weights = _at("--head", weights, head)
    return weights


def _at(option: str, items: Any, index: int) -> Any:
    if not 0 <= index < len(items):
        raise CommandError(f"{option} must lie in 0..{len(items) - 1}, got {index}")
    return items[index]


def _plotter(weights: Any) -> Any:
    if not isinstance(weights, torch.Tensor) or weights.dim() == 4:
        return viz.plot_layers
    return viz.plot_heads if weights.dim() == 3 else viz.plot_attention
