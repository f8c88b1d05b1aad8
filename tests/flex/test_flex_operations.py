"""Every operation of score functions, compiled in every dtype, gives torch's numbers.

Special numbers are among the operands.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import turns
from operations import BINARY, DIVISIONS, DTYPES, NOT_COMPILED, UNARY, pairs, special_numbers
from torch import Tensor
from written import Written, number_of

from selfattn_ext.flex.kernel_calls import loaded
from selfattn_ext.flex.nodes import UnsupportedFunctionError
from selfattn_ext.flex.tracing import trace

pytestmark = [pytest.mark.cpu_only, pytest.mark.xdist_group("operations")]

#: These subtract nearly equal numbers, so the difference is as wrong as the numbers are.
_CANCELLING = {"tanhshrink", "gelu", "gelu by tanh", "logaddexp2", "softshrink", "logsigmoid"}
#: Given 0 and -0, torch returns either of them, depending on the dtype and the place in memory.
_EITHER_ZERO = {"minimum", "maximum", "fmin", "fmax"}
_EITHER_ZERO |= {"clamp from a tensor", "clamp up to a tensor", "clamp to a tensor"}


class Case(NamedTuple):
    name: str
    of_torch: Callable[..., Tensor]
    given: tuple[Tensor, ...]


#: Each part has a third of the operations of two dtypes: every pair of dtypes, every operation.
PARTS = 3


def cases(part: int) -> list[Case]:
    found = []
    if part == 0:
        found += [Case(name, op, (special_numbers(dtype),)) for dtype in DTYPES for name, op in UNARY.items()]
    for place, (first, second) in enumerate(itertools.product(DTYPES, DTYPES)):
        for number, (name, op) in enumerate(BINARY.items(), place):
            if part == (0 if first == second else number % PARTS):
                found.append(Case(name, op, pairs(first, second, first != second, name in DIVISIONS)))
    return found


@functools.cache
def compiled(part: int) -> tuple[Written, list[tuple[Case, Tensor]]]:
    """Compiles every case of a part that torch computes, and returns torch's results beside the cases."""
    recorded, kept = [], []
    for case in cases(part):
        try:
            expected = case.of_torch(*case.given)
        except (RuntimeError, TypeError):
            continue
        given = case.given
        recorded.append(
            number_of(lambda q, kv, case=case, given=given: case.of_torch(*(x[q] for x in given)))
        )
        kept.append((case, expected))
    return Written(recorded, (max(case.given[0].numel() for case, _ in kept), 1)), kept


def is_right(case: Case, ours: Tensor, torchs: Tensor) -> Tensor:
    """Says where our numbers are torch's, up to a few units in the last place."""
    if not torchs.dtype.is_floating_point:
        return ours == torchs.long()
    info = torch.finfo(torchs.dtype)
    exact = torchs.double()
    error = (ours - exact).abs()
    allowed = (16 if info.eps < 1e-6 else 2) * info.eps * exact.abs() + info.tiny
    if case.name in _CANCELLING:
        allowed += 8 * info.eps * case.given[0].double().abs().clamp(min=1)
        return (ours.isnan() & exact.isnan()) | (ours == exact) | (error <= allowed)
    if case.name in _EITHER_ZERO:
        return (ours.isnan() & exact.isnan()) | (ours == exact)
    same_zero = (ours != 0) | (exact != 0) | (ours.signbit() == exact.signbit())
    return (
        (ours.isnan() & exact.isnan())
        | (ours == exact) & same_zero
        | (error <= allowed) & ((exact != 0) | (ours != 0))
    )


def is_defined(case: Case, result: torch.dtype) -> Tensor:
    """Says where torch's result is defined.

    There, no float becomes an integer that is too short for it, no integer or constant becomes a float that
    is too short for it, and quotients whose remainder is asked for are not so large that they have no digits
    behind the point.
    """
    first = case.given[0]
    defined = torch.ones(first.shape, dtype=torch.bool)
    for x in case.given:
        if x.is_floating_point() and not result.is_floating_point and result != torch.bool:
            info = torch.iinfo(result if case.name != "to int8 and back" else torch.int8)
            defined &= (x.double() >= info.min) & (x.double() < info.max)
        if not x.is_floating_point() and result == torch.float16:
            defined &= x.double().abs() <= torch.finfo(result).max
    if len(case.given) == 2 and case.name in ("remainder", "fmod"):
        quotient = first.double() / case.given[1].double()
        defined &= ~quotient.isfinite() | (quotient.abs() < 2**24)
    if case.name in ("x + 2**62", "x * a hash") and result == torch.float16:
        defined &= False
    if case.name == "7 % x":
        defined &= first.double().abs() > 1e-30
    if case.name == "ldexp":
        defined &= case.given[1].double().abs() < 100
    return defined


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in turns.chosen(range(1, PARTS)))]
)
def test_numbers(part: int, dtype: torch.dtype) -> None:
    written, kept = compiled(part)
    wrong: list[str] = []
    for number, (case, expected) in enumerate(kept):
        if case.given[0].dtype != dtype:
            continue
        assert written.nodes[number].dtype == expected.dtype or case.name == "ldexp", case
        ours = written.compute(number, range(expected.numel())).squeeze(1)
        right = is_right(case, ours, expected) | ~is_defined(case, expected.dtype)
        if not right.all():  # torch may compute numbers differently if they are not neighbours in memory
            apart = [torch.stack([x, x], -1)[..., 0] for x in case.given]
            right |= is_right(case, ours, case.of_torch(*apart))
        for at in (~right).nonzero().flatten().tolist():
            operands = ", ".join(f"{x.dtype} {x[at].item()}" for x in case.given)
            wrong.append(f"{case.name} of {operands}: {ours[at].item()}, torch {expected[at].item()}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_is_not_compiled(name: str) -> None:
    def score_mod(score: Tensor, *indices: Any) -> Tensor:
        result: Tensor = NOT_COMPILED[name](score)
        return result

    with pytest.raises(UnsupportedFunctionError), torch.no_grad():
        loaded(trace(score_mod, None, torch.float32, torch.device("cpu"), False))
