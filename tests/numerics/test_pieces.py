"""Products of bfloat16 pieces, on every instruction set or GPU kernel and in every arithmetic.

tests/cpu/test_amx_emulated.py runs this file again on machines where AMX must be emulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import gpu
import pytest
import torch
from cases import MASKS, Case, check
from comparisons import GRADIENTS, assert_same, attend, exact_and_peer, junk_of, results_of
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import functional

from selfattn_ext import backends
from selfattn_ext.arguments import forced_kernel

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Arithmetic:
    where: str  # an instruction set, or a CUDA kernel
    dtype: torch.dtype
    precision: str = "highest"

    def __str__(self) -> str:
        return f"{self.where}-{self.precision if self.dtype == FLOAT32 else str(self.dtype)[6:]}"


#: Whether this process tests tensor cores, on a GPU or on the PTX machine.
TENSOR_CORES = gpu.DEVICE != "cpu" or forced_kernel.current() == "sm80"
#: The instruction sets or kernels that have pieces, and the one that computes in plain floats.
PLACES = ("sm80",) if TENSOR_CORES else ("amx", "avx512_bf16")
PLAIN = "simt" if TENSOR_CORES else "avx512"

HERE = {"sm80"} if TENSOR_CORES and gpu.DEVICE == "cpu" else set(backends.cpu_isas())
if gpu.DEVICE != "cpu":
    HERE = {kernel.name for kernel in backends.available(gpu.DEVICE)}

#: All take one piece; only some take more, where this is faster.
ARITHMETICS = [
    Arithmetic(where, dtype, precision)
    for where in PLACES
    if where in HERE
    for dtype, precision in (
        (BFLOAT16, "highest"),
        (FLOAT32, "medium"),
        *([(FLOAT16, "highest"), (FLOAT32, "highest"), (FLOAT32, "high")] if where != "avx512_bf16" else []),
    )
]

several_pieces = pytest.mark.skipif(
    PLACES[0] not in HERE, reason="only AMX and tensor cores of a GPU take more than one piece"
)


def forced(where: str) -> AbstractContextManager[None]:
    return backends.use(where) if TENSOR_CORES else backends.use_cpu_isa(where)


@pytest.fixture(params=ARITHMETICS, ids=str)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[Arithmetic]:
    """Forces an arithmetic, and checks that it computes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param.precision)
    with forced(request.param.where):
        if gpu.DEVICE != "cpu" or not TENSOR_CORES:  # explain() does not know kernels for tensors of the CPU
            probe = torch.zeros(1, 1, 16, 16, dtype=request.param.dtype)
            explanation = backends.explain(probe, probe, probe)
            assert request.param.where in (explanation.isa, explanation.kernel)
        yield request.param
    torch.set_float32_matmul_precision(before)


def tensors_of(dtype: torch.dtype, lengths: tuple[int, int], dims: tuple[int, int]) -> dict[str, Tensor]:
    """Draws query, key, value and the gradient of the output, for two heads."""
    (queries, keys), (head_dim, value_dim) = lengths, dims
    shapes = (queries, head_dim), (keys, head_dim), (keys, value_dim), (queries, value_dim)
    names = (*NAMES, "grad")
    return {name: torch.randn(1, 2, *shape).to(dtype) for name, shape in zip(names, shapes, strict=True)}


def everything(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Computes all results, and all gradients of the output."""
    *points, incoming = tensors.values()
    return results_of(attend, points, incoming, return_weights=True, **options)


HIDING: dict[str, tuple[dict[str, Any], list[int]]] = {
    "mask": ({}, [3, 70, 71]),
    "float mask": ({}, [3, 70, 71]),
    "causal": ({"is_causal": True, "query_offset": 50}, [90, 100, 139]),
    "window": ({"window_size": (20, 10), "query_offset": 60}, [3, 39, 110, 139]),
}


@pytest.mark.parametrize("hide", HIDING)
def test_hidden_keys_leave_every_bit(hide: str, arithmetic: Arithmetic) -> None:
    tensors = tensors_of(arithmetic.dtype, (37, 140), (33, 17))
    options, hidden = HIDING[hide]
    if "mask" in hide:
        seen = torch.rand(37, 140) < 0.7
        seen[:, hidden] = False
        float_mask = torch.zeros(37, 140, dtype=arithmetic.dtype).masked_fill(~seen, -torch.inf)
        options = {"attn_mask": float_mask if hide == "float mask" else seen}
    clean = everything(tensors, **options)
    for junk in junk_of(arithmetic.dtype):
        dirty = {name: tensor.clone() for name, tensor in tensors.items()}
        dirty["key"][:, :, hidden] = dirty["value"][:, :, hidden[:2]] = junk
        assert_same(everything(dirty, **options), clean, f"with {junk}")


def test_padded_queries_leave_every_bit(arithmetic: Arithmetic) -> None:
    """Junk in queries that see nothing, or in a neighbouring query, changes no bit."""
    tensors = tensors_of(arithmetic.dtype, (50, 100), (32, 48))
    seen, padding = torch.ones(50, 100, dtype=torch.bool), [4, 20]
    seen[padding] = False
    clean = everything(tensors, attn_mask=seen)
    for junk in junk_of(arithmetic.dtype):
        dirty = {name: tensor.clone() for name, tensor in tensors.items()}
        dirty["query"][:, :, padding] = dirty["grad"][:, :, padding] = junk
        assert_same(everything(dirty, attn_mask=seen), clean, f"with {junk} in padding")
        dirty["query"][:, :, 7, 3] = dirty["grad"][:, :, 7, 9] = junk
        others = [row for row in range(50) if row != 7]
        results = everything(dirty, attn_mask=seen)
        for name in ("out", "weights", "lse", "grad of query"):
            assert_same(results[name][:, :, others], clean[name][:, :, others], f"{name} beside {junk}")


def test_batch_does_not_matter(arithmetic: Arithmetic) -> None:
    """Junk in other batch elements changes no bit."""
    for queries, keys, head_dim in ((5, 17, 16), (49, 65, 40), (97, 129, 64)):
        tensors = tensors_of(arithmetic.dtype, (queries, keys), (head_dim, 33))
        alone = everything(tensors, is_causal=True, query_offset=3)
        batch = {name: torch.randn(3, *tensor.shape[1:]).to(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            batch[name][1:2] = tensor
            for junk, entry in itertools.product(junk_of(arithmetic.dtype), (0, 2)):
                batch[name][entry].view(-1)[torch.randint(tensor.numel(), (2,))] = junk
        together = everything(batch, is_causal=True, query_offset=3)
        assert_same({name: result[1:2] for name, result in together.items()}, alone)


@pytest.mark.parametrize("where", [*NAMES, "grad"])
def test_visible_numbers_without_pieces(where: str, arithmetic: Arithmetic) -> None:
    """The results are infinite or NaN exactly where those of plain float arithmetic are."""
    mask = torch.rand(33, 100) < 0.6
    for junk in (torch.nan, torch.inf, -torch.inf):
        tensors = tensors_of(arithmetic.dtype, (33, 100), (48, 16))
        tensors[where][0, 1, 5, 7] = junk
        results = everything(tensors, attn_mask=mask)
        with forced(PLAIN):
            expected = everything(tensors, attn_mask=mask)
        for name, result in results.items():
            assert torch.equal(result.isfinite(), expected[name].isfinite()), f"{name} with {junk}"


def errors(
    tensors: dict[str, Tensor], exact: dict[str, Tensor], scale: float | None = None
) -> dict[str, float]:
    results = everything(tensors, scale=scale)
    return {name: distance(results[name].detach(), exact[name]) for name in exact}


def distance(result: Tensor, exact: Tensor) -> float:
    """Returns the largest difference relative to the largest exact number, however small that is."""
    return float((result.double() - exact).abs().max() / exact.abs().max())


def judges(tensors: dict[str, Tensor], scale: float | None = None) -> tuple[dict[str, Tensor], ...]:
    *points, incoming = tensors.values()
    return exact_and_peer(points, {"scale": scale}, incoming)


#: Factors that multiply query, key, value and the output's gradient.
FACTORS = [
    (1, 1, 1, 1),
    (10, 1, 1, 1),
    (100, 1, 1, 1),
    (1, 1, 1, 1e-36),
    (1, 1, 1, 1e-40),
    (1, 1, 1e-36, 1),
    (1, 1, 1e-40, 1),
    (1, 1, 1e-20, 1e-15),
    (1e-36, 1e-36, 1, 1),
    (1e-40, 1, 1, 1),
    (1e-24, 1e24, 1, 1),
    (1, 1, 1e30, 1e-20),
    (1, 1, 1e17, 1e17),
]


#: These are fewer, as one piece flushes subnormal products to 0 and has few bits for large scores, and
#: float16 ends at 65504.
FACTORS_OF_SHORT = [(1, 1, 1, 1), (8, 1, 1, 1), (1, 1, 1, 2**-10), (1, 1, 2**-10, 1), (1, 1, 100, 1)]

MAGNITUDES = [
    (arithmetic, factors)
    for arithmetic in ARITHMETICS
    for factors in (
        FACTORS if arithmetic.dtype == FLOAT32 and arithmetic.precision != "medium" else FACTORS_OF_SHORT
    )
]


@pytest.mark.parametrize(("arithmetic", "factors"), MAGNITUDES, indirect=["arithmetic"], ids=str)
def test_magnitudes(factors: tuple[float, ...], arithmetic: Arithmetic) -> None:
    """Results of any size are as accurate as those of float, or as the number of pieces allows."""
    tensors = tensors_of(FLOAT32, (40, 100), (64, 64))
    for (name, tensor), factor in zip(tensors.items(), factors, strict=True):
        tensors[name] = (tensor * factor).to(arithmetic.dtype)
    exact, peer = judges(tensors)
    # Each piece leaves out 2^-8 of every score, and weights multiply that by the scores themselves.
    score = max(1.0, float(factors[0] * factors[1]))
    floor = {"highest": 1e-6, "high": 2.0**-15 * score, "medium": 2.0**-7 * score}[arithmetic.precision]
    if arithmetic.dtype != FLOAT32:
        floor = 2.0 ** (-8 if arithmetic.dtype == BFLOAT16 else -11)
    for name, error in errors(tensors, exact).items():
        allowed = 2 * distance(peer[name], exact[name]) + floor
        assert error <= allowed, f"{name}: {error:.2g}, allowed {allowed:.2g}"


@several_pieces
def test_more_pieces_are_more_accurate() -> None:
    tensors = tensors_of(FLOAT32, (100, 150), (64, 64))
    exact = judges(tensors)[0]
    before, seen = torch.get_float32_matmul_precision(), []
    with forced(PLACES[0]):
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            seen.append(errors(tensors, exact))
    torch.set_float32_matmul_precision(before)
    for name in exact:
        highest, high, medium = (error[name] for error in seen)
        assert highest * 3 < high < medium / 50, name


@pytest.mark.cpu_only("tensor cores multiply float16 as torch does")
@pytest.mark.skipif("amx" not in backends.cpu_isas(), reason="only AMX takes float16 apart")
def test_float16_is_better_than_that_of_torch() -> None:
    tensors = {name: tensor * 4 for name, tensor in tensors_of(FLOAT16, (200, 300), (64, 64)).items()}
    exact = judges(tensors)[0]
    *points, incoming = tensors.values()
    theirs = results_of(functional.scaled_dot_product_attention, points, incoming)
    with backends.use_cpu_isa("amx"):
        ours = errors(tensors, exact)
    for name, result in theirs.items():
        assert ours[name] <= distance(result, exact[name]), name


#: An arithmetic for each number of pieces.
FINEST = [arithmetic for arithmetic in ARITHMETICS if arithmetic.precision == "highest"]


@pytest.mark.parametrize("arithmetic", FINEST, indirect=True, ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.7, 2.0**-40, 0.0, -0.3], ids=str)
def test_scales(scale: float, arithmetic: Arithmetic) -> None:
    """A power of two scales the pieces, another scale the scores; other kernels take scales up to 0."""
    tensors = tensors_of(arithmetic.dtype, (33, 65), (40, 24))
    exact, peer = judges(tensors, scale)
    floor = {BFLOAT16: 2.0**-7, FLOAT16: 2.0**-10, FLOAT32: 1e-6 * max(scale, 1.0)}[arithmetic.dtype]
    for name, error in errors(tensors, exact, scale).items():
        if scale == 0.0 and name in GRADIENTS[:2]:
            continue
        assert error <= 2 * distance(peer[name], exact[name]) + floor, name


EDGES = [
    (queries, keys, dim)
    for (queries, keys), dim in zip(
        itertools.product((5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65), (1, 63, 64, 65, 257, 513)),
        itertools.cycle((16, 17, 31, 32, 33, 64, 72, 96, 128, 200, 256)),
        strict=False,
    )
]


@pytest.mark.parametrize("arithmetic", FINEST, indirect=True, ids=str)
def test_edges(arithmetic: Arithmetic) -> None:
    """Sizes are around those of strips, blocks, steps and chunks, with various values and options."""
    masks, layouts = itertools.cycle([None, *MASKS]), itertools.cycle(["contiguous", "transposed", "offset"])
    for index, (queries, keys, dim) in enumerate(EDGES):
        case = Case(batch=1, heads=2, kv_heads=1 + index % 2, queries=queries, keys=keys, head_dim=dim)
        value_dim = (dim, 1, 0, 17, 48)[index % 5]
        check(
            replace(
                case,
                value_dim=value_dim,
                dtype=arithmetic.dtype,
                layout=next(layouts),
                mask=next(masks),
                is_causal=index % 3 == 0,
                query_offset=max(keys - queries, 0),
                dropout_p=0.3 * (index % 4 == 1),
                sinks=index % 7 == 2,
                seed=index,
            )
        )


@pytest.mark.parametrize("attended", [2, 8])
@pytest.mark.parametrize("common", [10.0, 120.0])
def test_few_keys_unlike_all_others_draw_the_attention(common: float, attended: int, kernel: str) -> None:
    """The common part of the other keys must not reach the gradient of queries that ignore these keys."""
    query, key, value, cotangent = (torch.randn(1, 2, 128, 64) for _ in range(4))
    query -= 0.5
    key[:, :, attended:] += common
    points, incoming = [tensor.to(BFLOAT16) for tensor in (query, key, value)], cotangent.to(BFLOAT16)
    found, (exact, _) = results_of(attend, points, incoming), exact_and_peer(points, {}, incoming)
    peer = results_of(functional.scaled_dot_product_attention, points, incoming)
    for name in GRADIENTS:
        assert_accurate(name, found[name], exact[name], peer[name])


def test_layouts_give_the_same_bits(arithmetic: Arithmetic) -> None:
    """Rows that are used in place give the same bits as those with odd strides or addresses, or stride 0."""
    tensors = tensors_of(arithmetic.dtype, (48, 64), (32, 32))
    # Tensor cores have a separate kernel for 16-bit rows that can be copied 16 bytes at a time.
    expected = {True: everything(tensors)}
    for padding, offset in ((0, 1), (2, 1), (1, 0), (1, 1), (2, 0), (32, 3), (8, 16)):
        moved = {}
        for name, tensor in tensors.items():
            shape, row = tensor.shape, tensor.shape[-1] + padding
            memory = torch.full((shape[:-1].numel() * row + offset,), torch.nan, dtype=tensor.dtype)
            moved[name] = memory.as_strided(
                shape, (shape[1] * shape[2] * row, shape[2] * row, row, 1), offset
            )
            moved[name].copy_(tensor)
        whole = not TENSOR_CORES or arithmetic.dtype == FLOAT32 or (padding % 8 == 0 and offset % 8 == 0)
        results = everything(moved)
        assert_same(results, expected.setdefault(whole, results), f"{padding} more, at {offset}")
    rows = {name: tensor[:, :, :1].expand_as(tensor) for name, tensor in tensors.items()}
    dense = everything({name: tensor.contiguous() for name, tensor in rows.items()})
    assert_same(everything(rows), dense, "expanded")
