"""MeanFlow with a small transformer: one step of a flow in place of many, by forward mode.

    python examples/mean_flow.py                          # CPU, some minutes
    python examples/mean_flow.py --points 512 --steps 20
    python examples/mean_flow.py --quick                  # some seconds

What it shows: MeanFlow (Geng et al. 2025, "Mean Flows for One-step Generative Modeling") trains u(z, r, t),
the mean velocity between the times r and t, on a target that contains the derivative of u along the path.
torch.func.jvp computes that in one forward pass, through attention without matrices of weights. A copy of the
model attends by the formula, with these matrices: the losses are the same, and time and memory of both are
printed. A sample is a ring of points, each of which is a token; at the end rings are drawn in one step.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import selfattn_ext
from selfattn_ext.bench import memory
from selfattn_ext.bench.timer import wall_clock

#: query, key and value, each (B, H, T, E).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def by_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes softmax(query @ key.T * scale) @ value by torch's own operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


ATTENTION: dict[str, Attention] = {
    "selfattn_ext": selfattn_ext.scaled_dot_product_attention,
    "formula": by_formula,
}


class Block(nn.Module):
    """A pre-norm layer whose normalised inputs are shifted and scaled by the times."""

    def __init__(self, attention: Attention, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.of_times = nn.Linear(width, 4 * width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        shift, scale, mlp_shift, mlp_scale = self.of_times(times)[:, None].chunk(4, dim=-1)
        qkv = self.projection(self.norms[0](x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
        mixed = self.attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x) * (1 + mlp_scale) + mlp_shift)


class MeanVelocity(nn.Module):
    """u(z, r, t), (B, T, 2), for points z (B, T, 2) at the times t (B,) that move to the times r (B,)."""

    def __init__(self, attention: Attention, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(-0.5, 1.2, width // 4))
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.points = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(attention, width, heads) for _ in range(layers))
        self.velocity = nn.Linear(width, 2)
        nn.init.zeros_(self.velocity.weight)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        angles = torch.cat([time[:, None] * self.frequencies for time in (t, t - r)], dim=-1)
        times = self.times(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.points(z)
        for block in self.blocks:
            x = block(x, times)
        return self.velocity(x)


def rings(batch: int, points: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draws the data (batch, points, 2): points of rings of radius 0.6 to 1.4 around the origin."""
    radius = 0.6 + 0.8 * torch.rand(batch, 1, dtype=dtype, generator=generator)
    angle = 2 * math.pi * torch.rand(batch, points, dtype=dtype, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def times_of(batch: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws r <= t, each (batch,). They are equal in half of the batch, where u is the velocity itself."""
    drawn = torch.sigmoid(torch.randn(batch, 2, dtype=dtype, generator=generator) - 0.4)
    r, t = drawn.amin(1), drawn.amax(1)
    return torch.where(torch.arange(batch) % 2 == 0, t, r), t


def loss_of(model: MeanVelocity, data: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """Returns the squared error of u against v - (t - r) du/dt, with du/dt = v du/dz + ∂u/∂t on the path."""
    at = t[:, None, None]
    z, v = (1 - at) * data + at * noise, noise - data
    u, along = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * along
    return (u - target.detach()).square().mean()


@torch.no_grad()
def sample(model: MeanVelocity, noise: Tensor) -> Tensor:
    """Turns noise (B, T, 2) into data in one step, from t = 1 to r = 0."""
    ends = torch.zeros(len(noise), dtype=noise.dtype)
    return noise - model(noise, ends, ends + 1)


def raggedness(points: Tensor) -> float:
    """Returns how much distances from the origin differ within a sample, over their mean; 0 for rings."""
    radius = points.norm(dim=-1)
    return (radius.std(dim=1) / radius.mean(dim=1)).mean().item()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=128, help="tokens of a sample")
    for name, default in (("batch", 16), ("layers", 3), ("heads", 4), ("width", 64), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--quick", action="store_true", help="32 points, a smaller model and 30 steps")
    given = parser.parse_args(argv)
    if given.quick:
        given.points, given.layers, given.width, given.steps = 32, 2, 32, 30
    if given.width % (4 * given.heads):
        parser.error("four times --heads must divide --width")
    return given


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains a model with either attention, prints progress, and returns the losses of both."""
    given = arguments(argv)
    dtype = DTYPES[given.dtype]
    models, optimizers = {}, {}
    for name, attention in ATTENTION.items():
        torch.manual_seed(0)
        models[name] = MeanVelocity(attention, given.layers, given.heads, given.width).to(dtype)
        optimizers[name] = torch.optim.Adam(models[name].parameters(), lr=given.rate, eps=1e-5)
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    drawn = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, ...]:
        data = rings(given.batch, given.points, dtype, drawn)
        noise = torch.randn(data.shape, dtype=dtype, generator=drawn)
        return data, noise, *times_of(given.batch, dtype, drawn)

    for step in range(1, given.steps + 1):
        tensors = batch()
        for name, model in models.items():

            def train(
                name: str = name, model: MeanVelocity = model, tensors: tuple[Tensor, ...] = tensors
            ) -> None:
                loss = loss_of(model, *tensors)
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
                losses[name].append(loss.item())

            seconds[name].append(wall_clock(train, 1))
        if step == 1 or step % max(1, given.steps // 5) == 0:
            print(f"step {step:4d}   " + "   ".join(f"{name} {of[-1]:.6f}" for name, of in losses.items()))

    tensors = batch()
    for name, model in models.items():
        line = f"{name:12}  {statistics.median(seconds[name]) * 1e3:.1f} ms for a step"
        if memory.available():
            _, grown = memory.growth(lambda model=model: loss_of(model, *tensors).backward())
            line += f", {grown / 1e6:.0f} MB more at its peak"
        print(line)
    noise = torch.randn(64, given.points, 2, dtype=dtype, generator=drawn)
    drawn_rings = sample(models["selfattn_ext"], noise)
    print(f"one step from noise: radii within a sample differ by {raggedness(drawn_rings):.0%} of their mean")
    print(f"those of the noise by {raggedness(noise):.0%}, those of the data by 0%")
    return losses


if __name__ == "__main__":
    main()
