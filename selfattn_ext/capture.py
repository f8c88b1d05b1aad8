"""Whether a CUDA graph is recording the calls that are made.

While it records, no kernel runs: there are no values that Python could look at, and asking for one ends the
recording with an error. So code that decides by values has to ask here first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_capturing"]


def is_capturing(tensor: Tensor) -> bool:
    """Tells whether a CUDA graph records what is done with the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
