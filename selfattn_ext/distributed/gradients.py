"""The gradients of rows whose results are known, from meetings of spans."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..arguments import Keywords, OptionalTensor
from ..autograd import statistics
from ..reference import accumulation_dtype
from .plan import Meeting, part_of_mask, part_of_slopes

__all__ = ["OwnGradients", "Rows"]


class Rows:
    """This rank's rows (B, H, L) as a backward meets them: the gradient of out, what the forward saved of all
    keys together, and the keyword arguments of a backward that have a number for each row.
    """

    def __init__(self, grad_out: Tensor, saved: statistics.Rows, of_rows: Keywords) -> None:
        self._grad_out, self._of_rows = grad_out, of_rows
        self._out, self._row_max, self._row_sum, self._residual = saved[:4]

    def pull(
        self, query: Tensor, key: Tensor, value: Tensor, meeting: Meeting, scale: float, options: Keywords
    ) -> tuple[Tensor, ...]:
        """The gradients of query, key, value, mask and slopes that one meeting gives. ``query`` has all
        rows.
        """
        rows = meeting.query.rows

        def of_rows(tensor: Tensor) -> Tensor:
            return tensor[:, :, rows].contiguous()

        if self._residual is not None:
            options["out_residual"] = of_rows(self._residual)
        options |= {name: of_rows(numbers) for name, numbers in self._of_rows.items()}
        return ops.attention_backward(
            of_rows(self._grad_out), query[:, :, rows], key, value, of_rows(self._out),
            of_rows(self._row_max), of_rows(self._row_sum), scale, **options,
        )[:5]  # fmt: skip

    def of_sinks(self, sinks: OptionalTensor) -> OptionalTensor:
        """The gradient of sinks (B | 1, H) that comes from this rank's rows."""
        if sinks is None:
            return None
        out = self._out.to(self._row_max.dtype)
        if self._residual is not None:
            out = out + self._residual
        delta = (self._grad_out * out).sum(-1) + self._of_rows.get("grad_row", 0.0)
        weights = torch.exp(sinks.unsqueeze(-1) - self._row_max) / self._row_sum
        of_heads = (weights * (self._of_rows.get("grad_sink", 0.0) - delta)).sum(-1)
        return of_heads if sinks.size(0) == of_heads.size(0) else of_heads.sum(0, keepdim=True)


class OwnGradients:
    """The gradients of what a rank keeps: its queries, its rows of the mask, and slopes."""

    def __init__(self, query: Tensor, mask: OptionalTensor, slopes: OptionalTensor) -> None:
        self.query = zeros(query)
        self.mask = None if mask is None else zeros(mask)
        self.slopes = None if slopes is None else torch.zeros_like(slopes)

    def add(self, meeting: Meeting, query: Tensor, mask: Tensor, slopes: Tensor) -> None:
        """Adds the gradients of a meeting."""
        self.query[:, :, meeting.query.rows] += query
        if self.mask is not None:
            part_of_mask(self.mask, meeting).add_(mask)
        if self.slopes is not None:
            part_of_slopes(self.slopes, meeting).add_(slopes)


def zeros(tensor: Tensor) -> Tensor:
    """Zeros of a tensor's shape, in the dtype in which sums are computed."""
    dtype = accumulation_dtype(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
