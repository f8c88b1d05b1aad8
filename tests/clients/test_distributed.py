"""Two processes that halve a batch compute the same as one process with the whole batch.

With DistributedDataParallel each process has all parameters, with fully_shard (FSDP2) a half of each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = """
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

def started(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    torch.manual_seed(0)
    return Model().double(), torch.randn(4, 9, 16, dtype=torch.float64)

def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]
"""

DATA_PARALLEL = """
def run(rank, file, how):
    model, x = started(rank, file)
    expected = gradients(model, x)
    shared = DistributedDataParallel(model)
    if how == "compiled":
        shared = torch.compile(shared, backend="aot_eager")
    for _ in range(2):
        results = gradients(shared, x[2 * rank : 2 * rank + 2])
        # These are the same float64 sums in another order, so some thousand roundings of 2^-53 differ.
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-15)
    dist.destroy_process_group()
"""

SHARDED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

def losses(model, x):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        found.append(model(x).square().mean())
        optimizer.zero_grad()
        found[-1].backward()
        optimizer.step()
    return torch.stack(found).detach()

def run(rank, file, how):
    (model, x), alone = started(rank, file), Model().double()
    alone.load_state_dict(model.state_dict())
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    dtypes = (torch.bfloat16, torch.float32) if how == "bfloat16" else ()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes))
    # One matrix holds the second layer's weights of all heads, and each process has half of its rows.
    assert model.second.in_proj_weight.to_local().shape[0] * 2 == alone.second.in_proj_weight.shape[0]
    mean = losses(model, x[2 * rank : 2 * rank + 2])
    dist.all_reduce(mean)
    tolerance = {"rtol": 0.02, "atol": 0.0} if how == "bfloat16" else {"rtol": 1e-10, "atol": 0.0}
    torch.testing.assert_close(mean.double() / 2, losses(alone, x), **tolerance)
    if how != "bfloat16":
        for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(sharded.full_tensor(), whole, rtol=1e-9, atol=1e-13)
    dist.destroy_process_group()
"""

# The processes are forked before anything is computed, so that they need not import again.
START = """
mp.start_processes(run, (FILE, HOW), nprocs=2, start_method="fork")
print("the same")
"""


@pytest.mark.parametrize(
    ("script", "how"),
    [(DATA_PARALLEL, "eager"), (DATA_PARALLEL, "compiled"), (SHARDED, "eager"), (SHARDED, "bfloat16")],
    ids=["data parallel", "data parallel, compiled", "sharded", "sharded, bfloat16"],
)
def test_two_processes(script: str, how: str, run_python: Callable[..., str], tmp_path: Path) -> None:
    given = f"FILE, HOW = {str(tmp_path / 'rendezvous')!r}, {how!r}\n"
    assert run_python(given + MODEL + script + START) == "the same\n"
