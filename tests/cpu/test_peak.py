"""The peaks that benchmarks compare with: plausible numbers, and errors for unknown names."""

from __future__ import annotations

import pytest
import torch

from selfattn_ext import backends
from selfattn_ext.bench.peak import Ceiling, Meter
from selfattn_ext.build import library

SECONDS = 0.02


@pytest.mark.parametrize("isa", backends.cpu_isas())
def test_multiply_adds_are_counted(isa: str, one_thread: None) -> None:
    # Every processor of the last twenty years is between the two, unless the compiler removed the loop.
    assert 0.5 < library.extension().multiply_add_gflops(isa, SECONDS) < 20_000


def test_reading_is_counted(one_thread: None) -> None:
    for size in (4, 4096 + 12, 2**22):
        assert 1e-4 < library.extension().read_gbs(size, SECONDS) < 20_000


def test_reading_in_pieces_is_counted(one_thread: None) -> None:
    memory = library.extension().MemoryReader(2**24 + 512)
    for size in (512, 4096, 2**20, 2**24 + 512):
        # The times would differ more if pieces were left out or read several times.
        assert 0.02 < memory.seconds(size) / min(memory.seconds() for _ in range(5)) < 50


@pytest.mark.parametrize("size", [-512, 4, 511, 768, 8192])
def test_pieces_of_no_such_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a multiple of 512 bytes, at most 4096, but they have {size}"):
        library.extension().MemoryReader(4096).seconds(size)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"abacus" is not known; there is .*scalar'):
        library.extension().multiply_add_gflops("abacus", SECONDS)
    with pytest.raises(ValueError, match="at least 4"):
        library.extension().read_gbs(3, SECONDS)


class FakeMeter(Meter):
    def gflops(self, isa: str) -> float:
        return {"avx512": 200.0, "avx512_bf16": 400.0, "amx": 3000.0}[isa]

    def read_gbs(self) -> float:
        return 20.0


@pytest.mark.parametrize(
    ("isa", "dtype", "precision", "expected"),
    [
        ("avx512", torch.bfloat16, "highest", ("avx512", 200)),
        ("avx512", torch.float64, "highest", ("avx512", 100)),
        ("avx512_bf16", torch.bfloat16, "highest", ("avx512_bf16", 400)),
        ("avx512_bf16", torch.float16, "highest", ("avx512", 200)),
        ("amx", torch.float16, "highest", ("amx", 3000 / 3.5)),
        ("amx", torch.float32, "highest", ("amx", 500)),
        ("amx", torch.float32, "high", ("amx", 1000)),
        ("amx", torch.float32, "medium", ("amx", 3000)),
        ("amx", torch.float64, "highest", ("avx512", 100)),
    ],
)
def test_the_ceiling_is_that_of_the_fastest_arithmetic(
    isa: str, dtype: torch.dtype, precision: str, expected: tuple[str, float]
) -> None:
    found = FakeMeter(SECONDS).ceiling(isa, dtype, precision)  # type: ignore[arg-type]
    assert (found.isa, found.gflops) == expected


def test_the_longer_of_computing_and_reading_is_the_limit() -> None:
    ceiling = Ceiling("avx2", gflops=100.0, read_gbs=10.0)
    assert ceiling.seconds(1e9, 1e7) == pytest.approx(0.01)
    assert ceiling.bound(1e9, 1e7) == "avx2"
    assert ceiling.seconds(1e9, 1e9) == pytest.approx(0.1)
    assert ceiling.bound(1e9, 1e9) == "read"


def test_a_peak_is_measured_once_for_each_number_of_threads(one_thread: None) -> None:
    meter = Meter(SECONDS)
    assert meter.gflops("scalar") == meter.gflops("scalar")
    torch.set_num_threads(2)
    meter.gflops("scalar")
    assert [(row["threads"], row["isa"]) for row in meter.measured()] == [(1, "scalar"), (2, "scalar")]
