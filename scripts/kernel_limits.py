"""The limits that scripts/cuda_compile_check.py holds each compiled CUDA kernel to."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

#: Memory that one compilation may take, so that a small machine can run one for each of its cores.
COMPILER_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Limit:
    """The most registers per thread that a kernel may use, and whether its products must be HMMA.

    A kernel for Hopper is limited in the registers that its threads are launched with, which ptxas reports
    even if they hand some over later. Its products must be HGMMA, and its copies by tensor maps UTMALDG.
    """

    registers: int
    tensor_cores: bool = False
    hopper: bool = False


#: Kernels that must contain stores of 16 bytes, which write 16-bit results if their strides allow it.
STORES_OF_16_BYTES = (
    "sm80/*float16_*/forward_kernel",
    "sm90/*/forward_kernel",
    "backward/sm??_backward_*float16_*/backward_kernel",
)


#: Limits by folder/file/function, the file without its suffix; the first pattern that matches counts.
LIMITS = {
    "cuda/device_code/*": Limit(registers=32),
    "rows/*": Limit(registers=64),
    "cache/*": Limit(registers=64),
    "function/*": Limit(registers=64),
    # Three blocks of 128 threads fit. It needs this many for the function that it calls if a sum has
    # overflowed; float16's takes 56.
    "split/merge_splits/*": Limit(registers=168),
    "split/*": Limit(registers=72),  # seven blocks of 128 threads
    "simt/*/*forward*": Limit(registers=240),  # two blocks of 128 threads fit a multiprocessor
    "simt/*/*softmax*": Limit(registers=128),
    "simt/simt_mask_gradient_float64/*": Limit(registers=240),
    "simt/*/mask_gradient*": Limit(registers=168),  # three blocks
    "simt/*/*gradient*": Limit(registers=240),  # two
    # On sm_100 it takes 242; up to 256, two blocks fit all the same.
    "simt/simt_tangents_float64/*": Limit(registers=248),
    "simt/*/tangent*": Limit(registers=240),  # two
    "simt/*/row_statistics*": Limit(registers=240),  # two
    "simt/*/key_sums*": Limit(registers=168),  # three
    "simt/*/*": Limit(registers=128),
    "mask/*/*": Limit(registers=96),
    "backward/sm80_mask*": Limit(registers=248, tensor_cores=True),  # two blocks of 128 threads
    "sm90/*/*": Limit(registers=168, hopper=True),  # one block of 384 threads
    "sm80/*float32_32/*": Limit(registers=232, tensor_cores=True),  # two blocks of 128 threads, as with 200
    "sm80/*_32/*": Limit(registers=200, tensor_cores=True),
    "sm80/*float32_64/*": Limit(registers=240, tensor_cores=True),  # two
    "sm80/*_64/*": Limit(registers=248, tensor_cores=True),
    "sm80/*_96/*": Limit(registers=252, tensor_cores=True),
    "sm80/*/*": Limit(registers=255, tensor_cores=True),
    "backward/sm90_*": Limit(registers=168, hopper=True),  # as the forward
    "backward/*statistics/*": Limit(registers=32),
    "backward/*/*": Limit(registers=255, tensor_cores=True),
}


def stores_16_bytes(kernel: str) -> bool:
    """Tells whether a kernel, given as folder/file/function, is one of STORES_OF_16_BYTES."""
    return any(fnmatchcase(kernel, pattern) for pattern in STORES_OF_16_BYTES)


def limit_of(kernel: str) -> Limit | None:
    """Returns the limit of a kernel, given as folder/file/function, None if the table has none."""
    return next((limit for pattern, limit in LIMITS.items() if fnmatchcase(kernel, pattern)), None)
