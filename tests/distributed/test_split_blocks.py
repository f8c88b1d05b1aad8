"""context_parallel: code that ignores ranks gets the results and gradients of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import both_raise, ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.utils.checkpoint import checkpoint

import selfattn_ext
from selfattn_ext.distributed import context_parallel, shard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

LENGTH, WIDTH = 37, 16


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def ours(x: Tensor, layer: nn.Module) -> Tensor:
    return selfattn_ext.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)


def with_options(x: Tensor, layer: nn.Module) -> Tensor:
    out, lse = selfattn_ext.scaled_dot_product_attention(
        heads(x), heads(x)[:, :2], heads(x)[:, 2:], enable_gqa=True, window_size=(9, 0), softcap=2.0,
        dropout_p=0.3, return_lse=True,
    )  # fmt: skip
    return out + lse.unsqueeze(-1)


def torchs(x: Tensor, layer: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), None, 0.0, True, scale=0.3)


def several(x: Tensor, layer: nn.Module) -> Tensor:
    """Calls a layer, this package's function and torch's."""
    return torchs(ours(self_attention(x, layer), layer).transpose(1, 2).flatten(2), layer)


def switched(x: Tensor, layer: nn.Module) -> Tensor:
    with selfattn_ext.as_sdpa():
        return torchs(x, layer)


def self_attention(x: Tensor, layer: nn.Module) -> Tensor:
    return layer[0](x, is_causal=True)


def multi_head(x: Tensor, layer: nn.Module) -> Tensor:
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool)
    return layer[1](x, x, x, need_weights=False, is_causal=True, attn_mask=mask)[0]


def torchs_encoder(x: Tensor, layer: nn.Module) -> Tensor:
    return layer[2](x)


def checkpointed(x: Tensor, layer: nn.Module) -> Tensor:
    return checkpoint(ours, x, layer, use_reentrant=False)


CALLS = (ours, with_options, torchs, switched, self_attention, multi_head, torchs_encoder, checkpointed)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        (
            selfattn_ext.MultiHeadSelfAttention(WIDTH, 4),
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            nn.TransformerEncoderLayer(WIDTH, 4, 8, 0.0, batch_first=True),
        )
    ).double()


def compare(call: Callable[[Tensor, nn.Module], Tensor], how: dict[str, Any]) -> None:
    """Runs on a rank; checks its rows, and the gradients of its rows and of all ranks' parameters."""
    layer, generator = model(), torch.Generator().manual_seed(1)
    whole = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    if call is torchs_encoder:
        layer.train()
    torch.manual_seed(2)
    whole.requires_grad_()
    expected = call(whole, layer)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weights).sum().backward()
    of_parameters = [None if each.grad is None else each.grad.clone() for each in layer.parameters()]
    layer.zero_grad()
    dim = 2 if expected.dim() == 4 else 1

    how = dict(how)
    mesh = None
    if how.pop("mesh", None):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))

    def part(tensor: Tensor, along: int) -> Tensor:
        tensor = tensor.detach()
        if mesh is None:
            return shard_sequence(tensor, along, layout=how.get("layout", "zigzag"))
        outer = shard_sequence(tensor, along, group=mesh["ring"])
        return shard_sequence(outer, along, group=mesh["heads"], layout="contiguous")

    own = part(whole, 1).requires_grad_()
    torch.manual_seed(2)
    with context_parallel(mesh, **how):
        found = call(own, layer)
        (found * part(weights, dim)).sum().backward()
    torch.testing.assert_close(found, part(expected, dim))
    assert own.grad is not None
    torch.testing.assert_close(own.grad, part(whole.grad, 1))
    for wanted, parameter in zip(of_parameters, layer.parameters(), strict=True):
        if wanted is not None:
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, wanted)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    ("count", "how"),
    [
        (2, {}),
        (3, {"method": "ulysses", "layout": "contiguous"}),
        pytest.param(3, {"rotate": "allgather"}, marks=pytest.mark.thorough),
        pytest.param(4, {"mesh": True}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_unchanged_code_runs_split(call: Any, count: int, how: dict[str, Any]) -> None:
    ranks(count)(compare, call, how)


def packed(layout: Any) -> None:
    starts = torch.tensor([0, 9, 9, 30, LENGTH], dtype=torch.int32)
    rows = torch.randn(LENGTH, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    call = (starts, starts, 21, 21, None, 0.2 if layout == "zigzag" else 0.0)
    torch.manual_seed(2)
    expected = selfattn_ext.varlen_attention(rows, rows, rows, *call, is_causal=True)
    own = shard_sequence(rows, 0, layout=layout, cu_seqlens=starts)
    functions: list[Any] = [selfattn_ext.varlen_attention]
    if layout == "zigzag":
        torch._dynamo.reset()
        functions.append(torch.compile(selfattn_ext.varlen_attention, backend="aot_eager"))
    for function in functions:
        torch.manual_seed(2)
        with context_parallel(layout=layout):
            found = function(own, own, own, *call, is_causal=True)
        torch.testing.assert_close(found, shard_sequence(expected, 0, layout=layout, cu_seqlens=starts))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_packed_sequences(layout: str) -> None:
    ranks(2)(packed, layout)


X = torch.zeros(1, 2, 8, 8)


def compiled() -> None:
    """A function compiled before the block is compiled again in it."""
    torch._dynamo.reset()
    layer, x = model(), torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    function = torch.compile(several, backend="aot_eager")
    expected = several(x, layer)
    torch.testing.assert_close(function(x, layer), expected)
    for _ in range(2):
        with context_parallel():
            found = function(shard_sequence(x, 1), layer)
        torch.testing.assert_close(found, shard_sequence(expected, 2))
        torch.testing.assert_close(function(x, layer), expected)


def test_compiled_code_runs_split() -> None:
    ranks(2)(compiled)


def compiled_and_refused(name: str) -> None:
    torch._dynamo.reset()
    calls: dict[str, Callable[[], Any]] = {
        "whole": lambda: torch.compile(
            lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True
        )(X),
        "switch": lambda: torch.compile(switched, backend="aot_eager")(X[0], nn.ModuleList()),
        "weights": lambda: torch.compile(selfattn_ext.attention_weights, backend="aot_eager")(X, X),
    }
    with context_parallel():
        calls[name]()


@pytest.mark.parametrize("name", ["whole", "switch", "weights"])
def test_what_is_compiled_and_cannot_be_split(name: str) -> None:
    says = r"cannot be split over processes|asks them whether they make the same call"
    both_raise(Exception, says, compiled_and_refused, name)


def mask_of_a_part() -> None:
    with context_parallel(), selfattn_ext.as_sdpa():
        F.scaled_dot_product_attention(X, X, X, torch.zeros(8, 8))


def test_a_mask_of_a_part() -> None:
    both_raise(ValueError, r"attn_mask of shape .* the keys of all ranks", mask_of_a_part)


def recomputed_outside() -> None:
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    with context_parallel():
        out = checkpointed(x, nn.ModuleList())
    out.sum().backward()


def test_what_is_recomputed_outside_is_refused() -> None:
    both_raise(torch.utils.checkpoint.CheckpointError, "", recomputed_outside)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "tree"}, r"method must be one of ring, ulysses, but it is 'tree'"),
        ({"layout": "striped"}, r"layout must be one of zigzag, contiguous, head-tail, but it is 'striped'"),
        ({"mesh": "cp"}, r"group must be a ProcessGroup, a DeviceMesh or None, not str"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], message: str) -> None:
    both_raise((ValueError, TypeError), message, functools.partial(context_parallel, **how))


def outside() -> Tensor:
    with context_parallel():
        pass
    return selfattn_ext.attention_weights(X, X)


def test_after_the_block_all_is_as_before() -> None:
    assert all(weights.shape == (1, 2, 8, 8) for weights in ranks(2)(outside))
