"""Selected keys on one kernel: of batches, of packed sequences, of caches and of pages.

The formula with the mask that a selection means judges the operators' results, which must have the bits of a
call for each sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from option_pairs import covering
from torch import Tensor

from selfattn_ext import masks, ops
from selfattn_ext.sparse.selection import joined

from . import sequence_cases
from .sequence_case import Named, SequenceCase

#: How keys are selected: (queries of a row, keys of a block, heads that have lists of their own). Packed
#: queries do not share rows.
KINDS = {
    "keys": (1, 1, "all"),
    "keys of kv heads": (1, 1, "kv"),
    "keys of all heads": (1, 1, "one"),
    "blocks of 7": (1, 7, "kv"),
    "blocks of 64": (1, 64, "one"),
    "blocks of 100": (1, 100, "all"),
    "blocks by blocks": (24, 24, "kv"),
    "blocks by wide blocks": (70, 70, "one"),
}


@dataclass(frozen=True)
class SelectedCase(SequenceCase):
    """A case whose queries select keys of their own sequence: repeated, some of them -1.

    Its form may also be "dense", for sequences of one length, and no number of theirs in the call.
    """

    kind: str = "keys"
    selected: int = 5
    shared: bool = False  # all sequences of a dense form have the lists of the first

    def __str__(self) -> str:
        shared = "shared " if self.shared else ""
        return f"{self.selected} {shared}{self.kind}-{super().__str__()}".replace(" ", "_")

    @property
    def block_size(self) -> int:
        return KINDS[self.kind][1]

    @property
    def row_size(self) -> int:
        """The queries of a row of the selection."""
        return 1 if self.packs_queries else KINDS[self.kind][0]

    def made(self) -> SelectedCase:
        if self.form != "dense":
            return replace(super().made(), shared=False)  # type: ignore[return-value]
        lengths = (max(self.lengths),) * len(self.lengths)
        return replace(self, batch=len(lengths), queries=lengths[0][0], keys=lengths[0][1], lengths=lengths)

    def indices(self, b: int) -> Tensor:
        """What a sequence selects, (1, heads, rows, K). A row in the middle selects nothing."""
        queries, keys = self.lengths[b]
        heads = {"all": self.heads, "kv": self.kv_heads, "one": 1}[KINDS[self.kind][2]]
        rows, blocks = -(-queries // self.row_size), -(-keys // self.block_size)
        generator = torch.Generator().manual_seed(self.seed + (0 if self.shared else b))
        found = torch.randint(-1, max(blocks, 0), (1, heads, rows, self.selected), generator=generator)
        found[:, :, rows // 2 : rows // 2 + (rows > 2)] = -1
        return found

    def lists(self, b: int) -> Tensor:
        return ops.sorted_selection(self.indices(b), -(-self.lengths[b][1] // self.block_size))

    def inputs(self) -> Named:
        tensors = super().inputs()
        if self.form == "dense":
            tensors.pop("seqlens_k")
        parts = [self.lists(b) for b in range(1 if self.shared else self.batch)]
        # Nobody reads the rows of no sequence.
        return {**tensors, "selection": self.joined(parts, 2**31 - 1)}

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "selection_size": [self.row_size, self.block_size]}

    def of_sequence(self, tensors: Named, b: int) -> Named:
        return {**super().of_sequence(tensors, b), "selection": self.lists(b)}

    def formula(self, tensors: Named, **options: Any) -> Named:
        """The formula of the same case with a mask in place of the selection."""
        size = self.row_size, self.block_size
        seen = [
            self.padded(b, masks.selected_pairs(self.indices(b), *lengths, self.heads, size), False)
            for b, lengths in enumerate(self.lengths)
        ]
        mask = joined(tensors.get("attn_mask"), torch.cat([it.expand(1, self.heads, -1, -1) for it in seen]))
        of_mask = SequenceCase(**{field.name: getattr(self, field.name) for field in fields(SequenceCase)})
        return of_mask.formula({**tensors, "attn_mask": mask}, **options)


OPTIONS: dict[str, list[Any]] = {
    "lengths": [
        ((70, 90), (0, 3), (5, 5), (1, 130)),
        ((64, 64), (65, 1), (0, 0), (3, 0), (17, 63)),
        ((1, 1), (1, 65), (1, 128)),
        ((67, 7), (35, 140)),
    ],
    "form": ["packed", "dense", "pages", "cache", "packed pages", "packed cache"],
    "kind": list(KINDS),
    "selected": [3, 0, 9, 20],
    "shared": [False, True],
    "head_counts": [(4, 2), (3, 1), (2, 2)],
    "dims": [(16, 16), (33, 65), (80, 16), (5, 9)],
    "page_size": [16, 1, 7, 128],
    "layout": ["contiguous", "transposed", "offset"],
    "mask": [None, "bool", "float", "bool keys", "float heads"],
    "is_causal": [False, True],
    "offsets": ["one", "end", "each"],
    "query_offset": [0, 5],
    "window": [(-1, -1), (70, -1), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
}


def _bare_cases() -> list[SelectedCase]:
    """Cases without options: only the end of a sequence hides the keys of a short block, which are another
    sequence's, or NaN. Every fourth ones make a share that a test takes.
    """
    forms = ("packed", "packed cache", "packed", "cache", "packed pages", "pages", "pages", "packed pages")
    named = (
        *("blocks of 64", "blocks of 7", "blocks of 100", "blocks by blocks"),
        *("keys of kv heads", "blocks by wide blocks", "blocks by blocks", "blocks of 7"),
    )
    lengths = ((5, 5), (0, 3), (33, 70), (1, 90))
    return [
        SelectedCase(heads=4, kv_heads=2, lengths=lengths, form=form, kind=kind, selected=2).made()
        for form, kind in zip(forms, named, strict=True)
    ]


def cases() -> list[SelectedCase]:
    """Cases without options, and every pair of values of two options."""
    found = _bare_cases()
    for index, row in enumerate(covering(OPTIONS)):
        (heads, kv_heads), (head_dim, value_dim) = row.pop("head_counts"), row.pop("dims")
        of_heads = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        found.append(SelectedCase(**of_heads, seed=index, dtype=torch.float32, **row).made())
    return found


check, compute = sequence_cases.check, sequence_cases.compute
