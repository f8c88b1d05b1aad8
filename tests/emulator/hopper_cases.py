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

from . import forward_cases, run_cases, sequence_cases
from .sequence_case import SequenceCase

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
    """Every pair of values of two options in some case; calls on the plain path for every head dim; at the
    end a few that together run every statement of the kernel, which mutate.py judges it by.
    """
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    plain = [
        Case(1, 2, 1, 129 + size // 2, 200, size, value_size, dtype, is_causal=causal, lse=True)
        for size, value_size in (*OPTIONS["dims"], (256, 256), (200, 256))
        for dtype in (torch.bfloat16, torch.float16)
        for causal in (False, True)
    ]
    return [*chosen, *(replace(case, seed=len(chosen) + n) for n, case in enumerate(plain)), *of_statements()]


def of_statements() -> list[Case]:
    """Several items of work for a block, and several tiles of keys for an item: with weights computed beside
    products (value dims below 192) and not, on the plain path and with options; hidden NaN; keys in pages
    that boxes fit, and in pages that they do not, behind a sequence of few queries, which is left to others.
    """
    causal = Case(1, 3, 1, 130, 140, 64, 64, torch.bfloat16, is_causal=True, lse=True)
    wide = replace(causal, heads=2, queries=129, keys=80, head_dim=136, value_dim=192)
    lengths = ((5, 5), (70, 100), (17, 63))
    pages = SequenceCase(
        heads=2,
        kv_heads=1,
        head_dim=64,
        value_dim=64,
        dtype=torch.bfloat16,
        lengths=lengths,
        form="packed pages",
    )
    return [
        causal,
        wide,
        replace(causal, alibi=1),
        replace(wide, alibi=1),
        replace(wide, queries=33, keys=200, is_causal=False, alibi=1),
        replace(causal, is_causal=False, mask="bool tiles"),
        replace(pages, page_size=7).made(),
        pages.made(),
    ]


@torch.no_grad()
def check(case: Case) -> dict[str, Tensor]:
    """Asserts that the results are accurate, and that NaN and infinities of a value reach those who see it,
    and nobody else. Returns the results.
    """
    if isinstance(case, SequenceCase):
        return sequence_cases.check(case)
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
