"""The classes of work that the CPU kernels are judged by, each line with a target and a goal.

A release has to reach the targets; the kernels are built for the goals. The project sets both itself. Most
are ratios of times, torch's scaled_dot_product_attention over ours, some our own call on padded tensors over
ours. Those of decoding are shares of the memory's bandwidth, and those of pages shares of the speed without
pages. They are set for a processor with AMX, unless a line names another instruction set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from selfattn_ext.bench import derivatives, functions, kv_cache, varlen
from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.contenders import TORCH
from selfattn_ext.bench.derivatives import DerivativeCase
from selfattn_ext.bench.functions import FunctionCase
from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.varlen import VarlenCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = 8

#: Limits torch, its matrix library and this package to AVX2. They read it when they start, so a new process
#: is needed.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "SELFATTN_CPU_ISA": "avx2",
}

#: "ratio": the peer's time over ours; "speed": the peer's speed over ours; "of read": our share of the
#: bandwidth of reading.
Judged = Literal["ratio", "speed", "of read"]


@dataclass(frozen=True)
class Line:
    """One case of a class."""

    name: str
    case: Case
    target: float
    goal: float
    judged: Judged = "ratio"
    peer: str = TORCH.name
    environment: tuple[tuple[str, str], ...] = ()
    quick: bool = False


def lines(quick: bool = False, only: str = "") -> list[Line]:
    """Returns all lines, or with ``quick`` the one or two of each class that a short run measures.

    ``only`` keeps those classes whose names contain it.
    """
    every = [
        *_forward(),
        *_float32(),
        *_forced(),
        *_backward(),
        *_few_queries(),
        *_latent(),
        *_small(),
        *_options(),
        *_varlen(),
        *_caches(),
        *_functions(),
        *_derivatives(),
    ]
    return [line for line in every if (line.quick or not quick) and only in line.name]


def memory_cases(quick: bool = False) -> list[Case]:
    """Returns cases whose extra memory has to be O(L + S), where torch needs matrices of weights."""
    cases = [line.case for line in _unfused()]
    return cases[:1] if quick else cases


def _case(length: int, head_dim: int, dtype: torch.dtype = FP32) -> Case:
    return Case(1, HEADS, length, head_dim, dtype=dtype)


def _forward() -> Iterable[Line]:
    name = "bf16 forward"
    yield Line(name, _case(2048, 64, BF16), 2.7, 5.0, quick=True)
    yield Line(name, _case(2048, 128, BF16), 2.0, 3.5, quick=True)
    name = "bf16 forward, causal"
    yield Line(name, replace(_case(2048, 64, BF16), causal=True), 3.0, 6.0, quick=True)
    yield Line(name, replace(_case(2048, 128, BF16), causal=True), 2.1, 4.0)
    name = "bf16 forward, shorter"
    yield Line(name, _case(512, 64, BF16), 2.3, 4.5, quick=True)
    yield Line(name, _case(512, 128, BF16), 1.7, 3.2)
    yield Line(name, _case(128, 64, BF16), 2.0, 4.5, quick=True)
    name = "fp16 forward"
    for length in (512, 2048):
        yield Line(name, _case(length, 64, FP16), 2.8, 6.0, quick=length == 2048)
        yield Line(name, _case(length, 128, FP16), 2.2, 4.5)


def _float32() -> Iterable[Line]:
    for length in (512, 2048):
        long = length == 2048
        yield Line('fp32 "highest" forward', _case(length, 64), 1.7, 2.8, quick=True)
        yield Line('fp32 "highest" forward', _case(length, 128), 1.35, 2.3, quick=long)
        high = replace(_case(length, 64), precision="high")
        yield Line('fp32 "high" forward', high, 2.6, 5.0, quick=long)
        yield Line('fp32 "high" forward', replace(high, head_dim=128), 2.0, 4.0)


def _forced() -> Iterable[Line]:
    environment = tuple(AVX2_ONLY.items())
    for length in (512, 2048):
        long = length == 2048
        name = "fp32 with AVX-512 alone"
        plain = replace(_case(length, 64), isa="avx512")
        yield Line(name, plain, 1.15, 1.35, quick=long)
        yield Line(name, replace(plain, head_dim=128), 1.0, 1.15)
        yield Line(name, replace(plain, causal=True), 1.4, 1.7, quick=long)
        yield Line(name, replace(plain, head_dim=128, causal=True), 1.2, 1.4)
        name = "fp32 with AVX2 alone, torch too"
        for head_dim in (64, 128):
            plain = replace(_case(length, head_dim), isa="avx2")
            quick = long and head_dim == 64
            yield Line(name, plain, 1.0, 1.2, environment=environment, quick=quick)
            yield Line(name, replace(plain, causal=True), 1.25, 1.5, environment=environment, quick=quick)


def _backward() -> Iterable[Line]:
    def alone(length: int, head_dim: int, dtype: torch.dtype) -> Case:
        return replace(_case(length, head_dim, dtype), backward=True, graph_kept=True)

    yield Line("bf16 backward", alone(2048, 64, BF16), 3.0, 6.0, quick=True)
    yield Line("bf16 backward", alone(2048, 128, BF16), 1.9, 4.0)
    yield Line("bf16 backward, shorter", alone(512, 64, BF16), 3.5, 8.0, quick=True)
    yield Line("bf16 backward, shorter", alone(128, 64, BF16), 8.0, 20.0, quick=True)
    for length in (512, 2048):
        long = length == 2048
        yield Line('fp32 "highest" backward', alone(length, 64, FP32), 1.5, 2.5, quick=long)
        yield Line('fp32 "highest" backward', alone(length, 128, FP32), 1.5, 2.5)
        yield Line("fp16 backward", alone(length, 64, FP16), 2.5, 5.0, quick=not long)
        yield Line("fp16 backward", alone(length, 128, FP16), 2.5, 5.0)


def _few_queries() -> Iterable[Line]:
    # At every length there are enough sequences to make keys and values larger than the processor's caches.
    for dtype in (BF16, FP32):
        for keys in (4096, 16384, 32768):
            one = Case(32768 // keys, HEADS, 1, 128, dtype=dtype, keys=keys)
            name = "bf16 decode" if dtype == BF16 else "fp32 decode"
            yield Line(f"{name}, one query", one, 0.85, 0.95, "of read", quick=keys == 4096)
        for keys in (4096, 32768):
            grouped = Case(1, 8 * HEADS, 1, 128, dtype=dtype, keys=keys, kv_heads=HEADS)
            yield Line(f"{name}, 8 queries per kv head", grouped, 3.0, 7.0, quick=keys == 4096)


def _latent() -> Iterable[Line]:
    # Decoding as in DeepSeek-V3: all heads read 512 latent numbers and 64 rotary ones. With 128 heads the
    # multiply-adds of any processor take longer than reading; torch copies the keys for every head.
    for dtype in (BF16, FP32):
        name = "bf16 latent decode" if dtype == BF16 else "fp32 latent decode"
        for queries in (1, 8):
            few = Case(1, 16, queries, 576, dtype, keys=32768, kv_heads=1, value_dim=512, latent=True)
            quick = queries == 1
            yield Line(f"{name}, 16 heads, of reading", few, 0.85, 0.95, "of read", quick=quick)
            yield Line(f"{name}, 16 heads", few, 3.0, 7.0, quick=quick)
            yield Line(f"{name}, 128 heads", replace(few, heads=128, keys=4096), 3.0, 7.0, quick=quick)


def _small() -> Iterable[Line]:
    yield Line("fp32 tiny, B·H = 256", Case(16, 16, 8, 16), 2.0, 8.0, quick=True)
    yield Line("fp32 tiny, B·H = 256", Case(16, 16, 16, 16), 2.0, 8.0, quick=True)
    yield Line("fp32 tiny, B·H = 256", Case(16, 16, 32, 16), 1.8, 4.0, quick=True)
    yield Line("fp32 small", Case(4, 8, 64, 64), 1.3, 2.2, quick=True)
    call = Case(4, 1, 8, 16)
    yield Line("fp32 call overhead", call, 1.3, 2.0, quick=True)
    yield Line("fp32 call overhead", replace(call, backward=True), 1.1, 1.6, quick=True)


def _unfused() -> list[Line]:
    plain = replace(_case(2048, 64), backward=True)
    return [
        Line("fp32 dropout", replace(plain, dropout=0.1), 3.0, 6.0, quick=True),
        Line("fp32 mask with gradient", replace(plain, mask="gradient"), 3.0, 6.0, quick=True),
        Line("fp32 other value dimension", replace(plain, value_dim=32), 3.0, 6.0, quick=True),
    ]


def _options() -> Iterable[Line]:
    yield from _unfused()
    window = replace(_case(8192, 64), window=256, causal=True)
    yield Line("sliding window", window, 8.0, 15.0, quick=True)
    yield Line("sliding window", replace(window, dtype=BF16), 8.0, 15.0)
    blocks = replace(_case(2048, 64), mask="bool")
    yield Line("mask of blocks, half empty", blocks, 1.6, 2.5, quick=True)
    yield Line("mask of blocks, half empty", replace(blocks, dtype=BF16), 1.6, 2.5)


def _varlen() -> Iterable[Line]:
    lengths = varlen.draw_lengths(64, 16, 1024)
    for dtype in (FP32, BF16):
        name = "fp32 varlen" if dtype == FP32 else "bf16 varlen"
        case = VarlenCase.of(lengths, 4, 64, dtype=dtype, backward=True)
        yield Line(name, case, 2.0, 5.0, quick=True)
        yield Line(f"{name}, over padding", case, 1.3, 1.6, peer=varlen.PADDED.name, quick=True)


def _caches() -> Iterable[Line]:
    # Keys and values are larger than any processor's cache, up to 2.4 GB, and three times that in pages. A
    # short run takes fewer sequences.
    lengths = varlen.draw_lengths(32, 128, 16384)
    layouts: tuple[kv_cache.Layout, ...] = ("bhld", "blhd")
    for dtype in (FP32, BF16):
        name = "fp32 KV cache" if dtype == FP32 else "bf16 KV cache"
        case = CacheCase.of(lengths, 2, 128, dtype=dtype)
        narrow = CacheCase.of(lengths, 8, 64, dtype=dtype)
        grouped = CacheCase.of(lengths, 32, 128, kv_heads=8, dtype=dtype)
        fewer = CacheCase.of(lengths[::4], 32, 128, kv_heads=8, dtype=dtype)
        for layout in layouts:
            quick = layout == "bhld"
            yield from _in_pages_too(name, replace(case, layout=layout), quick)
            yield from _in_pages_too(f"{name}, heads of 64", replace(narrow, layout=layout), quick)
            yield from _in_pages_too(f"{name}, 4 queries per kv head", replace(grouped, layout=layout), False)
        yield from _in_pages_too(f"{name}, 4 queries per kv head", fewer, True)


def _in_pages_too(name: str, case: CacheCase, quick: bool) -> Iterable[Line]:
    yield Line(name, case, 0.85, 0.95, "of read", quick=quick)
    for peer in map(kv_cache.pages_name, kv_cache.PAGE_SIZES):
        yield Line(f"{name}, {peer}", case, 0.9, 0.98, "speed", peer, quick=quick)


def _functions() -> Iterable[Line]:
    """Yields functions of scores against three peers, and a mask of documents against the call without it.

    The peers are options that mean the same, torch's compiled flex_attention (forward), and what torch
    computes uncompiled (forward and backward).
    """
    names: tuple[functions.Name, ...] = ("causal", "alibi", "softcap", "documents", "relative bias")
    for dtype in (FP32, BF16):
        kind = "fp32 functions" if dtype == FP32 else "bf16 functions"
        for name in names:
            quick = name in ("causal", "documents")
            for backward in (False, True):
                case = FunctionCase(1, HEADS, 2048, 64, dtype=dtype, function=name, backward=backward)
                peer, target, goal = (functions.COMPILED, 2.0, 4.0)
                if backward:
                    peer, target, goal = (functions.EAGER, 5.0, 10.0)
                yield Line(f"{kind}, over {peer.name}", case, target, goal, peer=peer.name, quick=quick)
                if name == "documents":
                    peer = functions.OPTIONS
                    yield Line(f"{kind}, over no mask", case, 4.0, 6.0, peer=peer.name, quick=quick)
                elif name != "relative bias":
                    # Functions may take at most 1.3 times the time of options.
                    peer = functions.OPTIONS
                    yield Line(f"{kind}, over options", case, 1 / 1.3, 1.0, peer=peer.name, quick=quick)


def _derivatives() -> Iterable[Line]:
    """Yields forward mode and second order, against torch's formula and our own forward and backward.

    They may take at most 2.6 and 3.2 times the time of our own passes, with 3 and 2.4 times as many products.
    """
    orders: tuple[derivatives.Order, ...] = ("jvp", "second order")
    for dtype in (FP32, BF16):
        kind = "fp32 derivatives" if dtype == FP32 else "bf16 derivatives"
        for order in orders:
            most, goal = (2.6, 2.3) if order == "jvp" else (3.2, 2.6)
            for causal in (False, True):
                case = DerivativeCase(1, HEADS, 2048, 64, dtype=dtype, causal=causal, order=order)
                formula, plain = derivatives.FORMULA.name, derivatives.PLAIN.name
                quick = not causal
                yield Line(f"{kind}, over the formula", case, 4.0, 8.0, peer=formula, quick=quick)
                yield Line(f"{kind}, over the plain pass", case, 1 / most, 1 / goal, peer=plain, quick=quick)
