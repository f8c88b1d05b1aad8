"""Calls from eight threads at once, also under a Python that has no global lock."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import selfattn_ext
from selfattn_ext.build import jit
from selfattn_ext.distributed import traffic
from selfattn_ext.integrations import torch_flex

THREADS = 8

#: A call with tensors of its own, and its results.
Call = Callable[[], list[Tensor]]


def inputs(*shape: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for _ in range(count)]


def with_options(n: int) -> Call:
    query, key, value = inputs(2, 4, 40 + n, 16)
    mask = torch.randn(40 + n, 40 + n, requires_grad=True)

    def call() -> list[Tensor]:
        out, lse = selfattn_ext.scaled_dot_product_attention(
            query, key, value, mask, is_causal=True, softcap=9.0, return_lse=True
        )
        return [out, *torch.autograd.grad(out.square().sum() + lse.sum(), (query, key, value, mask))]

    return call


def packed(n: int) -> Call:
    query, key, value = inputs(70 + n, 4, 16)
    starts = torch.tensor([0, 30, 30, 70 + n])

    def call() -> list[Tensor]:
        out = selfattn_ext.varlen_attention(query, key, value, starts, starts, 40 + n, 40 + n, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), (query, key, value))]

    return call


def cached(n: int) -> Call:
    keys, values = inputs(2, 4, 60, 16, count=2)
    query, key, value = inputs(2, 4, 1 + n, 16)

    def call() -> list[Tensor]:
        caches = keys.detach().clone(), values.detach().clone()
        with torch.no_grad():
            out = selfattn_ext.attention_with_kvcache(
                query, *caches, key, value, cache_seqlens=torch.tensor([40, 3]), is_causal=True, layout="bhld"
            )
        return [out, *caches]

    return call


def with_function(n: int) -> Call:
    query, key, value, table = inputs(2, 4, 40, 16, count=4)

    def call() -> list[Tensor]:
        out = selfattn_ext.flex_attention(
            query, key, value, lambda score, b, h, q, k: score * 0.5 + table[b, h, q, 0]
        )
        return [out, *torch.autograd.grad(out.square().sum(), (query, key, value, table))]

    return call


def as_torch(n: int) -> Call:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 30 + n, 32, requires_grad=True)

    def call() -> list[Tensor]:
        with selfattn_ext.as_sdpa(), selfattn_ext.backends.use(("fused", "loops")[n % 2]):
            out = layer(x, x, x, need_weights=False)[0]
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    return call


KINDS = (with_options, packed, cached, with_function, as_torch)


def at_once(calls: Iterable[Callable[[], object]]) -> list[object]:
    """The results of eight calls that begin at the same time in a thread each."""
    begin = threading.Barrier(THREADS)

    def run(call: Callable[[], object]) -> object:
        begin.wait(60)
        return call()

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, calls))


def compare(kind: Callable[[int], Call]) -> None:
    calls = [kind(n) for n in range(THREADS)]
    expected = [call() for call in calls]
    for _ in range(3):
        for results, wanted in zip(at_once(calls), expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_one_thread(kind: Callable[[int], Call]) -> None:
    compare(kind)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="this Python always has a global lock; one without, such as python3.14t, runs this test",
)
def test_the_global_lock_stays_away() -> None:
    # In a process of its own, as other packages that tests import may have brought the lock back.
    code = """
import sys, test_threads
for kind in test_threads.KINDS:
    test_threads.compare(kind)
assert not sys._is_gil_enabled()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_one_thread_compiles_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_and_load(name: str, *_: object) -> object:
        compiled.append(name)
        threading.Event().wait(0.05)
        return object()

    monkeypatch.setattr(jit, "compile_and_load", compile_and_load)
    monkeypatch.setattr(jit, "_loaded", {})
    assert len(set(at_once([lambda: jit.load("many_threads")] * THREADS))) == 1
    assert compiled == ["many_threads"]


def test_one_thread_turns_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    def enter() -> None:
        threading.Event().wait(0.05)
        entered.append(1)

    monkeypatch.setattr(torch_flex.switch, "enter", enter)
    monkeypatch.setattr(torch_flex.switch, "leave", entered.clear)
    at_once([torch_flex.activate] * THREADS)
    assert len(entered) == 1
    torch_flex.restore()


def test_no_byte_is_missed() -> None:
    """A count during which another thread counts, here the same thread."""
    before, tensor = traffic.bytes_sent(), torch.zeros(10)

    def tensors() -> Iterable[Tensor]:
        traffic.note([tensor])
        yield tensor

    traffic.note(tensors())
    assert traffic.bytes_sent() - before == 80
