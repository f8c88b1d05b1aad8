"""Cases of attention to selected keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cases import Case
from torch import Tensor

from selfattn_ext import masks, sparse_attention

#: How keys are selected: (keys of a block, heads that have lists of their own, whether blocks of queries do).
KINDS = {
    "keys": (1, "all", False),
    "keys of kv heads": (1, "kv", False),
    "keys of all heads": (1, "one", False),
    "blocks of 7": (7, "kv", False),
    "blocks of 16": (16, "all", False),
    "blocks of 64": (64, "kv", False),
    "blocks of 100": (100, "one", False),
    "blocks by blocks": (24, "kv", True),
}


@dataclass(frozen=True)
class SparseCase(Case):
    """A case whose queries select keys at random: repeated, in any order, some of them -1."""

    kind: str = "keys"
    selected: int = 5

    def indices(self) -> Tensor:
        keys, heads, by_blocks = KINDS[self.kind]
        count = {"all": self.heads, "kv": self.kv_heads, "one": 1}[heads]
        rows = -(-self.queries // keys) if by_blocks else self.queries
        generator = torch.Generator().manual_seed(self.seed + 7)
        shape = (self.batch, count, rows, self.selected)
        blocks = -(-self.keys // keys)
        found = torch.full(shape, -1, device="cpu")
        if blocks:
            found = torch.randint(-1, blocks, shape, generator=generator, device="cpu")
        if rows > 2:
            found[:, :, 1] = -1  # a row that sees nothing
        return found.to(self.device)

    def selection(self) -> dict[str, Any]:
        size = KINDS[self.kind][0]
        if size == 1:
            return {"indices": self.indices().int()}
        return {"block_indices": self.indices(), "block_size": size}

    def visible(self) -> Tensor:
        keys, _, by_blocks = KINDS[self.kind]
        size = (keys if by_blocks else 1, keys)
        return masks.selected_pairs(self.indices(), self.queries, self.keys, self.heads, size)

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(self.seed)
        results = sparse_attention(
            **tensors,
            **self.selection(),
            **self.numbers(),
            enable_gqa=self.heads != self.kv_heads,
            return_weights=self.weights,
            return_lse=self.lse,
        )
        return self.named(results)

    def formula(self, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        return super().formula(tensors, visible=self.visible(), **options)


def sparse(case: Case, kind: str, selected: int = 5) -> SparseCase:
    fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return SparseCase(**fields | {"kind": kind, "selected": selected, "statistics": False})


BASE = Case(batch=2, heads=4, kv_heads=2, queries=67, keys=203, head_dim=40, value_dim=24, lse=True)
