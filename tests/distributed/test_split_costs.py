"""The computed costs of a split equal counted work and bytes."""

from __future__ import annotations

import doctest
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import turns
from processes import ranks

from selfattn_ext import masks
from selfattn_ext.distributed import bytes_sent, costs, ring_attention, ulysses_attention
from selfattn_ext.distributed.row_layout import Layout

pytestmark = pytest.mark.xdist_group("split_attention")


def counted(layout: Any, lengths: list[int], count: int, **rule: Any) -> list[list[int]]:
    """Counts Work.pairs in a matrix of the keys that each query sees."""
    total = sum(lengths)
    seen = torch.zeros(total, total, dtype=torch.bool)
    starts = list(accumulate(lengths, initial=0))
    for begin, end in pairwise(starts):
        visible = masks.visible_pairs(end - begin, end - begin, **rule)
        seen[begin:end, begin:end] = True if visible is None else visible
    lies = Layout(layout, tuple(starts), count)
    rows = [
        torch.cat([torch.arange(*span) for span in lies.whole_rows(rank)] or [torch.arange(0)])
        for rank in range(count)
    ]
    return [
        [int(seen[rows[rank]][:, rows[(rank - step) % count]].sum()) for step in range(count)]
        for rank in range(count)
    ]


@pytest.mark.parametrize("lengths", [[96], [37], [5], [64, 0, 9, 130, 3]], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "head-tail"])
@pytest.mark.parametrize(
    "rule", [{}, {"is_causal": True}, {"window_size": (20, 0)}, {"window_size": (3, 9)}], ids=str
)
def test_work(rule: dict[str, Any], layout: Any, lengths: list[int]) -> None:
    for count in (1, 2, 4):
        expected = counted(layout, lengths, count, **rule)
        work = costs.Work(layout, lengths, count, **rule)
        assert work.pairs == expected
        slowest = max(map(sum, expected))
        share = sum(map(sum, expected)) / count / slowest
        assert work.share_of_ideal() == pytest.approx(share)
        assert work.share_of_ideal(in_step=True) <= share + 1e-12


def test_zigzag_is_what_balances_the_causal_rule() -> None:
    for count in (2, 8, 64):
        causal = {"is_causal": True}
        assert costs.Work("zigzag", 65536, count, **causal).share_of_ideal(in_step=True) > 0.98
        # The last of n ranks has 2n - 1 of n * n equal parts of the work.
        ideal = count / (2 * count - 1)
        assert costs.Work("contiguous", 65536, count, **causal).share_of_ideal() == pytest.approx(
            ideal, rel=0.01
        )


def sent(name: str, rows: int, backward: bool) -> int:
    query = torch.randn(2, 6, rows, 8, requires_grad=True)
    key = torch.randn(2, 6, rows, 8, requires_grad=True)
    value = torch.randn(2, 6, rows, 5, requires_grad=True)
    attention = ring_attention if name == "ring" else ulysses_attention
    before = bytes_sent()
    out = attention(query, key, value, layout="contiguous")
    if backward:
        out.sum().backward()
    return bytes_sent() - before


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with backward"])
@pytest.mark.parametrize("count", [2, 3])
def test_bytes(count: int, backward: bool) -> None:
    shape: dict[str, Any] = {"kv_heads": 6, "head_dim": 8, "value_dim": 5, "batch": 2, "bytes_per_number": 4}
    shape["backward"] = backward
    assert set(ranks(count)(sent, "ring", 8, backward)) == {costs.ring_bytes(8, count, **shape)}
    expected = costs.ulysses_bytes(8, count, heads=6, **shape)
    assert set(ranks(count)(sent, "ulysses", 8, backward)) == {expected}


PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
DOCUMENTS = [16384, 16384, 8192, 8192, 4096, 4096, 2048, 2048, *4 * [1024]]
ROWS: dict[str, dict[str, Any]] = {
    "every key": {"length": 65536},
    "causal": {"length": 65536, "is_causal": True},
    "window (4095, 0)": {"length": 65536, "window_size": (4095, 0)},
    "documents, causal": {"length": DOCUMENTS, "is_causal": True},
}


#: Rows that take turns: to count the work of 64 ranks takes a second.
MORE_ROWS = turns.chosen([name for name in ROWS if name != "causal"])


@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_ROWS)]
)
def test_the_page_says_how_work_is_balanced(name: str) -> None:
    shares = []
    for count in (8, 64):
        for layout in ("zigzag", "contiguous"):
            work = costs.Work(layout, ranks=count, **ROWS[name])  # type: ignore[arg-type]
            shares.append(f"{work.share_of_ideal():.0%}, {work.share_of_ideal(in_step=True):.0%}")
    row = f"| {name} | {' | '.join(shares)} |".replace("%", " %")
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("count", [8, 64])
def test_the_page_says_what_is_sent(count: int) -> None:
    rows = 131072 // count
    shape: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "backward": False}
    by_ring = costs.ring_bytes(rows, count, **shape)
    by_heads = costs.ulysses_bytes(rows, count, heads=32, **shape)
    (row,) = re.findall(rf"^\| {count} \| {rows} \|.*$", PAGE.read_text(encoding="utf-8"), re.M)
    numbers = [float(number) for number in re.findall(r"([\d.]+) M?(?:B|ms)", row)]
    pairs = 4 * 128 * 32 * 131072**2 / 2 / count / 4e14
    expected = [pairs * 1e3]
    for sent_bytes in (by_ring, by_heads):
        expected += [sent_bytes / 1e6, sent_bytes / 450e9 * 1e3, sent_bytes / 50e9 * 1e3]
    assert numbers == [pytest.approx(wanted, abs=0.51 if wanted > 20 else 0.051) for wanted in expected]


def test_examples_of_the_module() -> None:
    found = doctest.testmod(costs)
    assert found.attempted == 3
    assert found.failed == 0
