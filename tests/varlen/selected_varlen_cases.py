"""Cases of packed sequences whose queries select keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import varlen_cases
from torch import Tensor
from varlen_cases import VarlenCase

from selfattn_ext import masks, varlen_attention

#: How keys are selected: (keys of a block, heads that have lists of their own).
KINDS = {
    "keys": (1, "all"),
    "keys of kv heads": (1, "kv"),
    "keys of all heads": (1, "none"),
    "blocks of 7": (7, "kv"),
    "blocks of 16": (16, "all"),
    "blocks of 64": (64, "none"),
}


@dataclass(frozen=True)
class SelectedCase(VarlenCase):
    """A case whose queries select keys of their own sequence: repeated, in any order, some of them -1."""

    kind: str = "keys"
    selected: int = 5

    @property
    def block_size(self) -> int:
        return KINDS[self.kind][0]

    def indices(self) -> Tensor:
        """Returns numbers (heads, total, K). Rows of no sequence hold the largest that the call allows."""
        heads = {"all": self.heads, "kv": self.kv_heads, "none": 1}[KINDS[self.kind][1]]
        generator = torch.Generator().manual_seed(self.seed + 7)
        parts = []
        for queries, keys in (*self.sequences, (self.more, self.keys)):
            blocks = -(-keys // self.block_size)
            shape = (heads, queries, self.selected)
            part = torch.full(shape, -1, device="cpu")
            if blocks:
                part = torch.randint(-1, blocks, shape, generator=generator, device="cpu")
            part[:, 1:2] = -1  # a row that sees nothing
            parts.append(part)
        parts[-1].fill_(-(-self.keys // self.block_size) - 1)
        return torch.cat(parts, 1).to(self.device)

    def selection(self) -> dict[str, Any]:
        indices = self.indices()
        if KINDS[self.kind][1] == "none":
            indices = indices.squeeze(0)
        if self.block_size == 1:
            return {"indices": indices.int()}
        return {"block_indices": indices, "block_size": self.block_size}

    def visible(self, sequence: int, queries: int, keys: int) -> Tensor:
        first = sum(self.query_lengths[:sequence])
        rows = self.indices()[None, :, first : first + queries]
        return masks.selected_pairs(rows, queries, keys, self.heads, (1, self.block_size))[0]

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(self.seed)
        results = varlen_attention(
            **tensors,
            **self.lengths(),
            **self.numbers(),
            **self.selection(),
            enable_gqa=self.heads != self.kv_heads,
            return_weights=self.weights,
            return_lse=self.lse,
        )
        return self.named(results)

    def formula(self, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        return super().formula(tensors, visible=self.visible, **options)


def selecting(case: VarlenCase, kind: str, selected: int = 5, **more: Any) -> SelectedCase:
    fields = {name: getattr(case, name) for name in VarlenCase.__dataclass_fields__}
    own = {"kind": kind, "selected": selected, "statistics": False, "mask_list": False}
    return SelectedCase(**fields | own | more)


#: Lengths around tiles, primes, and sequences without queries or keys.
LENGTHS = ((67, 203), (0, 5), (3, 0), (1, 1), (65, 64), (149, 130))
BASE = varlen_cases.of(LENGTHS, heads=4, kv_heads=2, head_dim=40, value_dim=24, lse=True)
