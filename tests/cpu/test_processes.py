"""Attention in forked and spawned processes, in the workers of a DataLoader, and in threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import selfattn_ext
from selfattn_ext import scaled_dot_product_attention

# There are enough scores for several threads of a kernel, but torch's own functions use one thread.
FORKED = """
import os, signal, sys, threading, torch
import selfattn_ext

torch.set_num_threads(4)
query = torch.randn(4, 4, 128, 8)[:1].requires_grad_()

def attend():
    out = selfattn_ext.scaled_dot_product_attention(query, query, query, is_causal=True)
    return torch.autograd.grad(out, query, out.detach())[0]

expected = attend()

def in_a_child(task):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for ever
        task()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def compute():
    if not torch.equal(attend(), expected):
        os._exit(3)

def compute_in_a_thread():
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()

def compute_in_a_grandchild():
    if in_a_child(compute) != 0:
        os._exit(4)

print([in_a_child(task) for task in (compute, compute_in_a_thread, compute_in_a_grandchild)])
compute()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="is about fork and GNU's OpenMP")
def test_forked_children_do_not_wait_for_threads_that_are_gone(run_python: Callable[..., str]) -> None:
    assert run_python(FORKED) == "[0, 0, 0]\n"


class Attended(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * 128 * 8).reshape(1, 2, 128, 8) + index
        return scaled_dot_product_attention(x, x, x, is_causal=True)[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context: str, one_thread: None) -> None:
    torch.set_num_threads(4)
    expected = torch.stack([Attended()[index] for index in range(4)])
    loader = DataLoader(Attended(), 2, num_workers=1, multiprocessing_context=context, timeout=120)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_threads_at_once(one_thread: None) -> None:
    """Each thread makes its own calls, forward and backward, by kernels that use several threads."""
    module = selfattn_ext.MultiHeadSelfAttention(16, 4)
    inputs = [torch.randn(2, 100 + n, 16) for n in range(8)]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        out = module(x, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))]

    torch.set_num_threads(4)
    expected = [run(x) for x in inputs]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            for results, wanted in zip(threads.map(run, inputs), expected, strict=True):
                assert all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))
