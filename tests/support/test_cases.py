"""cases.py: a judge computes once for all kernels, and again for anything that differs."""

from __future__ import annotations

import pytest
import torch
from cases import Case, check, remembered
from conftest import KERNELS, OF_KERNEL

import selfattn_ext


def test_a_judge_is_asked_once_for_what_is_the_same_to_the_bit() -> None:
    asked = []

    @remembered
    def judge(tensors: dict[str, torch.Tensor], scale: float = 1.0) -> int:
        asked.append(scale)
        return len(asked)

    numbers = torch.arange(6.0).view(2, 3)
    assert judge({"query": numbers}) == judge({"query": numbers.clone()}) == 1
    others = [numbers.double(), numbers.mT.contiguous().mT, numbers.view(3, 2), numbers.nextafter(-numbers)]
    assert [judge({"query": other}) for other in others] == [2, 3, 4, 5]
    assert judge({"key": numbers}) == 6
    assert judge({"query": numbers}, scale=2.0) == 7
    torch.set_float32_matmul_precision("medium")
    try:
        assert judge({"query": numbers}) == 8
    finally:
        torch.set_float32_matmul_precision("highest")
    assert judge({"query": numbers}) == 1
    assert asked == [1.0] * 6 + [2.0, 1.0]


def test_a_wrong_result_is_judged_by_what_a_right_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed=12345, lse=True)
    check(case)
    attention = selfattn_ext.scaled_dot_product_attention

    def off(*arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        out, lse = attention(*arguments, **options)
        return out * 1.001, lse

    monkeypatch.setattr(selfattn_ext, "scaled_dot_product_attention", off)
    with pytest.raises(AssertionError, match="error"):
        check(case)


def test_cases_of_one_process_differ_in_the_kernel_alone() -> None:
    names = {f"test_it[f32-{kernel}-keys=7]" for kernel in KERNELS}
    assert {OF_KERNEL.sub("", name) for name in names} == {"test_it[f32--keys=7]"}
    assert OF_KERNEL.sub("", f"test_it[{KERNELS[0]}]") == "test_it[]"
    for other in ("test_loops[f32]", "test_it[f32-loopsided]", "test_it[my loops-3]"):
        assert OF_KERNEL.sub("", other) == other
