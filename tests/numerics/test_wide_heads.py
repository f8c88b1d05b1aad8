"""Mean errors of float32 over many rows, for long sums over the head dim.

The error of one long chain of additions stays below the largest errors that other tests allow, but the
softmax of large scores multiplies it.
"""

from __future__ import annotations

import pytest
import torch
from comparisons import attend, exact_and_peer, results_of
from conftest import KERNELS, forced
from tolerances import PEER_FACTOR
from torch import Tensor

from selfattn_ext import attention_scores, reference

#: The kernels that multiply float32 numbers directly; with AMX, a product is the sum of six of pieces.
PLAIN = [kernel for kernel in KERNELS if kernel != "fused-amx"]
HEAD_DIMS = (64, 128, 192, 320, 1000)
#: Numbers of queries: decoding, and strips of one vector of queries, full or not, and of several.
LENGTHS = (1, 4, 5, 9, 29)
KEYS = 24


def root_mean_squares(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((result.double() - exact[name]).square().mean().sqrt())
        for name, result in results.items()
    }


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_mean_errors(head_dim: int, scale: float | None) -> None:
    """One test runs every kernel in turn, as the exact results take longest."""
    for length in LENGTHS:
        # Every length has many rows, as with scale 1 a few rows make most of the error.
        heads = (40 + 16000 // head_dim) // length + 1
        shapes = (length, KEYS, KEYS, length)
        *points, incoming = (torch.randn(1, heads, rows, head_dim) for rows in shapes)
        exact, peer = exact_and_peer(points, {"scale": scale}, incoming)
        pair = points[:2]
        exact = exact | {"scores": reference.attention_scores(*(point.double() for point in pair), scale)}
        peer = peer | {"scores": reference.attention_scores(*pair, scale)}
        allowed = root_mean_squares(peer, exact)
        for kernel in PLAIN:
            with forced(kernel):
                found = results_of(attend, points, incoming, scale=scale, return_weights=True)
                found["scores"] = attention_scores(*pair, scale)
            for name, error in root_mean_squares(found, exact).items():
                assert error <= PEER_FACTOR * allowed[name], (
                    f"{name} of {length} queries on {kernel}: {error:.3g}, the formula {allowed[name]:.3g}"
                )
