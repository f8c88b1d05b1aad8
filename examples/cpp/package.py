"""Writes a model as a package of AOTInductor, which package.cpp runs without Python.

    python examples/cpp/package.py folder

It writes model.pt2, the compiled model with its weights, and example.pt, inputs with the model's results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import selfattn_ext


class Block(nn.Module):
    """One layer of a decoder, with a window and a score limit that torch's attention does not have."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = selfattn_ext.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            is_causal=True, window_size=(16, 0), softcap=30.0,
        )  # fmt: skip
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def main(folder: str) -> None:
    torch.manual_seed(0)
    module = Block().eval()
    dims = ({0: Dim("batch", max=64), 1: Dim("length", min=2, max=512)},)
    with torch.no_grad():
        program = torch.export.export(module, (torch.randn(2, 5, 32),), dynamic_shapes=dims)
        torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "model.pt2")))
        examples = [torch.randn(batch, length, 32) for batch, length in ((2, 5), (3, 100))]
        torch.save([*examples, *map(module, examples)], Path(folder, "example.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
