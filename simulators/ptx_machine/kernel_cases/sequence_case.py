"""A batch whose sequences have different lengths and places, as data.

The sequences are packed, in a cache, or in pages. A case has its tensors, those of each sequence alone, and
the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case, dropout_seed, laid_out
from torch import Tensor

from selfattn_ext import reference

#: Rows after the last sequence of a packed tensor, and after the longest sequence in a cache.
SPARE = 3

#: Arguments or results of operators, by name.
Named = dict[str, Tensor]


@dataclass(frozen=True)
class SequenceCase(Case):
    """``batch``, ``queries`` and ``keys`` follow from the other fields: see `made`."""

    lengths: tuple[tuple[int, int], ...] = ()
    form: str = "packed"
    offsets: str = "one"  # "one": query_offset; "end": from the keys' end; "each": all differ
    page_size: int = 16

    def __str__(self) -> str:
        lengths = ",".join(f"{queries}x{keys}" for queries, keys in self.lengths)
        pages = f"{self.page_size}" if self.in_pages else ""
        return f"{self.form}{pages}-{lengths}-{self.offsets}-{super().__str__()}".replace(" ", "_")

    @property
    def packs_queries(self) -> bool:
        return self.form.startswith("packed")

    @property
    def packs_keys(self) -> bool:
        return self.form == "packed"

    @property
    def in_pages(self) -> bool:
        return self.form.endswith("pages")

    def made(self) -> SequenceCase:
        """The case with the numbers that follow from its lengths: those of the longest sequence, or of the
        cache.
        """
        lengths = self.lengths
        queries, keys = (max(numbers) for numbers in zip(*lengths, strict=True))
        if not self.packs_queries:
            lengths = tuple((queries, of_keys) for _, of_keys in lengths)
        if self.in_pages:
            keys = -(-(keys + SPARE) // self.page_size) * self.page_size
        elif not self.packs_keys:
            keys += SPARE
        return replace(self, batch=len(lengths), queries=queries, keys=keys, lengths=lengths)

    def offset(self, b: int) -> int:
        """The position of a sequence's first query among its keys."""
        queries, keys = self.lengths[b]
        return {"one": self.query_offset, "end": keys - queries, "each": 3 * b - 4}[self.offsets]

    def starts(self, side: int) -> list[int]:
        """Where the queries (0) or keys (1) of each sequence begin in packed tensors, and where the last one
        ends.
        """
        found = [0]
        for lengths in self.lengths:
            found.append(found[-1] + lengths[side])
        return found

    def rows(self, tensor: Tensor, b: int, side: int, packed: bool) -> Tensor:
        """The rows of a sequence, (1, heads, length, ...)."""
        first = self.starts(side)[b] if packed else 0
        length = self.lengths[b][side]
        return (tensor if packed else tensor[b : b + 1])[:, :, first : first + length]

    def query_rows(self, tensor: Tensor, b: int) -> Tensor:
        return self.rows(tensor, b, 0, self.packs_queries)

    def key_rows(self, tensors: Named, name: str, b: int) -> Tensor:
        """The keys or values of a sequence, wherever they are stored."""
        tensor = tensors[name]
        if not self.in_pages:
            return self.rows(tensor, b, 1, self.packs_keys)
        count = -(-self.lengths[b][1] // self.page_size)
        pages = tensor[tensors["block_table"][b, :count].long()].transpose(0, 1)
        return pages.flatten(1, 2)[None, :, : self.lengths[b][1]]

    def joined(self, parts: list[Tensor], rest: float) -> Tensor:
        """Joins tensors with a row for each query of a sequence, as the operators lay them out."""
        if not self.packs_queries:
            return torch.cat(parts)
        shape = list(parts[0].shape)
        shape[2] = SPARE
        return torch.cat([*parts, parts[0].new_full(shape, rest)], 2)

    def padded(self, b: int, tensor: Tensor, rest: float) -> Tensor:
        """Pads a tensor of one sequence's queries and keys to the case's (1, heads, queries, keys)."""
        queries, keys = self.lengths[b]
        pad = (0, self.keys - keys, 0, self.queries - queries)
        return torch.nn.functional.pad(tensor, pad, value=rest)

    def inputs(self) -> Named:
        """The inputs in the form of the case, with zeros outside of the sequences."""
        tensors = {name: tensor.detach() for name, tensor in super().inputs().items()}
        dense = replace(self, form="cache")
        if self.packs_queries:
            parts = [dense.query_rows(tensors["query"], b) for b in range(self.batch)]
            tensors["query"] = laid_out(self.joined(parts, 0.0), self.layout)
            tensors["cu_seqlens_q"] = torch.tensor(self.starts(0))
        for name in ("key", "value"):
            parts = [dense.key_rows(tensors, name, b) for b in range(self.batch)]
            if self.packs_keys:
                rest = parts[0].new_zeros((1, self.kv_heads, SPARE, parts[0].shape[-1]))
                tensors[name] = laid_out(torch.cat([*parts, rest], 2), self.layout)
                tensors["cu_seqlens_k"] = torch.tensor(self.starts(1))
            elif self.in_pages:
                tensors |= self._pages(name, parts)
        if not self.packs_keys:
            tensors["seqlens_k"] = torch.tensor([keys for _, keys in self.lengths])
        if self.offsets != "one":
            tensors["query_offsets"] = torch.tensor([self.offset(b) for b in range(self.batch)])
        if "attn_mask" in tensors:
            mask = tensors["attn_mask"]
            tensors["attn_mask"] = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        for name in tensors.keys() & {"alibi_slopes", "sinks"}:
            of_heads = tensors[name].reshape(-1, self.heads)
            tensors[name] = of_heads.to(reference.accumulation_dtype(self.dtype))
        return {name: it.requires_grad_(it.is_floating_point()) for name, it in tensors.items()}

    def _pages(self, name: str, parts: list[Tensor]) -> Named:
        """Pages in random order, and a table whose unused entries are numbers of no page."""
        columns = self.keys // self.page_size
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.batch * columns + 2, generator=generator).to(torch.int32)
        table = torch.full((self.batch, columns), 2**31 - 1, dtype=torch.int32)
        pages = parts[0].new_zeros((len(order), self.kv_heads, self.page_size, parts[0].shape[-1]))
        for b, part in enumerate(parts):
            for n, rows in enumerate(part[0].split(self.page_size, 1)):
                if rows.shape[1]:
                    table[b, n] = order[b * columns + n]
                    pages[table[b, n], :, : rows.shape[1]] = rows
        return {name: laid_out(pages, self.layout), "block_table": table}

    def filled(self, tensors: Named) -> Named:
        """The tensors with NaN outside of the sequences, wherever a dimension runs over rows or pairs of
        rows.
        """
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        everything = range(self.batch)
        for name in ("query", "grad_out", "grad_row"):
            if name in tensors:
                parts = [self.query_rows(tensors[name], b) for b in everything]
                tensors[name] = laid_out(self.joined(parts, torch.nan), self.layout)
        for name in ("key", "value"):
            filled = torch.full_like(tensors[name], torch.nan)
            for b in everything:
                if self.in_pages:
                    for n in range(-(-self.lengths[b][1] // self.page_size)):
                        page = tensors["block_table"][b, n]
                        count = min(self.page_size, self.lengths[b][1] - n * self.page_size)
                        filled[page, :, :count] = tensors[name][page, :, :count]
                else:
                    self.key_rows({name: filled}, name, b).copy_(self.key_rows(tensors, name, b))
            tensors[name] = filled
        if "grad_weights" in tensors:
            parts = [self.pairs(tensors["grad_weights"], b) for b in everything]
            tensors["grad_weights"] = torch.cat(
                [self.padded(b, part, torch.nan) for b, part in enumerate(parts)]
            )
        mask = tensors.get("attn_mask")
        if mask is not None and mask.is_floating_point() and mask.shape[0] == self.batch:
            mask = mask.clone()
            for b, (queries, keys) in enumerate(self.lengths):
                mask[b, :, queries if mask.shape[2] > 1 else 1 :] = torch.nan
                mask[b, :, :, keys if mask.shape[3] > 1 else 1 :] = torch.nan
            tensors["attn_mask"] = mask
        return tensors

    def pairs(self, tensor: Tensor, b: int) -> Tensor:
        """The part of a tensor for a sequence's queries and keys; dimensions that are broadcast stay as they
        are.
        """
        tensor = tensor[b : b + 1] if tensor.shape[0] > 1 else tensor
        queries, keys = self.lengths[b]
        tensor = tensor[:, :, :queries] if tensor.shape[2] > 1 else tensor
        return tensor[..., :keys] if tensor.shape[3] > 1 else tensor

    def of_sequence(self, tensors: Named, b: int) -> Named:
        """The tensors of a dense call for one sequence."""
        one: Named = {}
        for name in tensors.keys() & {"query", "grad_out", "grad_row"}:
            one[name] = self.query_rows(tensors[name], b)
        for name in ("key", "value"):
            one[name] = self.key_rows(tensors, name, b)
        mask = tensors.get("attn_mask")
        if mask is not None:
            one["attn_mask"] = self.pairs(mask, b)
        if "grad_weights" in tensors:
            one["grad_weights"] = self.pairs(tensors["grad_weights"], b)
        for name in tensors.keys() & {"alibi_slopes", "sinks"}:
            one[name] = tensors[name][b : b + 1] if tensors[name].shape[0] > 1 else tensors[name]
        return one

    def numbers_of(self, b: int) -> dict[str, Any]:
        return {**self.numbers(), "query_offset": self.offset(b)}

    def formula(self, tensors: Named, **options: Any) -> Named:
        """The reference of each sequence. Dropout counts elements of the batch, so sequence b is computed as
        the last element of a batch of b + 1.
        """
        if self.dropout_p:
            options["dropout_seed"] = dropout_seed(self.seed, self.device)
        outs, weights, lses = [], [], []
        for b in range(self.batch):
            one = self.of_sequence(tensors, b)
            if self.dropout_p:
                one = {name: it.expand(b + 1, *it.shape[1:]) for name, it in one.items()}
            result = reference.attention(**one, **self.numbers_of(b), **options)
            outs.append(result.out[-1:])
            weights.append(self.padded(b, result.weights[-1:], 0.0))
            lses.append(result.lse[-1:])
        return {
            "out": self.joined(outs, 0.0),
            "weights": torch.cat(weights),
            "lse": self.joined(lses, -torch.inf),
        }
