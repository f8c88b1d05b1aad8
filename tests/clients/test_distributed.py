"""DistributedDataParallel: two processes that halve a batch get the gradients of one that has all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Forked before anything is computed, which spares the children the imports.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
import selfattn_ext

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = selfattn_ext.MultiHeadSelfAttention(16, 4)
        self.second = selfattn_ext.MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2, rotary=True)
        self.sinks = torch.nn.Parameter(torch.zeros(4))
        self.bias = torch.nn.Parameter(torch.zeros(4, 9, 9))  # a mask with a gradient

    def forward(self, x):
        x = x + self.first(x, is_causal=True)
        x = x + self.second(x, x, x, is_causal=True, need_weights=False)[0]
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return selfattn_ext.scaled_dot_product_attention(heads, heads, heads, self.bias, sinks=self.sinks)

def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

def run(rank, file, how):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 9, 16, dtype=torch.float64)
    expected = gradients(model, x)
    shared = DistributedDataParallel(model)
    if how == "compiled":
        shared = torch.compile(shared, backend="aot_eager")
    for _ in range(2):
        results = gradients(shared, x[2 * rank : 2 * rank + 2])
        # The same float64 sums in another order: some thousand roundings of 2^-53.
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-15)
    dist.destroy_process_group()

mp.start_processes(run, (sys.argv[1], sys.argv[2]), nprocs=2, start_method="fork")
print("the same gradients")
"""


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_of_two_processes(how: str, run_python: Callable[..., str], tmp_path: object) -> None:
    script = SCRIPT.replace("sys.argv[1], sys.argv[2]", f"{str(tmp_path) + '/rendezvous'!r}, {how!r}")
    assert run_python(script) == "the same gradients\n"
