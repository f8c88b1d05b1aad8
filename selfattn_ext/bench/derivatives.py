"""Cases of forward mode and second derivatives, by these kernels and by torch's formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfattn_ext import ops, scaled_dot_product_attention
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import OURS, Call, Contender

Order = Literal["jvp", "second order"]

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class DerivativeCase(Case):
    """A derivative of self-attention in a direction that moves query, key and value.

    It is out with its tangent, or the backward pass of a backward pass alone, over and over on one graph.
    """

    order: Order = "jvp"

    @property
    def has_formula(self) -> bool:
        return False

    @property
    def direction(self) -> str:
        return self.order

    def flops(self) -> float:
        """Returns the operations of 6 products in forward mode, of 12 in second order.

        In forward mode they are the 2 of a forward pass, each also with a tangent of either factor; in second
        order 5 are for the tiles and 7 for the results.
        """
        return super().flops() * (3 if self.order == "jvp" else 6)

    def further(self) -> dict[str, Any]:
        return {"order": self.order}


def _by_torch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Calls torch's formula (the math backend), the only one of its ways that has these derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, **options)


def _options(case: Case) -> dict[str, Any]:
    return {"is_causal": True} if case.causal else {}


def _tangents(tensors: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(each.shape, generator=generator).to(each.dtype)
        for each in (tensors.query, tensors.key, tensors.value)
    )
    return query, key, value


def _prepare(attention: Attention) -> Callable[[Case, Inputs], Call]:
    """Prepares the functions that users call."""

    def prepare(case: Case, tensors: Inputs) -> Call:
        assert isinstance(case, DerivativeCase)
        options, tangents = _options(case), _tangents(tensors)
        primals = (tensors.query, tensors.key, tensors.value)

        def jvp() -> Tensor:
            pushed: Any = torch.func.jvp(lambda *given: attention(*given, **options), primals, tangents)
            return pushed[1]  # type: ignore[no-any-return]

        if case.order == "jvp":
            return jvp
        leaves, grad_out = _leaves(primals), tensors.grad_out.clone().requires_grad_()
        out = attention(*leaves, **options)
        gradients = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
        return lambda: torch.autograd.grad(gradients, (grad_out, *leaves), tangents, retain_graph=True)[0]

    return prepare


def _prepare_operator(case: Case, tensors: Inputs) -> Call:
    """Prepares the operators alone, without torch's transforms and graphs."""
    assert isinstance(case, DerivativeCase)
    primals, scale, options = (tensors.query, tensors.key, tensors.value), case.head_dim**-0.5, _options(case)
    names = ("tangent_query", "tangent_key", "tangent_value")
    options |= dict(zip(names, _tangents(tensors), strict=True))
    rounds = case.dtype.itemsize == 2
    jvp = ops.attention_jvp(*primals, scale, need_residual=rounds, **options)
    if case.order == "jvp":
        return lambda: ops.attention_jvp(*primals, scale, need_residual=rounds, **options)[4]
    out, row_max, row_sum, residual = jvp[:4]
    if rounds:
        options["out_residual"] = residual
    given = (tensors.grad_out, *primals, out, row_max, row_sum, scale)
    return lambda: ops.attention_backward_backward(*given, **options)[6]


def _prepare_plain(case: Case, tensors: Inputs) -> Call:
    """Prepares the pass of this package that the case extends: a forward pass, or a backward pass alone."""
    assert isinstance(case, DerivativeCase)
    options = _options(case)
    if case.order == "jvp":
        return lambda: scaled_dot_product_attention(tensors.query, tensors.key, tensors.value, **options)
    leaves = _leaves((tensors.query, tensors.key, tensors.value))
    query, key, value = leaves
    out = scaled_dot_product_attention(query, key, value, **options)
    return lambda: torch.autograd.grad(out, leaves, tensors.grad_out, retain_graph=True)[0]


def _leaves(primals: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.detach().requires_grad_() for each in primals)


OPERATOR = Contender("operator", _prepare_operator)
FORMULA = Contender("formula", _prepare(_by_torch))
PLAIN = Contender("plain pass", _prepare_plain)

CONTENDERS = (Contender(OURS.name, _prepare(scaled_dot_product_attention)), OPERATOR, FORMULA, PLAIN)
