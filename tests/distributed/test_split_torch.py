"""torch's own context parallelism and DTensors, on this package's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import both_raise, ranks
from ran import activated
from tolerances import assert_accurate
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel

import selfattn_ext
from selfattn_ext import as_sdpa
from selfattn_ext.distributed import register_sharding

pytestmark = pytest.mark.xdist_group("split_attention")


class Model(nn.Module):
    """A layer for inputs (B, T, 24), with torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(24, 24 + 12 + 18), nn.Linear(36, 24)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        query, key, value = self.into(x).split((24, 12, 18), -1)
        query, key, value = (
            each.unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in ((query, 4), (key, 2), (value, 2))
        )
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        return self.out(attended.transpose(1, 2).flatten(2))


def step(model: nn.Module, x: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    """Returns a loss and the gradients of the parameters."""
    model.zero_grad()
    loss = F.mse_loss(model(x, **options), target)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def compare(length: int, balanced: bool, rotate: str, options: dict[str, Any]) -> None:
    """Runs on a rank: a step of training is as accurate as torch's in one process."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(2, length, 24, generator=generator) for _ in range(2))
    peer = step(Model(), x, target, **options)
    exact = step(Model().double(), x.double(), target.double(), **options)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    experimental.set_rotate_method(rotate)
    before = experimental._cp_options.enable_load_balance
    experimental._cp_options.enable_load_balance = balanced
    try:
        with activated(), context_parallel(mesh, buffers=[x, target], buffer_seq_dims=[1, 1]):
            assert x.size(1) == length // mesh.size()
            ours = step(Model(), x, target, **options)
    finally:
        experimental._cp_options.enable_load_balance = before
    for name, numbers in ours.items():
        torch.distributed.all_reduce(numbers)
        # These are small numbers, each a mean of many, so the bound is relative to their size.
        size = float(exact[name].abs().max())
        assert_accurate(name, numbers / mesh.size() / size, exact[name] / size, peer[name] / size)
    assert F.scaled_dot_product_attention.__module__ != "selfattn_ext.distributed.torch_context_parallel"


@pytest.mark.parametrize(
    ("length", "balanced", "rotate", "options"),
    [
        (24, True, "allgather", {"is_causal": True}),
        (48, True, "alltoall", {"is_causal": True, "scale": 0.5}),
        (48, False, "alltoall", {"is_causal": True}),
        (48, False, "allgather", {}),
        (48, True, "allgather", {}),
    ],
    ids=str,
)
def test_a_step_of_training(length: int, balanced: bool, rotate: str, options: dict[str, Any]) -> None:
    for count in (2, 3):
        ranks(count)(compare, length, balanced, rotate, options)


def of_rank(length: int, options: dict[str, Any], only: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns a rank's result, and the input's rows that belong to it; ``only`` this rank has options."""
    x = torch.randn(1, length, 24, generator=torch.Generator().manual_seed(1))
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    if only not in (None, mesh.get_rank()):
        options = {}
    with activated(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), torch.no_grad():
        torch.manual_seed(3)
        return model(x, **options), x.clone()


DROPOUT = {"is_causal": True, "dropout_p": 0.5}


def test_dropout_has_the_pattern_of_one_process() -> None:
    parts, rows = zip(*ranks(2)(of_rank, 32, DROPOUT), strict=True)
    x = torch.randn(1, 32, 24, generator=torch.Generator().manual_seed(1))
    model = Model()
    torch.manual_seed(3)
    with as_sdpa(), torch.no_grad():
        expected = model(x, **DROPOUT)
    order = torch.cat([torch.arange(8), torch.arange(24, 32), torch.arange(8, 24)])
    torch.testing.assert_close(torch.cat(rows, 1), x[:, order])
    torch.testing.assert_close(torch.cat(parts, 1), expected[:, order])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24, DROPOUT), r"dropout needs spans that begin at multiples of 4 rows"),
        ((16, {"attn_mask": torch.zeros(8, 8)}), r"attn_mask of shape .* the keys of all ranks"),
        ((16, {"attn_mask": torch.zeros(7, 16)}, 1), r"attn_mask must have this rank's 8 rows, or one"),
    ],
    ids=["dropout", "mask", "mask of one rank"],
)
def test_what_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    both_raise(ValueError, message, of_rank, *arguments)


def sharded(dim: int, dtype: torch.dtype, options: dict[str, Any], torchs: bool) -> None:
    """Runs on a rank: attention of DTensors and its gradients equal those of ordinary tensors."""
    register_sharding()
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, heads, 12, 8, generator=generator).to(dtype).requires_grad_()

    whole = [drawn(4), drawn(4 if torchs else 2), drawn(4 if torchs else 2)]
    attention = F.scaled_dot_product_attention if torchs else selfattn_ext.scaled_dot_product_attention
    grad = torch.randn(2, 4, 12, 8, generator=generator).to(dtype)
    parts = [distribute_tensor(each.detach(), mesh, [Shard(dim)]).requires_grad_() for each in whole]
    with activated():
        expected = attention(*whole, **options)
        expected.backward(grad)
        found = attention(*parts, **options)
        found.backward(distribute_tensor(grad, mesh, [Shard(dim)]))
    if dim < 2:
        assert found.placements == (Shard(dim),)
    torch.testing.assert_close(found.full_tensor(), expected)
    for part, each in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), each.grad)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "options", "torchs"),
    [
        (torch.float32, {"is_causal": True}, True),
        (torch.float32, {"is_causal": True, "enable_gqa": True}, False),
        (torch.bfloat16, {"enable_gqa": True, "window_size": (3, 0), "softcap": 2.0}, False),
    ],
    ids=str,
)
def test_dtensors(dim: int, dtype: torch.dtype, options: dict[str, Any], torchs: bool) -> None:
    ranks(2)(sharded, dim, dtype, options, torchs)


def unevenly_sharded() -> None:
    """Three heads cannot be halved, and halves of some query heads would have the wrong keys."""
    register_sharding()
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    for heads, kv_heads in ((3, 3), (6, 3), (4, 1)):
        whole = [torch.randn(2, count, 12, 8, generator=generator) for count in (heads, kv_heads, kv_heads)]
        parts = [distribute_tensor(each, mesh, [Shard(1)]) for each in whole]
        found = selfattn_ext.scaled_dot_product_attention(*parts, enable_gqa=True)
        expected = selfattn_ext.scaled_dot_product_attention(*whole, enable_gqa=True)
        torch.testing.assert_close(found.full_tensor(), expected)


def test_heads_that_ranks_do_not_divide() -> None:
    ranks(2)(unevenly_sharded)


def with_dropout() -> None:
    register_sharding()
    x = distribute_tensor(torch.zeros(2, 2, 8, 8), init_device_mesh("cpu", (2,)), [Shard(1)])
    selfattn_ext.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_dropout_of_dtensors_is_refused() -> None:
    both_raise((ValueError, RuntimeError), r"dropout|mixed torch.Tensor and DTensor", with_dropout)


def test_modules_that_moved_have_their_old_names() -> None:
    from selfattn_ext.integrations import dtensor, torch_context_parallel

    assert dtensor.register_sharding is register_sharding
    assert {*torch_context_parallel.__all__} == {"activate", "restore"}
