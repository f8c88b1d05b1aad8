"""A small interatomic potential with attention, trained by gradients of gradients.

    python examples/interatomic_potential.py                        # CPU, some minutes
    python examples/interatomic_potential.py --cells 6 --steps 20   # 216 atoms
    python examples/interatomic_potential.py --quick                # some seconds

What it shows: it is trained on energies and forces, which are minus the gradient of the energy, so a training
step differentiates attention twice. The distances of atoms enter as a float mask, which is learned, so its
second derivatives count, too. A copy of the model attends by the formula, with its matrices of weights: the
losses are the same, and time and memory of both are printed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import selfattn_ext
from selfattn_ext.bench import memory
from selfattn_ext.bench.timer import wall_clock

#: query, key, value (B, H, N, E) and a float mask (B, H, N, N).
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
CUTOFF = 2.4  # beyond it atoms do not see each other; the nearest neighbours are 1 apart


def by_formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Computes softmax(query @ key.T * scale + bias) @ value by torch's own operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, bias)


ATTENTION: dict[str, Attention] = {
    "selfattn_ext": selfattn_ext.scaled_dot_product_attention,
    "formula": by_formula,
}


def squared_distances(positions: Tensor, box: float) -> Tensor:
    """Returns (B, N, N) for positions (B, N, 3) in a periodic cube of side ``box``; 0 is open space."""
    apart = positions[:, :, None] - positions[:, None]
    if box:
        apart = apart - box * torch.round(apart / box)
    return apart.square().sum(-1)


class Potential(nn.Module):
    """The energy as a sum over atoms, each of which attends to those within the cutoff and to itself."""

    def __init__(self, attention: Attention, species: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.species = nn.Embedding(species, width)
        # The rates at which the features of a distance decay, and their weights in each head.
        self.register_buffer("rates", torch.tensor([0.3, 0.6, 1.0, 1.5, 2.2, 3.2]))
        self.of_distance = nn.Parameter(torch.randn(heads, 6))
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def bias(self, squares: Tensor) -> Tensor:
        """Returns what is added to the scores of all layers, (B, heads, N, N), -inf beyond the cutoff.

        The weight of an atom that leaves the cutoff goes to 0 smoothly, so that the forces do.
        """
        near = squares < CUTOFF**2
        squares = squares.masked_fill(~near, 0.0)
        features = torch.exp(-self.rates[:, None, None] * squares[:, None])
        learned = torch.einsum("hk,bknm->bhnm", self.of_distance, features)
        fading = 3 * torch.log1p(-squares / CUTOFF**2)
        return (learned + fading[:, None]).masked_fill(~near[:, None], -torch.inf)

    def forward(self, positions: Tensor, species: Tensor, box: float) -> Tensor:
        """Returns energies (B,) for positions (B, N, 3) and species (N,)."""
        bias = self.bias(squared_distances(positions, box))
        x = self.species(species).expand(len(positions), -1, -1)
        for projection, mlp in zip(self.projections, self.mlps, strict=True):
            qkv = projection(x).unflatten(-1, (3, self.heads, -1))
            mixed = self.attention(*qkv.permute(2, 0, 3, 1, 4), bias)
            x = x + mlp(mixed.transpose(1, 2).flatten(2))
        return self.energy(x).sum((1, 2))


def morse(positions: Tensor, species: Tensor, box: float) -> Tensor:
    """Returns the energy to learn: Morse pairs with their minimum at a distance of 1, deeper by species."""
    squares = squared_distances(positions, box)
    near = (squares < CUTOFF**2) & (squares > 0)
    squares = squares.masked_fill(~near, 1.0)
    depth = torch.tensor([1.0, 0.5], dtype=positions.dtype)[species]
    bond = (1 - torch.exp(-3 * (squares.sqrt() - 1))).square() - 1
    fading = (1 - squares / CUTOFF**2).pow(3)
    pairs = (depth[:, None] * depth).sqrt() * bond * fading
    return pairs.masked_fill(~near, 0.0).sum((1, 2)) / 2


def energy_and_forces(
    energy_of: Callable[[Tensor, Tensor, float], Tensor], positions: Tensor, species: Tensor, box: float
) -> tuple[Tensor, Tensor]:
    """Returns energies (B,) and forces (B, N, 3), both of which can be differentiated again."""
    positions = positions.detach().requires_grad_()
    energy = energy_of(positions, species, box)
    return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def loss_of(model: Potential, positions: Tensor, species: Tensor, box: float) -> Tensor:
    """Returns the squared errors of the energy per atom and of the forces."""
    energy, forces = energy_and_forces(model, positions, species, box)
    true_energy, true_forces = energy_and_forces(morse, positions, species, box)
    of_energy = ((energy - true_energy.detach()) / len(species)).square().mean()
    return of_energy + (forces - true_forces.detach()).square().mean()


def crystals(batch: int, cells: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draws positions (B, cells³, 3) near those of a simple cubic crystal."""
    sites = torch.cartesian_prod(*[torch.arange(cells, dtype=dtype)] * 3) * 1.05
    return sites + 0.06 * torch.randn(batch, cells**3, 3, dtype=dtype, generator=generator)


def box_of(cells: int) -> float:
    """Returns the side of a periodic box, or 0 (open space) where an atom would see another one twice."""
    return 1.05 * cells if 1.05 * cells >= 2 * CUTOFF else 0.0


def errors_of_gradients(attention: Attention) -> tuple[float, float]:
    """Compares forces, and the loss's gradient, with finite differences in float64; returns the errors."""
    torch.manual_seed(1)
    model = Potential(attention, species=2, layers=2, heads=2, width=8).double()
    drawn = torch.Generator().manual_seed(1)
    positions, species = crystals(2, 2, torch.float64, drawn), torch.arange(8) % 2
    step = 1e-5

    def error(value_at: Callable[[float], float], slope: float) -> float:
        return abs((value_at(step) - value_at(-step)) / (2 * step) - slope) / abs(slope)

    along = torch.randn(positions.shape, dtype=torch.float64, generator=drawn)
    _, forces = energy_and_forces(model, positions, species, 0.0)
    of_forces = error(
        lambda x: model(positions + x * along, species, 0.0).sum().item(), -(forces * along).sum().item()
    )

    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    directions = [torch.randn(each.shape, dtype=torch.float64, generator=drawn) for each in parameters]
    gradient = torch.autograd.grad(loss_of(model, positions, species, 0.0), parameters)
    slope = sum((g * d).sum().item() for g, d in zip(gradient, directions, strict=True))

    def loss_at(x: float) -> float:
        with torch.no_grad():
            for parameter, start, direction in zip(parameters, before, directions, strict=True):
                parameter.copy_(start + x * direction)
        return loss_of(model, positions, species, 0.0).item()

    return of_forces, error(loss_at, slope)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=5, help="atoms along each side of a crystal")
    for name, default in (("batch", 2), ("layers", 3), ("heads", 4), ("width", 32), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-2, help="the learning rate")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--quick", action="store_true", help="27 atoms and 10 steps")
    given = parser.parse_args(argv)
    if given.quick:
        given.cells, given.steps = 3, 10
    if given.width % given.heads:
        parser.error("--heads must divide --width")
    return given


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains a model with either attention, prints progress, and returns the losses of both."""
    given = arguments(argv)
    dtype, box = DTYPES[given.dtype], box_of(given.cells)
    species = torch.arange(given.cells**3) % 2
    print(f"atoms    {len(species)} in each of {given.batch}, {f'a box of {box:.2f}' if box else 'open'}")
    for name, attention in ATTENTION.items():
        of_forces, of_loss = errors_of_gradients(attention)
        print(
            f"check    {name:12}  differences agree with forces to {of_forces:.0e}, with the loss's gradient"
        )
        print(f"         {'':12}  to {of_loss:.0e}, in float64")

    models, optimizers = {}, {}
    for name, attention in ATTENTION.items():
        torch.manual_seed(0)
        models[name] = Potential(attention, 2, given.layers, given.heads, given.width).to(dtype)
        optimizers[name] = torch.optim.Adam(models[name].parameters(), lr=given.rate, eps=1e-5)
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    drawn = torch.Generator().manual_seed(0)
    for step in range(1, given.steps + 1):
        positions = crystals(given.batch, given.cells, dtype, drawn)
        for name, model in models.items():

            def train(name: str = name, model: Potential = model, positions: Tensor = positions) -> None:
                loss = loss_of(model, positions, species, box)
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
                losses[name].append(loss.item())

            seconds[name].append(wall_clock(train, 1))
        if step == 1 or step % max(1, given.steps // 5) == 0:
            print(f"step {step:4d}   " + "   ".join(f"{name} {of[-1]:.6f}" for name, of in losses.items()))

    positions = crystals(given.batch, given.cells, dtype, drawn)
    for name, model in models.items():
        line = f"{name:12}  {statistics.median(seconds[name]) * 1e3:.1f} ms for a step"
        if memory.available():
            _, grown = memory.growth(lambda model=model: loss_of(model, positions, species, box).backward())
            line += f", {grown / 1e6:.0f} MB more at its peak"
        print(line)
    return losses


if __name__ == "__main__":
    main()
