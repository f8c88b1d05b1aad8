"""Results of attention over parts of the keys are put together to the result over all keys.

Each part gives out, the maximum of a row's scores and the sum of their exponentials relative to it; and, if
statistics are wanted, row_top and row_mean of :mod:`selfattn_ext.autograd.statistics`. The sums are in
float32, or float64 for float64: rounding to 16 bits would cost precision with each part.

:func:`selfattn_ext.merge_attention` shares none of this. It gets the lse of a row, which rounds away what
distinguishes large scores; here the maximum and the sum come apart, and nothing is lost. There, whole results
are merged at once and recorded for gradients; here parts for some of the rows come one after the other, are
added in place, and take their statistics along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..arguments import OptionalTensor
from ..reference import accumulation_dtype

__all__ = ["RowResults"]


class RowResults:
    """The results of rows (B, H, L), over no keys at first."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        dtype = accumulation_dtype(query.dtype)
        shape = query.shape[:3]
        self.out = query.new_zeros(*shape, value_dim, dtype=dtype)
        self.row_max = query.new_full(shape, -torch.inf, dtype=dtype)
        self.row_sum = query.new_zeros(shape, dtype=dtype)
        self.row_top = self.row_max.clone()
        self.row_mean = self.row_sum.clone()

    def add(
        self,
        rows: slice,
        out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        residual: OptionalTensor,
        row_top: OptionalTensor = None,
        row_mean: OptionalTensor = None,
    ) -> None:
        """Adds the results over further keys, for some of the rows."""
        out = out.to(self.out.dtype)
        if residual is not None and residual.numel():
            out = out + residual
        before_max, before_sum = self.row_max[:, :, rows], self.row_sum[:, :, rows]
        together = torch.maximum(before_max, row_max)
        # Where neither has seen a key, -inf minus -inf would be NaN.
        base = torch.where(together == -torch.inf, 0.0, together)
        before, added = before_sum * torch.exp(before_max - base), row_sum * torch.exp(row_max - base)
        total = before + added
        share = torch.where(total == 0, 0.0, added / total)
        kept = torch.where(total == 0, 0.0, before / total)
        if row_top is not None and row_mean is not None:
            top, mean = self.row_top[:, :, rows], self.row_mean[:, :, rows]
            # Means are counted from the maximum of both parts. One that has no share may be anything.
            earlier = torch.where(kept == 0, 0.0, kept * (mean + (before_max - base)))
            mean.copy_(earlier + torch.where(share == 0, 0.0, share * (row_mean + (row_max - base))))
            top.copy_(torch.maximum(top, row_top))
        share, kept = share.unsqueeze(-1), kept.unsqueeze(-1)
        results = self.out[:, :, rows]
        # A result that has no share may be anything, NaN too.
        mine = torch.where(kept == 0, 0.0, kept * results)
        results.copy_(mine + torch.where(share == 0, 0.0, share * out))
        self.row_max[:, :, rows] = together
        self.row_sum[:, :, rows] = total

    def add_sinks(self, sinks: Tensor) -> None:
        """Adds a logit for each head (H,) or (B, H), without a value."""
        logits = sinks.to(self.row_max.dtype).expand(self.row_max.shape[:2]).unsqueeze(-1)
        nothing = torch.zeros((), dtype=self.out.dtype, device=self.out.device)
        self.add(
            slice(None),
            nothing.expand_as(self.out),
            logits.expand_as(self.row_max),
            torch.ones_like(self.row_sum),
            None,
            torch.full_like(self.row_max, -torch.inf),
            torch.zeros_like(self.row_sum),
        )

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, OptionalTensor]:
        """out in that dtype, and what its rounding took away where it has 16 bits."""
        out = self.out.to(dtype)
        if dtype not in ops.SIXTEEN_BITS:
            return out, None
        return out, (self.out - out).to(dtype)
