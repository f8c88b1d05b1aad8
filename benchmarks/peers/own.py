"""This package's own peers: the formula in torch operations, and the loops kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfattn_ext import backends, reference, scaled_dot_product_attention
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender

# With this many operations a call of the loops takes about a second.
LOOPS_FLOPS = 1e9


def _prepare_formula(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    """Prepares the formula in plain torch operations, with its (L, S) matrices."""
    if case.dropout:
        raise NotImplementedError("the formula needs the dropout pattern from its caller")
    window = -1 if case.window is None else case.window

    def call() -> Tensor:
        return reference.attention(
            tensors.query,
            tensors.key,
            tensors.value,
            tensors.mask,
            is_causal=case.causal,
            window_size=(window, -1),
            query_offset=case.query_offset,
        ).out

    return call


def _prepare_loops(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    """Prepares this package's loops kernel, plain C++ loops over queries, keys and dimensions."""
    if case.flops() > LOOPS_FLOPS:
        raise NotImplementedError(
            f"the loops are timed up to {LOOPS_FLOPS:.0e} operations; more takes minutes"
        )
    window = -1 if case.window is None else case.window

    def call() -> Tensor:
        with backends.use("loops"):
            return scaled_dot_product_attention(
                tensors.query,
                tensors.key,
                tensors.value,
                tensors.mask,
                case.dropout,
                case.causal,
                enable_gqa=True,
                window_size=(window, -1),
                query_offset=case.query_offset,
            )

    return call


FORMULA = Contender("formula", _prepare_formula)
LOOPS = Contender("loops", _prepare_loops)
