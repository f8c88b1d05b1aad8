"""Batches whose elements have lengths and places of their own, on one kernel in the emulator: packed
sequences, caches, pages.

    PYTHONPATH=tests SELFATTN_KERNEL=simt python -m emulator.sequence_cases [EVERY [FIRST [MOST]]]

prints a digest of the results and gradients of each: see run_cases.py. The operators' results are judged by
the formula of each sequence, and must be the bits of a call for that sequence alone. What lies outside of the
sequences is NaN, and page numbers that nobody needs exist nowhere.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import DTYPES, Case, Judge, cotangents_of, dropout_seed, laid_out
from test_options_pairwise import covering
from torch import Tensor

from selfattn_ext import ops, reference

from . import run_cases

#: Rows behind the last sequence of a packed tensor, and behind the longest in a cache.
SPARE = 3

#: Queries and keys of each sequence: none, one, around the edges of tiles and of the kernels for few queries.
LENGTHS = (
    ((5, 5), (0, 3), (70, 70), (1, 130)),
    ((64, 64), (65, 1), (0, 0), (3, 0), (17, 63)),
    ((16, 200), (17, 200)),
    ((1, 1), (1, 65), (1, 128)),
    ((130, 7), (129, 140)),
    # The keys of few queries are cut into splits, three, two and one; those of many are not.
    ((1, 600), (16, 257), (40, 300), (2, 30)),
)

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "lengths": list(LENGTHS),
    # What is packed, or what keys lie in: queries and keys; a cache; pages; those under packed queries.
    "form": ["packed", "cache", "pages", "packed cache", "packed pages"],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (64, 64), (80, 16), (33, 65), (128, 128)],
    "page_size": [1, 16, 7, 128],
    "layout": ["contiguous", "transposed", "offset"],
    "mask": [None, "bool", "float", "bool keys", "float heads", "float rows", "float keys"],
    "is_causal": [False, True],
    "offsets": ["one", "end", "each"],
    "query_offset": [0, 5],
    "window": [(-1, -1), (70, -1), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [0, 1, 2],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
}

#: What operators are given, or have returned, by name.
Named = dict[str, Tensor]


@dataclass(frozen=True)
class SequenceCase(Case):
    """``batch``, ``queries`` and ``keys`` of the case follow from the other fields: see `made`."""

    lengths: tuple[tuple[int, int], ...] = ()
    form: str = "packed"
    offsets: str = "one"  # query_offset; from the end of the keys; another for each
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
        """The case with the numbers that follow: those of the longest sequence, or of what holds the keys."""
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
        """Where the queries (0) or keys (1) of each sequence begin in packed tensors; the end."""
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
        """The keys or values of a sequence, wherever they lie."""
        tensor = tensors[name]
        if not self.in_pages:
            return self.rows(tensor, b, 1, self.packs_keys)
        count = -(-self.lengths[b][1] // self.page_size)
        pages = tensor[tensors["block_table"][b, :count].long()].transpose(0, 1)
        return pages.flatten(1, 2)[None, :, : self.lengths[b][1]]

    def joined(self, parts: list[Tensor], rest: float) -> Tensor:
        """What belongs to the queries of each sequence, as the operators lay it out."""
        if not self.packs_queries:
            return torch.cat(parts)
        shape = list(parts[0].shape)
        shape[2] = SPARE
        return torch.cat([*parts, parts[0].new_full(shape, rest)], 2)

    def padded(self, b: int, tensor: Tensor, rest: float) -> Tensor:
        """What belongs to the pairs of a sequence, (1, heads, queries, keys) of the case."""
        queries, keys = self.lengths[b]
        pad = (0, self.keys - keys, 0, self.queries - queries)
        return torch.nn.functional.pad(tensor, pad, value=rest)

    def inputs(self) -> Named:
        """In the form of the case, with zeros outside of the sequences."""
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
        """Pages in any order, and a table whose other numbers are those of no page."""
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
        """The same with NaN outside of the sequences, wherever something belongs to rows or pairs."""
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
            parts = [self._pairs(tensors["grad_weights"], b) for b in everything]
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

    def _pairs(self, tensor: Tensor, b: int) -> Tensor:
        """What belongs to the pairs of a sequence; what is the same for all stays so."""
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
            one["attn_mask"] = self._pairs(mask, b)
        if "grad_weights" in tensors:
            one["grad_weights"] = self._pairs(tensors["grad_weights"], b)
        for name in tensors.keys() & {"alibi_slopes", "sinks"}:
            one[name] = tensors[name][b : b + 1] if tensors[name].shape[0] > 1 else tensors[name]
        return one

    def numbers_of(self, b: int) -> dict[str, Any]:
        return {**self.numbers(), "query_offset": self.offset(b)}

    def formula(self, tensors: Named, **options: Any) -> Named:
        """The reference of each sequence. Dropout counts elements of the batch, so that there are as many."""
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


def cases() -> list[SequenceCase]:
    """Every pair of values of two options in some case."""
    chosen = []
    for index, row in enumerate(covering(OPTIONS)):
        heads, kv_heads = row.pop("head_counts")
        head_dim, value_dim = row.pop("dims")
        case = SequenceCase(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, seed=index, **row
        )
        chosen.append(case.made())
    return [*chosen, *_plain_cases()]


def _plain_cases() -> list[SequenceCase]:
    """No options, which kernels for tensor cores have a path of their own for: every width of theirs."""
    widths = (64, 128, 256)
    return [
        SequenceCase(
            heads=2,
            kv_heads=1,
            head_dim=width,
            value_dim=width,
            dtype=dtype,
            lengths=LENGTHS[turn % len(LENGTHS)],
            is_causal=turn % 2 == 0,
            offsets=("end", "one", "each")[turn % 3],
        ).made()
        for turn, (width, dtype) in enumerate(itertools.product(widths, DTYPES[1:]))
    ]


def _call(name: str, **arguments: Any) -> Any:
    """An operator on the kernel of the process, which would be chosen above the operators."""
    results = getattr(ops, name)(**arguments, kernel_name=os.environ.get("SELFATTN_KERNEL", ""))
    return (results,) if isinstance(results, Tensor) else results


def operators(given: Named, case: Case, numbers: dict[str, Any], call: Callable[..., Any] = _call) -> Named:
    """Forward, weights and, unless keys lie in pages, gradients, as the operators return them."""
    numbers = dict(numbers)
    window = numbers.pop("window_size", (-1, -1))
    options: dict[str, Any] = {**numbers, "window_left": window[0], "window_right": window[1]}
    options["scale"] = reference.default_scale(case.head_dim)
    if case.dropout_p:
        options["dropout_seed"] = dropout_seed(case.seed)
    gradients = {name: given[name] for name in ("grad_out", "grad_row", "grad_weights") if name in given}
    given = {name: tensor for name, tensor in given.items() if name not in gradients}
    rounds = case.dtype in ops.SIXTEEN_BITS
    out, row_max, row_sum, residual = call("attention_forward", **given, **options, need_residual=rounds)
    statistics = {"row_max": row_max, "row_sum": row_sum}
    value = given.pop("value")
    (weights,) = call("attention_weights", **given, **options, **statistics)
    results = {"out": out, **statistics, "weights": weights}
    if not gradients:  # keys in pages have none
        return results
    mask = given.get("attn_mask")
    grads = call(
        "attention_backward",
        **gradients,
        **given,
        value=value,
        **options,
        **statistics,
        out=out,
        out_residual=residual if rounds else None,
        need_mask_grad=mask is not None and mask.is_floating_point(),
    )
    inputs = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
    named = zip(inputs, grads, strict=True)
    return results | {f"grad of {name}": grad for name, grad in named if grad.numel()}


def given_by(case: SequenceCase, tensors: Named) -> tuple[Named, Judge]:
    """What the operators are given, NaN outside of the sequences, and the judge of what they return."""
    asked = replace(case, weights=True, lse=True)
    if case.in_pages:
        return case.filled(tensors), Judge(asked, tensors)
    zeros = {name: it.detach() for name, it in asked.formula(tensors).items()}
    cotangents = cotangents_of(zeros, case.seed)
    if not case.weights:
        cotangents = {name: it if name == "out" else torch.zeros_like(it) for name, it in cotangents.items()}
    judge = Judge(asked, tensors, cotangents)
    given = {**tensors, "grad_out": cotangents["out"]}
    if case.weights:
        # Note [Gradient of weights and lse] in selfattn_ext/autograd.py.
        of_weights = (judge.exact["weights"].detach() * cotangents["weights"].double()).sum(-1)
        parts = [of_weights[b : b + 1, :, : case.lengths[b][0]] for b in range(case.batch)]
        rows = case.joined(parts, 0.0) - cotangents["lse"].double()
        given["grad_row"] = rows.to(reference.accumulation_dtype(case.dtype))
        given["grad_weights"] = cotangents["weights"]
    return case.filled(given), judge


def numbers_of_call(case: SequenceCase) -> dict[str, Any]:
    """The numbers of the call for the whole batch."""
    longest: dict[str, Any] = {}
    if case.packs_queries:
        longest["max_seqlen_q"] = case.queries
    if case.packs_keys:
        longest["max_seqlen_k"] = case.keys
    return {**case.numbers(), **longest}


def assert_accurate(judge: Judge, results: Named) -> None:
    """Asserts that what the operators have returned is accurate."""
    judged = dict(results)
    judged["lse"] = judged.pop("row_max") + judged.pop("row_sum").log()
    judge.assert_accurate(judged)


def assert_alone(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts that each sequence gets the bits that it gets alone."""
    for b in range(case.batch if not case.dropout_p else 1):  # dropout would count it as the first
        queries, keys = case.lengths[b]
        alone = operators(case.of_sequence(given, b), case, case.numbers_of(b))
        parts = {name: case.query_rows(results[name], b) for name in ("out", "row_max", "row_sum")}
        parts["weights"] = results["weights"][b : b + 1, :, :queries, :keys]
        if "grad of query" in results:
            parts["grad of query"] = case.query_rows(results["grad of query"], b)
            for name in ("grad of key", "grad of value"):
                parts[name] = case.key_rows(results, name, b)
        for name, part in parts.items():
            found, expected = (run_cases.bytes_of(it) for it in (part, alone.get(name, part)))
            assert found == expected, f"{name} of sequence {b} is not what it is alone"


def assert_undisturbed(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts that NaN in one packed sequence changes no bit of the others."""
    spoilt = max(range(case.batch), key=lambda b: case.lengths[b])
    given = {name: tensor.clone() for name, tensor in given.items()}
    for name in given.keys() & {"query", "grad_out", "grad_row"}:
        case.query_rows(given[name], spoilt).fill_(torch.nan)
    for name in ("key", "value"):
        case.key_rows(given, name, spoilt).fill_(torch.nan)
    again = operators(given, case, numbers_of_call(case))
    for b in set(range(case.batch)) - {spoilt}:
        for name in ("out", "grad of query", "grad of key", "grad of value"):
            side = int(name.endswith(("key", "value")))
            parts = (case.rows(of[name], b, side, True) for of in (results, again))
            found, expected = map(run_cases.bytes_of, parts)
            assert found == expected, f"{name} of sequence {b}, with NaN in another"


def assert_longest_does_not_matter(case: SequenceCase, given: Named, results: Named) -> None:
    """Asserts the same bits where the longest sequence is said to be longer than it is."""
    more = replace(case, queries=case.queries + 70, keys=case.keys + 70)
    given = dict(given)
    for name in given.keys() & {"attn_mask", "grad_weights"}:
        grows = [70 if size > 1 or name == "grad_weights" else 0 for size in given[name].shape[2:]]
        given[name] = torch.nn.functional.pad(given[name], (0, grows[1], 0, grows[0]), value=1.0)
    again = operators(given, more, numbers_of_call(more))
    for name, result in results.items():
        other = again[name]
        if name == "grad of attn_mask" and result.shape[0] < case.batch:
            continue  # what falls on it is added up in an order that follows from the longest
        if result.shape != other.shape:
            other = other[:, :, : result.shape[2], : result.shape[3]]
        assert run_cases.bytes_of(result) == run_cases.bytes_of(other), f"{name}, with a longer longest"


@torch.no_grad()
def check(case: SequenceCase) -> Named:
    """Asserts that results and gradients are accurate and those of each sequence alone. Returns them."""
    with torch.enable_grad():
        given, judge = given_by(case, case.inputs())
    results = operators(given, case, numbers_of_call(case))
    assert_accurate(judge, results)
    assert_alone(case, given, results)
    if case.form == "packed" and case.batch > 1:
        assert_undisturbed(case, given, results)
        assert_longest_does_not_matter(case, given, results)
    return results


if __name__ == "__main__":
    run_cases.main(cases(), check)
