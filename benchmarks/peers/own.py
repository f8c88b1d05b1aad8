"""The formula in torch operations, and this package's own loops."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfattn_ext import backends, reference, scaled_dot_product_attention
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender

# About a second for each call of the loops.
LOOPS_FLOPS = 1e9


def _prepare_formula(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    """The formula in plain torch operations, with its (L, S) matrices."""
    if case.dropout:
        raise NotImplementedError("the formula takes the pattern of the dropout from its caller")
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
    """This package's own loops over queries, keys and dimensions: the C++ yardstick."""
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
