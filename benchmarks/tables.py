"""The cases of the full benchmark, table by table.

Shapes are (batch, heads, length, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from selfattn_ext.bench.cases import Case, standard
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.varlen import VarlenCase, draw_lengths

HEADS = 8
LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def lengths() -> list[Case]:
    """Returns the sequence lengths of the ratio's curve, at the usual head dimensions."""
    return [
        Case(1, HEADS, length, head_dim, dtype=dtype, causal=causal, backward=backward)
        for dtype in (torch.float32, torch.bfloat16)
        for head_dim in (64, 128)
        for length in LENGTHS
        for backward in (False, True)
        for causal in (False, True)
    ]


def dtypes() -> list[Case]:
    """Returns cases of the dtypes that the standard table leaves out."""
    return standard([(1, HEADS, 512, 64), (1, HEADS, 2048, 64)], (torch.float16, torch.float64))


def tiny() -> list[Case]:
    """Returns cases of many short sequences, where the cost of a call and the edges of tiles matter."""
    cases = [Case(16, 16, length, 16) for length in (8, 16, 32)] + [Case(4, 1, 8, 16)]
    return [replace(case, backward=backward) for case in cases for backward in (False, True)]


def decode() -> list[Case]:
    """Returns cases of one query against a long cache, with a kv head for each head or for eight."""
    return [
        Case(1, 32, 1, 128, dtype=dtype, keys=keys, kv_heads=kv_heads)
        for dtype in (torch.float32, torch.bfloat16)
        for keys in (4096, 32768)
        for kv_heads in (None, 4)
    ]


def options() -> list[Case]:
    """Returns cases that torch's fused kernel refuses, or in which it does not skip hidden pairs."""
    plain = Case(1, HEADS, 2048, 64)
    return [
        replace(plain, dropout=0.1, backward=True),
        replace(plain, mask="gradient", backward=True),
        replace(plain, value_dim=32, backward=True),
        replace(plain, kv_heads=2, backward=True),
        replace(plain, mask="bool"),
        replace(plain, mask="bool", backward=True),
        replace(plain, length=8192, window=256, causal=True),
        replace(plain, length=8192, window=256, causal=True, backward=True),
    ]


def varlen() -> list[Case]:
    """Returns cases of packed sequences, some short; torch's nested tensors run only the smaller ones."""
    short, long = draw_lengths(16, 16, 256), draw_lengths(64, 16, 1024)
    return [
        VarlenCase.of(lengths, 4, 64, dtype=dtype, causal=causal, backward=backward)
        for dtype in (torch.float32, torch.bfloat16)
        for lengths in (short, long)
        for backward in (False, True)
        for causal in (False, True)
    ]


def caches() -> list[Case]:
    """Returns cases of a new token per sequence, also with a kv head for four heads, in slots and pages."""
    lengths = draw_lengths(32, 128, 16384)
    return [
        CacheCase.of(lengths, heads, 128, dtype=dtype, kv_heads=None if heads == 2 else 2)
        for dtype in (torch.float32, torch.bfloat16)
        for heads in (2, 8)
    ]


TABLES: dict[str, Callable[[], list[Case]]] = {
    "standard": standard,
    "lengths": lengths,
    "dtypes": dtypes,
    "tiny": tiny,
    "decode": decode,
    "options": options,
    "varlen": varlen,
    "caches": caches,
}
