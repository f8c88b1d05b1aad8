"""JAX: jax.nn.dot_product_attention, compiled by XLA for the CPU, with its gradients.

XLA makes its threads when JAX starts, as many as the variable NPROC says. The first row that JAX computes
sets it to torch's number of threads, and rows with another number are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peers.common import check_plain, load
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender, rules


def _prepare(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    check_plain(case, backward=True)
    if case.dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(f"on the CPU it has no {case.dtype_name} products with torch's defaults")
    if case.value_dimension != case.head_dim:
        raise NotImplementedError("values have to be as wide as queries")
    if case.backward and case.mask == "gradient":
        raise NotImplementedError("the gradient of a mask is not compared")
    jax = _start()
    is_causal, mask = rules(case, tensors)
    rest: dict[str, Any] = {"is_causal": is_causal}
    if mask is not None:
        rest["mask" if mask.dtype == torch.bool else "bias"] = _to_jax(mask.detach()[None, None])

    def attention(*inputs: Any) -> Any:
        return jax.nn.dot_product_attention(*inputs, **rest)

    found = [_to_jax(_swapped(tensor)) for tensor in (tensors.query, tensors.key, tensors.value)]
    if not case.backward:
        compiled = jax.jit(attention)
        return lambda: _to_torch(compiled(*found))
    with_gradient = jax.jit(lambda *inputs: jax.vjp(attention, *inputs))
    gradient = jax.jit(lambda pull, grad_out: pull(grad_out))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *leaves: Tensor) -> Tensor:
            out, ctx.pull = with_gradient(*found)
            return _to_torch(out)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
            return tuple(map(_to_torch, gradient(ctx.pull, _to_jax(_swapped(grad_out)))))

    return lambda: Attention.apply(tensors.query, tensors.key, tensors.value)


def _start() -> Any:
    threads = torch.get_num_threads()
    started = int(os.environ.setdefault("NPROC", str(threads)))
    if started != threads:
        raise NotImplementedError(
            f"it started with {started} threads (NPROC), and this row asks for {threads}"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    load("jax.dlpack", "jax")
    return load("jax", "jax")


def _swapped(tensor: Tensor) -> Tensor:
    """Returns (B, H, T, D) as (B, T, H, D), JAX's layout."""
    return tensor.detach().transpose(1, 2).contiguous()


def _to_jax(tensor: Tensor) -> Any:
    return load("jax.numpy", "jax").from_dlpack(tensor)


def _to_torch(array: Any) -> Tensor:
    return torch.from_dlpack(array.block_until_ready()).transpose(1, 2)


JAX = Contender("jax", _prepare)
