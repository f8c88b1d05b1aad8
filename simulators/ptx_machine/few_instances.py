"""The instances of kernels in a library that compiles fast, and cases in the form that these instances take.

One dtype and one or two head dims of each kernel run nearly every statement of its sources.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases import Case

#: The instances, by the names of their sources.
FEW = (
    *(f"row_gradients_{dtype}" for dtype in ("float32", "bfloat16")),
    *(f"simt_{part}_float32" for part in ("forward", "backward", "mask_gradient", "tangents", "statistics")),
    *(f"simt_selected_{part}_float32" for part in ("forward", "backward")),
    *("simt_tangent_mask_float32", "simt_captured_gradient", "simt_scores_float32"),
    # Tensor cores leave gradients of returned weights to these.
    *(f"simt_{part}_bfloat16" for part in ("scores", "forward", "backward", "mask_gradient", "statistics")),
    *("sm80_bfloat16_64", "sm80_float32_64", "sm80_backward_bfloat16_64", "sm80_mask_bfloat16_64"),
    *(f"sm90_{part}bfloat16_{dims}" for part in ("", "backward_") for dims in ("64", "192_128", "192")),
)
#: The head dims that sm80's instance takes, and the narrower one of sm90.
ABOVE, MOST = 32, 64
#: The head dims that the wider instances of sm90 take.
WIDE_ABOVE, WIDE_MOST = 128, 192
#: Layouts that boxes can copy.
MAPPED = ("contiguous", "transposed")


def fitted(case: Case, kernel: str, forward: bool = False) -> Case:
    """The case with a dtype and head dims of an instance. sm80 has one of float32 for forwards alone."""
    import torch

    if kernel == "simt":
        return replace(case, dtype=torch.float32)
    dims = case.head_dim, case.value_dim
    if kernel == "sm90" and max(dims) > WIDE_ABOVE and case.layout in MAPPED:
        # There is no instance so wide of sm80, which computes weights and gradients of masks, and takes what
        # boxes cannot copy.
        mask = case.mask if case.mask is None or case.mask.startswith("bool") else "bool"
        case = replace(case, weights=False, mask=mask, grad_layout=MAPPED[0])
        fit = min(dims[0], WIDE_MOST), min(dims[1], WIDE_MOST)
    else:
        head_dim = _halved(dims[0])
        fit = head_dim if head_dim > ABOVE else ABOVE + max(head_dim, 1), _halved(dims[1])
    dtype = torch.float32 if forward and case.dtype == torch.float32 else torch.bfloat16
    return replace(case, dtype=dtype, head_dim=fit[0], value_dim=fit[1])


def _halved(dim: int) -> int:
    return dim if dim <= MOST else _halved(dim // 2)
