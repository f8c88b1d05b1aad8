"""Cases to time on a GPU, and the aims of the project there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.varlen import VarlenCase, draw_lengths

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Aim:
    """An aim: TFLOP/s, or how many times as fast as one of torch's backends or as the best of them."""

    value: float
    of: Literal["TFLOP/s", "best", "cudnn", "flash", "efficient", "math"]

    def __str__(self) -> str:
        return f"{self.value:g} TFLOP/s" if self.of == "TFLOP/s" else f"{self.value:g}x {self.of}"


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    case: Case
    aim: Aim | None = None
    quick: bool = False


SHORT = Aim(1.3, "best")
MASKED = Aim(1.3, "best")
FLOAT32 = Aim(2.0, "efficient")
#: About what FlashAttention-3 and cuDNN reach on an H100 for 8192 queries of 128 dims, and of 64 (NARROW).
#: These aims are meant for that generation of GPUs.
LONG = Aim(650.0, "TFLOP/s")
LONG_CAUSAL = Aim(600.0, "TFLOP/s")
LONG_NARROW = Aim(480.0, "TFLOP/s")
LONG_BACKWARD = Aim(520.0, "TFLOP/s")
#: The aim of causal calls of 512 to 2048 queries, where FlashAttention-3 and cuDNN leave more of a GPU idle.
CAUSAL = Aim(1.2, "cudnn")
FLOAT32_TRAINING = Aim(2.0, "best")
MASK_TRAINING = Aim(2.0, "best")

_TOKENS, _WIDTH = 16384, 2048


def _case(length: int, head_dim: int, dtype: torch.dtype = BF16) -> Case:
    """Returns a case of 16384 tokens in all, with as many heads as make a width of 2048."""
    return Case(_TOKENS // length, _WIDTH // head_dim, length, head_dim, dtype=dtype)


def lines(quick: bool = False) -> list[Line]:
    """Returns all lines, or the few of a short run."""
    forward = [*_short(), *_long(), *_float32(), *_masks(), *_options(), *_decoding(), *_caches()]
    training = [
        *_backward(),
        *_training(),
        *_float32_training(),
        *_mask_training(),
        *_training_options(),
        *_varlen(),
    ]
    return [line for line in (*forward, *training) if line.quick or not quick]


def _short() -> Iterable[Line]:
    for length in (128, 256, 512):
        for head_dim in (64, 128):
            yield Line(_case(length, head_dim), SHORT, quick=length == 512)
    yield Line(replace(_case(512, 128), causal=True), CAUSAL)
    yield Line(Case(4, 8, 64, 64, dtype=BF16), SHORT, quick=True)


def _long() -> Iterable[Line]:
    for length in (2048, 8192):
        for head_dim in (64, 128, 256):
            aims = {(8192, 64): LONG_NARROW, (8192, 128): LONG}
            aims_of_causal = {(2048, 128): CAUSAL, (8192, 128): LONG_CAUSAL}
            given, case = (length, head_dim), _case(length, head_dim)
            quick = given == (8192, 128)
            yield Line(case, aims.get(given), quick=quick)
            yield Line(replace(case, causal=True), aims_of_causal.get(given), quick=quick)
    yield Line(_case(2048, 128, FP16))
    yield Line(_case(2048, 80))
    yield Line(replace(_case(2048, 128), value_dim=64))


def _float32() -> Iterable[Line]:
    for length in (512, 2048, 8192):
        for head_dim in (64, 128):
            yield Line(_case(length, head_dim, FP32), FLOAT32, quick=length == 2048)
    yield Line(replace(_case(2048, 64, FP32), causal=True), FLOAT32)
    for head_dim in (64, 128):
        yield Line(replace(_case(2048, head_dim, FP32), precision="high"), FLOAT32)
    yield Line(Case(4, 8, 512, 64, dtype=FP64))


def _masks() -> Iterable[Line]:
    for dtype in (BF16, FP32):
        yield Line(replace(_case(2048, 64, dtype), mask="bool"), MASKED, quick=dtype == BF16)
        yield Line(replace(_case(2048, 128, dtype), mask="gradient"), MASKED)
    yield Line(replace(_case(512, 64), mask="bool"), MASKED)


def _options() -> Iterable[Line]:
    yield Line(replace(_case(2048, 128), dropout=0.1))
    yield Line(replace(_case(8192, 64), causal=True, window=256))
    yield Line(replace(_case(2048, 128), causal=True, heads=32, kv_heads=8))


def _decoding() -> Iterable[Line]:
    """Yields cases of one query per sequence, with keys and values larger than a GPU's caches."""
    yield Line(Case(8, 16, 1, 128, dtype=BF16, keys=8192), quick=True)
    yield Line(Case(32, 32, 1, 128, dtype=BF16, keys=8192, kv_heads=8))
    yield Line(Case(1, 32, 1, 128, dtype=BF16, keys=131072, kv_heads=8), quick=True)
    yield Line(Case(8, 16, 1, 128, dtype=FP32, keys=8192))


def _backward() -> Iterable[Line]:
    """Yields cases of the backward pass alone, on a graph that is kept."""
    for length in (512, 2048, 8192):
        for head_dim in (64, 128):
            aimed = (length, head_dim) == (8192, 128)
            case = replace(_case(length, head_dim), backward=True, graph_kept=True)
            yield Line(case, LONG_BACKWARD if aimed else None, quick=aimed)
            if length == 8192:
                yield Line(replace(case, causal=True))


def _training() -> Iterable[Line]:
    """Yields cases of forward and backward pass, as in a training step."""
    for length, head_dim in ((128, 64), (512, 128), (2048, 64), (2048, 128), (2048, 256), (8192, 128)):
        yield Line(replace(_case(length, head_dim), backward=True), quick=(length, head_dim) == (2048, 128))
    yield Line(replace(_case(2048, 128), causal=True, backward=True))
    yield Line(replace(_case(2048, 128, FP16), backward=True), quick=True)
    yield Line(replace(_case(2048, 80), backward=True))
    yield Line(Case(4, 8, 64, 64, dtype=BF16, backward=True))


def _float32_training() -> Iterable[Line]:
    for length in (512, 2048, 8192):
        for head_dim in (64, 128):
            case = replace(_case(length, head_dim, FP32), backward=True)
            yield Line(case, FLOAT32_TRAINING, quick=length == 2048)
    yield Line(replace(_case(2048, 64, FP32), causal=True, backward=True), FLOAT32_TRAINING)
    yield Line(replace(_case(2048, 64, FP32), precision="high", backward=True), FLOAT32_TRAINING)
    yield Line(Case(4, 8, 512, 64, dtype=FP64, backward=True))


def _mask_training() -> Iterable[Line]:
    """Yields cases of a learned mask (L, S), whose gradient is summed over the batch and the heads."""
    for dtype in (BF16, FP16, FP32):
        for head_dim in (64, 128):
            case = replace(_case(2048, head_dim, dtype), mask="gradient", backward=True)
            yield Line(case, MASK_TRAINING, quick=(dtype, head_dim) in ((BF16, 128), (FP32, 64)))


def _training_options() -> Iterable[Line]:
    yield Line(replace(_case(2048, 128), mask="bool", backward=True))
    yield Line(replace(_case(2048, 128), dropout=0.1, backward=True))
    yield Line(replace(_case(8192, 64), causal=True, window=256, backward=True))
    yield Line(replace(_case(2048, 128), causal=True, heads=32, kv_heads=8, backward=True))


def _varlen() -> Iterable[Line]:
    """Yields cases of packed sequences of several lengths; torch's backends get them padded."""
    lengths = draw_lengths(64, 16, 1024)
    for head_dim in (64, 128):
        case = VarlenCase.of(lengths, _WIDTH // head_dim, head_dim, dtype=BF16)
        yield Line(case)
        yield Line(replace(case, causal=True), quick=head_dim == 128)
        yield Line(replace(case, causal=True, backward=True), quick=head_dim == 128)
        yield Line(replace(case, dtype=FP32, backward=True))


def _caches() -> Iterable[Line]:
    """Yields cases of a new token for every sequence, with keys in slots or in pages."""
    lengths = draw_lengths(32, 128, 16384)
    for page_size in (0, 16, 64, 256):
        case = CacheCase.of(lengths, 32, 128, dtype=BF16, kv_heads=8, page_size=page_size, layout="blhd")
        yield Line(case, quick=page_size in (0, 64))
    yield Line(CacheCase.of(lengths, 8, 128, dtype=FP32))
