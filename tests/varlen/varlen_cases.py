"""Test cases of packed sequences as data, as :mod:`cases` has them for batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpu
import torch
from cases import DTYPES, STATISTICS, Case, dropout_seed, laid_out, statistics_of
from option_pairs import covering
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import selfattn_ext
from selfattn_ext import reference
from selfattn_ext.formula_steps import mask_of_sequence


def starts(lengths: Sequence[int], dtype: torch.dtype = torch.int64, device: str = gpu.DEVICE) -> Tensor:
    """Returns cumulative lengths, which begin with 0."""
    sums = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return torch.tensor(sums, dtype=dtype, device=device)


def packed(padded: Tensor, lengths: Sequence[int], more: int = 0) -> Tensor:
    """Packs the first rows of each element of (B, H, L, E) as (total, H, E), and appends ``more`` rows of
    NaN.
    """
    pieces = [element[:, :length].transpose(0, 1) for element, length in zip(padded, lengths, strict=True)]
    rest = padded.new_full((more, padded.size(1), padded.size(3)), torch.nan)
    return torch.cat([*pieces, rest])


def index(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a tensor of indices, such as offsets."""
    return torch.tensor(numbers, dtype=dtype)


@dataclass(frozen=True)
class VarlenCase(Case):
    """A :class:`Case` whose batch consists of packed sequences, and whose lengths are the longest ones."""

    sequences: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each
    index_dtype: torch.dtype = torch.int64
    offsets: tuple[int, ...] | None = None  # a query_offset for each
    mask_list: bool = False  # the mask is a list with a tensor for each sequence
    more: int = 0  # rows after the last sequence that belong to none and hold NaN

    @property
    def query_lengths(self) -> list[int]:
        return [queries for queries, _ in self.sequences]

    @property
    def key_lengths(self) -> list[int]:
        return [keys for _, keys in self.sequences]

    def inputs(self) -> dict[str, Tensor]:
        tensors = super().inputs()
        for name, lengths in (
            ("query", self.query_lengths),
            ("key", self.key_lengths),
            ("value", self.key_lengths),
        ):
            rows = packed(tensors[name].detach(), lengths, self.more).unsqueeze(0)
            tensors[name] = laid_out(rows, self.layout)[0].requires_grad_()
        return tensors

    def lengths(self) -> dict[str, Any]:
        """Returns the four arguments that describe the packing."""
        return {
            "cu_seqlens_q": starts(self.query_lengths, self.index_dtype, self.device),
            "cu_seqlens_k": starts(self.key_lengths, self.index_dtype, self.device),
            "max_seqlen_q": self.queries,
            "max_seqlen_k": self.keys,
        }

    def numbers(self) -> dict[str, Any]:
        numbers = super().numbers()
        if self.offsets is not None:
            numbers["query_offset"] = torch.tensor(self.offsets, dtype=self.index_dtype, device=self.device)
        return numbers

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(self.seed)
        given: dict[str, Any] = dict(tensors)
        if self.mask_list and "attn_mask" in tensors:
            given["attn_mask"] = [
                mask_of_sequence(tensors["attn_mask"], index, queries, keys)
                for index, (queries, keys) in enumerate(self.sequences)
            ]
        results = selfattn_ext.varlen_attention(
            **given,
            **self.lengths(),
            **self.numbers(),
            enable_gqa=self.heads != self.kv_heads,
            return_weights=self.weights,
            return_lse=self.lse,
            return_aux=STATISTICS if self.statistics else None,
        )
        return self.named(results)

    def formula(self, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        if self.dropout_p:
            options["dropout_seed"] = dropout_seed(self.seed, self.device)
        result = reference.varlen_attention(**tensors, **self.lengths(), **self.numbers(), **options)
        results = {
            name: part for name, part in result._asdict().items() if name == "out" or getattr(self, name)
        }
        if self.statistics:
            numbers = {name: number for name, number in self.numbers().items() if name != "dropout_p"}
            of_keys = {name: tensor for name, tensor in tensors.items() if name != "value"}
            starts_of = {name: it for name, it in self.lengths().items() if name.startswith("cu")}
            results |= statistics_of(reference.varlen_score_statistics(**of_keys, **starts_of, **numbers))
        return results

    def largest_term(self, tensors: dict[str, Tensor], grad_out: Tensor) -> float:
        of_queries = grad_out.split([*self.query_lengths, self.more])
        of_keys = tensors["value"].split([*self.key_lengths, self.more])
        return max(
            super(VarlenCase, self).largest_term(
                {"value": value.transpose(0, 1).unsqueeze(0)}, grad.transpose(0, 1).unsqueeze(0)
            )
            for grad, value in zip(of_queries, of_keys, strict=True)
        )


def of(sequences: Sequence[tuple[int, int]], **options: Any) -> VarlenCase:
    """Makes a case of sequences, each with its (queries, keys)."""
    return VarlenCase(
        batch=len(sequences),
        queries=max((queries for queries, _ in sequences), default=0),
        keys=max((keys for _, keys in sequences), default=0),
        sequences=tuple(sequences),
        **options,
    )


#: Batches with sequences without queries or keys, single rows, primes, long beside short, or none.
SEQUENCES = (
    ((5, 5), (0, 3), (17, 17), (1, 1), (4, 0), (2, 13)),
    ((1, 1),),
    ((1, 67), (3, 129), (1, 1), (2, 31)),
    ((49, 65), (48, 64), (0, 9), (64, 1)),
    ((17, 11), (1, 53), (0, 0)),
)
OPTIONS = {
    "sequences": list(SEQUENCES),
    "dtype": list(DTYPES),
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (64, 64), (5, 9), (33, 1)],
    "layout": ["contiguous", "transposed", "offset", "columns"],
    "mask": [
        None,
        "bool",
        "bool keys",
        "float",
        "float heads",
        "float rows",
        "float32 keys",
        "bfloat16 square",
    ],
    "mask_list": [False, True],
    "is_causal": [False, True],
    "query_offset": [0, 5, "each"],
    "window": [(-1, -1), (4, -1), (-1, 6), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
    "lse": [False, True],
    "statistics": [False, True],
    "index_dtype": [torch.int32, torch.int64],
    "more": [0, 2],
}


def as_case(index: int, row: dict[str, Any]) -> VarlenCase:
    row = dict(row)
    heads, kv_heads = row.pop("head_counts")
    head_dim, value_dim = row.pop("dims")
    if row["query_offset"] == "each":
        row["query_offset"] = 0
        row["offsets"] = tuple(keys - queries for queries, keys in row["sequences"])
    return of(
        row.pop("sequences"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        seed=index,
        **row,
    )


CASES = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]


class Results(TorchDispatchMode):
    """Notes the tensors that operators return, each with its operator's namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        several = results if isinstance(results, (tuple, list)) else [results]
        self.found += [(func.namespace, one) for one in several if isinstance(one, Tensor)]
        return results


# A small call whose arguments tests change.
ROWS, HEADS, WIDTH = 9, 4, 8
OFFSETS = starts((2, 0, 7), torch.int32)
QUERY, KEY, VALUE = (torch.randn(ROWS, HEADS, WIDTH) for _ in range(3))
MASKS = [torch.ones(2, 2), torch.ones(0, 0), torch.ones(HEADS, 7, 7)]
ARGUMENTS = {
    "query": QUERY,
    "key": KEY,
    "value": VALUE,
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "max_seqlen_q": 7,
    "max_seqlen_k": 7,
}
