"""The automatic choice between the kernel with AMX and others, which only shapes decide.

It depends on the shape of a batch element alone, and is the same for forward and backward.
tests/cpu/test_amx_emulated.py runs this file again on machines where AMX must be emulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_sequences import check_alone
from torch import Tensor
from varlen_cases import of

from selfattn_ext import backends, scaled_dot_product_attention

pytestmark = pytest.mark.skipif("amx" not in backends.cpu_isas(), reason="this machine lacks AMX")

#: The most queries with a head dim of 64 that are decoded, which the kernel for AMX does for every dtype.
FEW = 8
#: dtype, precision, and the most queries for which plain arithmetic is faster.
LIMITS = [
    (torch.float32, "highest", 128),
    (torch.float32, "high", 16),
    (torch.float32, "medium", FEW),
    (torch.float16, "highest", 16),
    (torch.bfloat16, "highest", FEW),
]

#: Lengths around every limit.
LENGTHS = tuple((queries, 3 + 5 * queries % 300) for queries in (33, 1, 128, 4, 5, 16, 200, 17, 64, 65, 129))


@pytest.fixture(params=LIMITS, ids=lambda limit: f"{str(limit[0])[6:]}-{limit[1]}")
def limit(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, int]]:
    """Gives every limit, in a process that leaves the choice to the library."""
    dtype, precision, most = request.param
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    with backends.use_cpu_isa(""):
        yield dtype, most
    torch.set_float32_matmul_precision(before)


def everything(dtype: torch.dtype, queries: int, isa: str) -> list[Tensor]:
    """Computes results and gradients with an instruction set forced, or with "" none."""
    generator = torch.Generator().manual_seed(5)
    shapes = (1, 2, queries, 64), (1, 2, 70, 64), (1, 2, 70, 64)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    with backends.use_cpu_isa(isa):
        results = scaled_dot_product_attention(*tensors, return_weights=True, return_lse=True)
        return [*results, *torch.autograd.grad(results[0].sin().sum() + results[1].cos().sum(), tensors)]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_who_computes(limit: tuple[torch.dtype, int]) -> None:
    """The kernel that explain() names computes, to the bit; a forced AMX computes all that it can."""
    dtype, most = limit
    for queries in (FEW, most, most + 1):
        expected = "amx" if queries == FEW or queries > most else "avx512"
        query, key = torch.zeros(1, 2, queries, 64, dtype=dtype), torch.zeros(1, 2, 70, 64, dtype=dtype)
        assert backends.explain(query, key, key).isa == expected
        with backends.use_cpu_isa("amx"):
            assert backends.explain(query, key, key).isa == "amx"
        found = everything(dtype, queries, "")
        assert equal(found, everything(dtype, queries, expected)), queries
        if queries > FEW:
            other = {"amx": "avx512", "avx512": "amx"}[expected]
            assert not equal(found, everything(dtype, queries, other)), queries


@pytest.mark.parametrize("isa", ["", "amx"], ids=["automatic", "forced"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "float", "head_dim": 40, "value_dim": 24, "softcap": 1.5},
        {"mask": "float heads", "is_causal": True, "sinks": 1},
    ],
    ids=["plain", "mask", "shared-mask"],
)
def test_sequences_of_all_lengths(
    options: dict[str, object], isa: str, limit: tuple[torch.dtype, int], one_thread: None
) -> None:
    """A sequence has the same bits alone and packed, forward and backward, if three kernels share a batch."""
    case = of(LENGTHS, **{"dtype": limit[0], "kv_heads": 1, "head_dim": 32, "value_dim": 32, **options})
    with backends.use_cpu_isa(isa):
        check_alone(case)


def test_sequences_that_other_arithmetic_takes(one_thread: None) -> None:
    """None of these is multiplied in pieces, but those with few queries are still decoded."""
    narrow = {"head_dim": 8, "value_dim": 8}
    for options in ({"dtype": torch.float64}, narrow, {"alibi": 2, "dtype": torch.bfloat16}):
        with backends.use_cpu_isa(""):
            check_alone(of(LENGTHS, kv_heads=1, **options))
