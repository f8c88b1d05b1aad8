"""A timm Vision Transformer trains on this package's kernels, without a change to timm.

    pip install selfattn_ext timm
    python examples/vit_timm.py

The example draws its images: one of four shapes, of random size, place and colour, on noise. The model's
attention is F.scaled_dot_product_attention, which runs forward and backward on the kernels of selfattn_ext
after torch.nn.attention.activate_flash_attention_impl. --compare trains the same model on torch's kernels,
too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import attention

import selfattn_ext  # noqa: F401  makes "selfattn_ext" known to torch.nn.attention

SHAPES = ("disc", "ring", "square", "cross")


def images(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws noisy images (count, 3, size, size); returns them and which of SHAPES each shows (count,)."""

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    radius = size * between(0.15, 0.3, count, 1, 1)
    row, column = between(0.3, 0.7, 2, count, 1, 1) * size
    places = torch.arange(size)
    down, right = (places[:, None] - row).abs(), (places - column).abs()
    distance = (down**2 + right**2).sqrt()
    shapes = torch.stack(
        (
            distance < radius,
            (distance < radius) & (distance > 0.6 * radius),
            torch.maximum(down, right) < 0.8 * radius,
            (torch.maximum(down, right) < radius) & (torch.minimum(down, right) < 0.3 * radius),
        )
    )
    shown = shapes[labels, torch.arange(count)][:, None]
    colour = between(0.5, 1.0, count, 3, 1, 1)
    noise = 0.3 * torch.randn((count, 3, size, size), generator=generator)
    return shown * colour + noise, labels


def train(options: argparse.Namespace) -> tuple[float, float]:
    """Trains one model; returns its accuracy on images that it has not seen, and seconds per step."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = VisionTransformer(
        img_size=options.size,
        patch_size=options.patch,
        embed_dim=options.dim,
        depth=options.depth,
        num_heads=options.heads,
        num_classes=len(SHAPES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    seconds = 0.0
    for step in range(1, options.steps + 1):
        pictures, labels = images(options.batch, options.size, generator)
        start = time.perf_counter()
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        if step % options.report == 0 or step == options.steps:
            print(f"  step {step:4}   loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        pictures, labels = images(256, options.size, generator)
        accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
    return accuracy, seconds / options.steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a timm ViT on the kernels of selfattn_ext.")
    parser.add_argument("--steps", type=int, default=150, help="training steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="images per step (%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="rows and columns of an image (%(default)s)")
    parser.add_argument("--patch", type=int, default=4, help="rows and columns of a token (%(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="width of the model (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="layers (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of images and weights (%(default)s)")
    parser.add_argument("--report", type=int, default=25, help="steps between two lines (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="train on torch's kernels, too")
    options = parser.parse_args(arguments)

    tokens = (options.size // options.patch) ** 2 + 1
    threads = torch.get_num_threads()
    print(f"{options.depth} layers, {options.heads} heads, {tokens} tokens, {threads} threads")

    attention.activate_flash_attention_impl("selfattn_ext")
    try:
        print(f"attention by {attention.current_flash_attention_impl()}")
        report(*train(options))
    finally:
        attention.restore_flash_attention_impl()

    if options.compare:
        print("attention by torch")
        report(*train(options))


def report(accuracy: float, seconds: float) -> None:
    print(f"  {accuracy:.0%} of 256 new images right, {1000 * seconds:.1f} ms per step")


if __name__ == "__main__":
    main()
