"""Calls that ranks cannot make together fail on each rank, and no rank waits for ever."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import both_raise, group_of, ranks
from torch.distributed.tensor import Shard, distribute_tensor

from selfattn_ext import distributed, scaled_dot_product_attention
from selfattn_ext.distributed import ring_attention, shard_sequence, unshard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

FUNCTIONS = ("ring_attention", "ulysses_attention")

#: name -> (rank 1's different options, what the error says on every rank).
UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": True}, r"is_causal is False on rank 0 and True on rank 1"),
    "scale": ({"scale": 0.5}, r"scale is 0\.35\d* on rank 0 and 0\.5 on rank 1"),
    "window": ({"window_size": (3, 0)}, r"window_size is \(-1, -1\) on rank 0 and \(3, 0\) on rank 1"),
    "softcap": ({"softcap": 2}, r"softcap is 0\.0 on rank 0 and 2\.0 on rank 1"),
    "dropout": ({"dropout_p": 0.5}, r"dropout_p is 0\.0 on rank 0 and 0\.5 on rank 1"),
    "offset": ({"query_offset": 2}, r"query_offset is 0 on rank 0 and 2 on rank 1"),
    "layout": ({"layout": "contiguous"}, r"layout is zigzag on rank 0 and contiguous on rank 1"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks is None on rank 0 and of shape \(1, 2\) on rank 1"),
    "mask": (
        {"attn_mask": torch.ones(1, 16, dtype=torch.bool)},
        r"attn_mask is None on rank 0 and torch\.bool for 16 keys on rank 1",
    ),
    "dtype": ({"dtype": torch.bfloat16}, r"dtype is torch\.float32 on rank 0 and torch\.bfloat16 on rank 1"),
    "batch": ({"batch": 3}, r"the batch is 1 on rank 0 and 3 on rank 1"),
    "heads": ({"heads": 4}, r"the number of (key|query) heads is 2 on rank 0 and 4 on rank 1"),
    "rows": ({"rows": 12}, r"the ranks have \[8, 12\] rows of query, but the zigzag layout of 20 rows gives"),
}


def call(name: str, **options: Any) -> Any:
    shape = (options.pop("batch", 1), options.pop("heads", 2), options.pop("rows", 8), 8)
    tensor = torch.zeros(shape, dtype=options.pop("dtype", torch.float32))
    return getattr(distributed, name)(tensor, tensor, tensor, **options)


def unlike_call(name: str, options: dict[str, Any], rank: int = 1) -> Any:
    return call(name, **(options if dist.get_rank() == rank else {}))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_calls(what: str, name: str) -> None:
    options, message = UNLIKE[what]
    both_raise(ValueError, message, unlike_call, name, options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_default_on_the_other_rank(name: str) -> None:
    """Whichever rank leaves an option out, the error names the values of both."""
    says = r"is_causal is True on rank 0 and False on rank 1"
    both_raise(ValueError, says, unlike_call, name, {"is_causal": True}, 0)


#: name -> (rank 1's different part of a sequence, its options, what the error says).
UNLIKE_PARTS: dict[str, tuple[torch.Tensor, dict[str, Any], str]] = {
    "dtype": (torch.zeros(8, 3, 2).double(), {}, r"dtype is torch\.float32 on rank 0 and torch\.float64 on"),
    "heads": (torch.zeros(8, 4, 2), {}, r"the shape without the rows is \[3, 2\] on rank 0 and \[4, 2\] on"),
    "dimensions": (torch.zeros(8, 3), {}, r"the shape without the rows is \[3, 2\] on rank 0 and \[3\] on"),
    "dim": (torch.zeros(3, 8, 2), {"dim": 1}, r"dim is 0 on rank 0 and 1 on rank 1"),
    "layout": (torch.zeros(8, 3, 2), {"layout": "head-tail"}, r"layout is zigzag on rank 0 and head-tail on"),
    "offsets": (
        torch.zeros(8, 3, 2),
        {"cu_seqlens": torch.tensor([0, 16])},
        r"None on rank 0 and \(0, 16\) on",
    ),
    "rows": (torch.zeros(9, 3, 2), {}, r"ranks have \[8, 9\] rows of tensor, but the zigzag layout of 17"),
}


def unlike_parts(what: str) -> torch.Tensor:
    tensor, options, _ = UNLIKE_PARTS[what]
    if dist.get_rank() == 0:
        return unshard_sequence(torch.zeros(8, 3, 2), 0)
    return unshard_sequence(tensor, **{"dim": 0, **options})


@pytest.mark.parametrize("what", UNLIKE_PARTS)
def test_unlike_parts(what: str) -> None:
    both_raise(ValueError, UNLIKE_PARTS[what][2], unlike_parts, what)


def unlike_functions() -> Any:
    return call(FUNCTIONS[dist.get_rank()])


def without_gradients_on_rank_1() -> Any:
    with torch.set_grad_enabled(dist.get_rank() == 0):
        tensor = torch.zeros(1, 2, 8, 8, requires_grad=True)
        return ring_attention(tensor, tensor, tensor)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unlike_functions, r"the function is ring_attention on rank 0 and ulysses_attention on rank 1"),
        (without_gradients_on_rank_1, r"rank 0 records gradients and rank 1 does not, as by torch\.no_grad"),
    ],
)
def test_unlike_ways(function: Any, message: str) -> None:
    both_raise(ValueError, message, function)


def in_a_part_of_the_ranks(options: dict[str, Any]) -> str:
    """Runs on a rank; returns its error if ranks 1 and 2 attend together and rank 2 has other options."""
    group = dist.new_group([1, 2])
    try:
        if dist.get_rank() > 0:
            call("ring_attention", group=group, **(options if dist.get_rank() == 2 else {}))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_have_the_numbers_of_the_default_group() -> None:
    unlike = ranks(3)(in_a_part_of_the_ranks, {"is_causal": True})
    assert unlike[1:] == 2 * [
        "ranks must make the same call, but is_causal is False on rank 1 and True on rank 2"
    ]
    _, others, own = ranks(3)(in_a_part_of_the_ranks, {"softcap": -1.0})
    assert others == f"rank 2 has made no call, as its arguments were refused: {own}"


def refused_in_a_mesh(refusing: int, block: bool) -> str:
    """Runs on a rank of two rings over two ranks; returns its error."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    options = {"softcap": -1.0} if dist.get_rank() == refusing else {}
    try:
        if block:
            with distributed.context_parallel(mesh):
                call_in_a_block(**options)
        else:
            call("ulysses_attention", group=mesh["heads"], ring_group=mesh["ring"], **options)
    except ValueError as error:
        return str(error)
    return ""


def call_in_a_block(**options: Any) -> torch.Tensor:
    tensor = torch.zeros(1, 2, 8, 8)
    return scaled_dot_product_attention(tensor, tensor, tensor, **options)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("refusing", [0, 3])
def test_all_ranks_of_a_mesh_hear_of_it(refusing: int, block: bool) -> None:
    """The error reaches the ranks of its row and column, and the ranks that wait for these."""
    own = "softcap must be 0 (off) or positive, got -1.0"
    said = f"rank {refusing} has made no call, as its arguments were refused: {own}"
    found = ranks(4)(refused_in_a_mesh, refusing, block)
    assert found == [own if rank == refusing else said for rank in range(4)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_without_the_keys_of_all_ranks(name: str) -> None:
    says = r"attn_mask of shape \(1, 1, 8, 8\) does not broadcast to \(1, 2, 8, 16\)"
    both_raise(ValueError, says, partial(call, name, attn_mask=torch.zeros(8, 8)))


def part_of_a_dtensor(name: str) -> Any:
    tensor = distribute_tensor(torch.zeros(1, 2, 16, 8), dist.init_device_mesh("cpu", (2,)), [Shard(2)])
    return getattr(distributed, name)(tensor, tensor, tensor)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtensors(name: str) -> None:
    both_raise(TypeError, r"query must be this rank's part, .* got a DTensor", part_of_a_dtensor, name)


def mesh_of_two_dimensions() -> Any:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    return call("ring_attention", group=mesh)


def test_a_mesh_of_two_dimensions() -> None:
    both_raise(ValueError, r"group must be a mesh of one dimension, but it has 2", mesh_of_two_dimensions)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_a_group(name: str) -> None:
    says = r"torch\.distributed is not initialised: call .*init_process_group"
    with pytest.raises(RuntimeError, match=says):
        call(name)


def second_derivative() -> None:
    tensor = torch.randn(1, 2, 8, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(ring_attention(tensor, tensor, tensor).sum(), tensor, create_graph=True)
    grad.sum().backward()


def test_second_derivatives_are_refused() -> None:
    both_raise(RuntimeError, r"ring_attention has first derivatives only", second_derivative)


def leave_others_waiting(name: str, how: str) -> float:
    """Runs on a rank and returns how long it waits; the last rank dies, or does not call."""
    begin = time.monotonic()
    tensor = torch.zeros(1, 2, 8, 8, requires_grad=True)
    last = dist.get_rank() == dist.get_world_size() - 1
    if how == "dies before the backward":
        out = getattr(distributed, name)(tensor, tensor, tensor)
        if not last:
            with pytest.raises(RuntimeError):
                out.sum().backward()
    elif not last:
        with pytest.raises(RuntimeError):
            call(name)
    if last and how != "never comes":
        os._exit(1)
    return time.monotonic() - begin


@pytest.mark.parametrize(
    ("name", "how", "count"),
    [
        ("ring_attention", "never comes", 2),
        pytest.param("ulysses_attention", "never comes", 3, marks=pytest.mark.thorough),
        ("ulysses_attention", "dies before the backward", 2),
        pytest.param("ring_attention", "dies before the backward", 3, marks=pytest.mark.thorough),
        pytest.param("ring_attention", "dies", 3, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_is_missing(name: str, how: str, count: int) -> None:
    """The other ranks get an error within the group's timeout, apart from starting and ending processes."""
    with group_of(count, timeout=3) as several:
        *waited, last = several.outcomes(leave_others_waiting, name, how)
    assert isinstance(last, float if how == "never comes" else EOFError)
    for outcome in waited:
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome < 20


def one_group_twice(name: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    call("ulysses_attention", group=mesh, ring_group=mesh if name == "the same" else None)
    if name == "three dimensions":
        distributed.context_parallel(dist.init_device_mesh("cpu", (1, 1, 2)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("the same", r"group and ring_group must be two dimensions of a mesh, .* but they share 2"),
        ("three dimensions", r"group must be a mesh of one dimension, but it has 3"),
    ],
)
def test_meshes_that_do_not_fit(name: str, message: str) -> None:
    both_raise(ValueError, message, one_group_twice, name)


def there_and_back(length: int, dim: int, layout: Any) -> None:
    shape = [2, 3]
    shape[dim] = length
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    part = shard_sequence(whole, dim, layout=layout).requires_grad_()
    back = unshard_sequence(part, dim, layout=layout)
    assert torch.equal(back, whole)
    (grad,) = torch.autograd.grad((back * whole).sum(), part)
    assert torch.equal(grad, dist.get_world_size() * part)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [0, 1, 4, 15, 16, 17, 37])
def test_there_and_back(length: int, layout: str) -> None:
    for count in (2, 3):
        ranks(count)(there_and_back, length, 1, layout)
        ranks(count)(there_and_back, length, 0, layout)
