"""Forwards of the kernel for Hopper in the emulator: its tiles, head dims, options and items of work.

    export PYTHONPATH=tests SELFATTN_KERNEL=sm90 SELFATTN_EMULATOR_CAPABILITY=90
    python -m emulator.hopper_cases [EVERY [FIRST [MOST]]]

prints a digest of the results of each: see run_cases.py.
"""

from __future__ import annotations

from dataclasses import replace

from . import plugin  # noqa: F401  (before the package)

# isort: split
import test_options_pairwise
import torch
from cases import MASKS, Case
from test_options_pairwise import as_case, covering
from torch import Tensor

from . import forward_cases, run_cases

OPTIONS = {
    **test_options_pairwise.OPTIONS,
    "dtype": [torch.bfloat16, torch.float16],
    # A tile has 128 queries, and 64, 96 or 128 keys. A block takes several items of work, and these several
    # tiles of keys.
    "length": [(17, 1), (64, 65), (65, 127), (127, 129), (128, 64), (129, 300), (300, 95), (257, 257)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(64, 64), (40, 16), (96, 96), (72, 80), (128, 128), (128, 64), (192, 128), (136, 192)],
    "layout": ["contiguous", "transposed", "expanded", "columns"],
    "mask": [None, *MASKS, "bool tiles", "float tiles"],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2), (140, 0)],
    "batch": [1, 2],
    "weights": [False],
}


def cases() -> list[Case]:
    """Every pair of values of two options in some case; then calls on the plain path for every head dim."""
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    plain = [
        Case(1, 2, 1, 129 + size // 2, 200, size, value_size, dtype, is_causal=causal, lse=True)
        for size, value_size in (*OPTIONS["dims"], (256, 256), (200, 256))
        for dtype in (torch.bfloat16, torch.float16)
        for causal in (False, True)
    ]
    return [*chosen, *(replace(case, seed=len(chosen) + n) for n, case in enumerate(plain))]


@torch.no_grad()
def check(case: Case) -> dict[str, Tensor]:
    """Asserts that the results are accurate, and that NaN and infinities of a value reach those who see it,
    and nobody else. Returns the results.
    """
    ours = forward_cases.check(case)
    if not case.is_causal or case.mask is not None or case.layout == "expanded" or case.dropout_p > 0:
        return ours
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    key = case.keys // 2
    position = torch.arange(case.queries) + case.query_offset
    left = case.window[0] if case.window[0] >= 0 else case.keys + case.queries
    sees = (key <= position) & (key >= position - left)
    tensors["value"][..., key, 0] = torch.nan
    tensors["value"][..., key, 1] = torch.inf
    spoiled = case.run(tensors)
    out, before = spoiled["out"], ours["out"]
    assert out[..., sees, :2].isfinite().logical_not().all(), "a row that sees a NaN has not got it"
    assert torch.equal(out[..., ~sees, :], before[..., ~sees, :]), "a row has got what is hidden from it"
    assert torch.equal(out[..., 2:], before[..., 2:]), "other columns have changed"
    return ours | {"spoiled": out[..., ~sees, :]}


if __name__ == "__main__":
    run_cases.main(cases(), check)
