"""Benchmarks of forward mode and second derivatives: all contenders agree, and each is timed."""

from __future__ import annotations

from dataclasses import replace

import classes
import derivatives_memory
import pytest
import torch

from selfattn_ext.bench import memory
from selfattn_ext.bench.cases import Case, inputs
from selfattn_ext.bench.contenders import OURS, TORCH
from selfattn_ext.bench.derivatives import CONTENDERS, FORMULA, OPERATOR, PLAIN, DerivativeCase, Order
from selfattn_ext.bench.measure import Session
from selfattn_ext.bench.timer import Effort

pytestmark = pytest.mark.usefixtures("nothing_is_collected")


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


def test_every_line_says_what_it_compares() -> None:
    lines = classes.lines(only="derivatives")
    assert len(lines) == 16
    for line in lines:
        assert line.peer in {each.name for each in CONTENDERS}
        assert line.target <= line.goal


def measured_here() -> tuple[memory.Memory, list[tuple[DerivativeCase, int, float]]]:
    """Returns what measure_memory() and derivatives_memory.py find, without a process for each figure."""
    memory.alone = lambda measure, *rest: measure(*rest)
    of_forward = memory.measure_memory(Case(1, 2, 1024, 16, dropout=0.1), [TORCH], 1)
    return of_forward, derivatives_memory.rows(1536, 384, 1)


@pytest.mark.skipif(not memory.available(), reason="this system does not tell the peak of its memory")
def test_matrices_show_in_the_extra_memory() -> None:
    found, rows = memory.alone(measured_here)
    matrix = 2 * 1024 * 1024 * 4
    assert found.extra["torch"] > matrix
    assert found.extra["selfattn_ext"] < matrix / 2
    assert found.linear
    assert not replace(found, doubled=4 * matrix).linear
    for case, ours, formula in rows:
        matrix = case.heads * case.length**2 * case.dtype.itemsize
        assert ours < matrix < formula, case
