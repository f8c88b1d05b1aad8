"""Mean errors of float32 over many rows, for long sums over the head dim.

The error of one long chain of additions stays below the largest errors that other tests allow, but the
softmax of large scores multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import KERNELS, forced
from tolerances import PEER_FACTOR
from torch import Tensor

from selfattn_ext import attention_scores, reference, scaled_dot_product_attention

#: The kernels that multiply float32 numbers directly; with AMX, a product is the sum of six of pieces.
PLAIN = [kernel for kernel in KERNELS if kernel != "fused-amx"]
HEAD_DIMS = (64, 128, 192, 320, 1000)
#: Numbers of queries: decoding, and strips of one vector of queries, full or not, and of several.
LENGTHS = (1, 4, 5, 29)
KEYS = 24
NAMES = ("out", "weights", "lse", "scores", "query", "key", "value")


def results(
    attention: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], incoming: Tensor
) -> list[Tensor]:
    """Returns the results named in NAMES, gradients last."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    found = attention(*leaves)
    return [part.detach() for part in found] + list(torch.autograd.grad(found[0], leaves, incoming))


def root_mean_squares(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((one.double() - other).square().mean().sqrt())
        for one, other in zip(results, exact, strict=True)
    ]


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_mean_errors(head_dim: int, scale: float | None) -> None:
    """One test runs every kernel in turn, as the exact results take longest."""

    def ours(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        found = scaled_dot_product_attention(
            query, key, value, scale=scale, return_weights=True, return_lse=True
        )
        return *found, attention_scores(query, key, scale)

    def formula(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        found = reference.attention(query, key, value, scale=scale)
        return found.out, found.weights, found.lse, reference.attention_scores(query, key, scale)

    for length in LENGTHS:
        # Every length has many rows, as with scale 1 a few rows make most of the error.
        heads = (40 + 16000 // head_dim) // length + 1
        shapes = (length, KEYS, KEYS, length)
        *points, incoming = (torch.randn(1, heads, rows, head_dim) for rows in shapes)
        exact = results(formula, [point.double() for point in points], incoming.double())
        peer = root_mean_squares(results(formula, points, incoming), exact)
        for kernel in PLAIN:
            with forced(kernel):
                errors = root_mean_squares(results(ours, points, incoming), exact)
            for name, error, theirs in zip(NAMES, errors, peer, strict=True):
                assert error <= PEER_FACTOR * theirs, (
                    f"{name} of {length} queries on {kernel}: {error:.3g}, the formula {theirs:.3g}"
                )
