"""The table of tolerances of all tests.

The judge is the formula in float64. A result may be at most twice as far from it as the peer is (torch's own
attention, or the formula in the result's dtype), plus a floor for rounding. A distance is the largest
difference over the magnitude of the exact result, or of the terms that it is a sum or difference of, if a
test knows them. This magnitude is at least 1, as inputs of unit variance give terms of that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: A result may have this many times the peer's error.
PEER_FACTOR = 2.0


#: The error that is allowed if the peer has none, relative to the largest exact magnitude. 16-bit floors are
#: half a unit in the last place of the largest element, and that of float32 is a few units. float64 has one
#: because its judge makes rounding errors, too.
FLOORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def distance(result: Tensor, exact: Tensor, terms: float = 1.0) -> float:
    """Returns the largest difference over the largest exact magnitude, that of the terms, or 1."""
    if exact.numel() == 0:
        return 0.0
    finite = torch.isfinite(exact)
    exact, result = exact[finite], result[finite].double()
    if exact.numel() == 0:
        return 0.0
    return float((result - exact).abs().max() / exact.abs().max().clamp(min=max(terms, 1.0)))


def assert_accurate(
    name: str,
    result: Tensor,
    exact: Tensor,
    peer: Tensor | None = None,
    terms: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Asserts the bound of this module; the places of NaN and infinities must be those of the exact result.

    ``dtype`` is that of the computation; the coarser of it and the result's counts.
    """
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = int((test(result) != test(exact)).sum())
        assert wrong == 0, f"{name}: {wrong} of {result.numel()} elements differ in being {kind}"
    error = distance(result, exact, terms)
    dtype = max((dtype or result.dtype, result.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    bound = FLOORS[dtype]
    if peer is not None:
        bound += PEER_FACTOR * distance(peer, exact, terms)
    assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"
