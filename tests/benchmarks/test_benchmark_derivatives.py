"""Benchmarks of forward mode and second derivatives: all contenders agree, and each is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from selfattn_ext.bench import memory
from selfattn_ext.bench.cases import inputs
from selfattn_ext.bench.contenders import OURS
from selfattn_ext.bench.derivatives import CONTENDERS, FORMULA, OPERATOR, PLAIN, DerivativeCase, Order
from selfattn_ext.bench.measure import Session
from selfattn_ext.bench.timer import Effort

pytestmark = pytest.mark.usefixtures("nothing_is_collected")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.mark.parametrize("order", ["jvp", "second order"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_contenders_compute_the_same(order: Order, causal: bool, dtype: torch.dtype) -> None:
    """Both return the tangent of out, which is the gradient of a backward pass with respect to grad_out."""
    case = DerivativeCase(1, 2, 40, 8, dtype=dtype, causal=causal, order=order)
    tensors = inputs(case)
    found = {each.name: each.prepare(case, tensors)() for each in CONTENDERS if each is not PLAIN}
    expected = found[FORMULA.name]
    tolerance = 1e-10 if dtype == torch.float64 else 3e-2
    for name in (OURS.name, OPERATOR.name):
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)


def test_rows_have_a_time_of_each_contender(one_thread: None) -> None:
    session = Session([], Effort(seconds=0.0, min_rounds=1))
    orders: tuple[Order, ...] = ("jvp", "second order")
    for order in orders:
        row = session.row(DerivativeCase(1, 2, 40, 8, order=order), 1)
        assert [name for name, outcome in row.outcomes.items() if outcome.timing is None] == []
        assert row.case.flops() == {"jvp": 3, "second order": 6}[order] * 4 * 8 * 40 * 40 * 2
        assert row.ratio(FORMULA.name) is not None
        assert row.ratio(PLAIN.name) is not None


def test_every_line_says_what_it_compares(benchmarks: None) -> None:
    import classes

    lines = classes.lines(only="derivatives")
    assert len(lines) == 16
    for line in lines:
        assert line.peer in {each.name for each in CONTENDERS}
        assert line.target <= line.goal


def measured_here(*arguments: int) -> list[tuple[DerivativeCase, int, float]]:
    """Returns the rows of benchmarks/derivatives_memory.py without a process for each figure."""
    import derivatives_memory

    memory.alone = lambda measure, *rest: measure(*rest)
    return derivatives_memory.rows(*arguments)


def test_memory_does_not_grow_as_the_matrices_do(benchmarks: None) -> None:
    for case, ours, formula in memory.alone(measured_here, 1536, 384, 1):
        matrix = case.heads * case.length**2 * case.dtype.itemsize
        assert ours < matrix < formula, case
