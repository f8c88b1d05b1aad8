"""Forwards of the kernel for Hopper: its tiles, head dims, options and items of work.

Some items of work have the queries of several heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import plugin  # noqa: F401  (before the package)

# isort: split
import option_pairs
import torch
from cases import MASKS, Case
from option_pairs import as_case, covering
from torch import Tensor

from . import forward_cases, sequence_cases
from .digests import bytes_of
from .sequence_case import SequenceCase

OPTIONS = {
    **option_pairs.OPTIONS,
    "dtype": [torch.bfloat16, torch.float16],
    # A tile has 128 queries, and 64, 96 or 128 keys. A block takes several items of work, and each has
    # several tiles of keys.
    "length": [(17, 1), (64, 65), (65, 127), (127, 129), (128, 64), (129, 300), (300, 95), (257, 257)],
    "head_counts": [(2, 2), (4, 2), (3, 1)],
    "dims": [(64, 64), (40, 16), (96, 96), (72, 80), (128, 128), (128, 64), (192, 128), (136, 192)],
    "layout": ["contiguous", "transposed", "expanded", "columns"],
    "mask": [None, *MASKS, "bool tiles", "float tiles"],
    "window": [(-1, -1), (70, -1), (-1, 6), (9, 2), (140, 0)],
    "batch": [1, 2],
    "weights": [False],
}

#: Groups of heads of which one item holds several: all heads, or as many as there is room for, so that the
#: last item is smaller. With 127 queries per head there is no room for a second head.
FOLDED = {
    **OPTIONS,
    "length": [(17, 65), (31, 129), (64, 64), (65, 140), (127, 130)],
    "head_counts": [(4, 2), (3, 1), (8, 2), (8, 1)],
    "dims": [(64, 64), (72, 80), (128, 128)],
    "layout": ["contiguous", "transposed", "expanded"],
    "mask": [
        None,
        *("bool", "bool keys", "bool square", "float heads", "float rows", "bfloat16"),
        *("bool tiles", "float tiles", "bool heads"),
    ],
    "window": [(-1, -1), (70, -1), (9, 2)],
}


def cases() -> list[Case]:
    """Every pair of values of two options; calls on the bare path for every head dim; at the end a few cases
    that together run every statement of the kernel, for mutate.py.
    """
    chosen = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
    bare = [
        Case(1, 2, 1, 129 + size // 2, 200, size, value_size, dtype, is_causal=causal, lse=True)
        for size, value_size in (*OPTIONS["dims"], (256, 256), (200, 256))
        for dtype in (torch.bfloat16, torch.float16)
        for causal in (False, True)
    ]
    numbered = [replace(case, seed=len(chosen) + n) for n, case in enumerate(bare)]
    return [*chosen, *numbered, *folded(), *folded_sequences(), *of_statements()]


def folded() -> list[Case]:
    """Heads that share keys, with fewer than 128 queries: with options, and on the bare path."""
    bare = [
        Case(1, heads, kv_heads, queries, 140, size, value_size, torch.bfloat16, is_causal=True, lse=True)
        for queries, (heads, kv_heads) in zip((17, 31, 65, 100), FOLDED["head_counts"], strict=True)
        for size, value_size in ((64, 64), (128, 128), (136, 192), (256, 256))
    ]
    bare += [replace(bare[0], query_offset=offset) for offset in (60, -5, -20)]
    chosen = [as_case(index, row) for index, row in enumerate(covering(FOLDED))]
    return [*chosen, *(replace(case, seed=n) for n, case in enumerate(bare))]


def folded_sequences() -> list[SequenceCase]:
    """Sequences with different numbers of queries, some so few that sm80 takes them, and one batch whose
    longest sequence has too many queries, so that no heads are folded in it.
    """
    several: list[dict[str, Any]] = [
        {"lengths": ((17, 40), (5, 30), (127, 130), (64, 64), (33, 0)), "heads": 2},
        {"lengths": ((31, 129), (65, 70), (16, 90), (0, 4)), "heads": 3},
        {"lengths": ((100, 70), (18, 150)), "heads": 4},
        {"lengths": ((40, 7), (3, 60), (17, 20)), "heads": 8},
        {"lengths": ((128, 64), (33, 40), (3, 20)), "heads": 3},
    ]
    options: list[dict[str, Any]] = [
        {"is_causal": True, "offsets": "end", "sinks": 2},
        {"is_causal": True, "offsets": "each", "alibi": 2, "window": (70, -1), "mask": "float heads"},
        {"dropout_p": 0.3, "mask": "bool heads", "sinks": 1},
        {"mask": "bool tiles", "alibi": 1},
        {"is_causal": True, "offsets": "end"},
    ]
    places: list[dict[str, Any]] = [
        {"form": "packed"},
        {"form": "cache"},
        {"form": "pages", "page_size": 7},
        {"form": "packed cache"},
        {"form": "packed pages"},
        {"form": "packed pages", "page_size": 7},
    ]
    return [
        SequenceCase(
            kv_heads=1, head_dim=64, value_dim=64, dtype=torch.bfloat16, seed=n, **given, **chosen, **place
        ).made()
        for n, place in enumerate(places)
        for given, chosen in zip(several, (*options[n:], *options)[: len(several)], strict=True)
    ]


def of_statements() -> list[Case]:
    """Blocks with several items of work, and items with several tiles of keys: with value dims below 192,
    where weights are computed beside products, and above; on the bare path and with options; NaN in hidden
    places; pages of keys that boxes fit, and pages that they do not fit, after a sequence of few queries,
    which another kernel takes. Heads are folded in these, also for a sequence without keys.
    """
    causal = Case(1, 3, 1, 130, 140, 64, 64, torch.bfloat16, is_causal=True, lse=True)
    wide = replace(causal, heads=2, queries=129, keys=80, head_dim=136, value_dim=192)
    lengths = ((5, 5), (70, 100), (17, 63), (33, 0))
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
    """Asserts that the results are accurate, and that NaN and infinities of a value reach exactly the rows
    that see it. Returns the results.
    """
    if isinstance(case, SequenceCase):
        return sequence_cases.check(case)
    ours = forward_cases.check(case)
    if case.kv_heads < case.heads and case.queries < 128 and case.layout != "columns":
        assert_like_own_keys(case, ours)
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
    assert out[..., sees, :2].isfinite().logical_not().all(), "a row that sees a NaN does not have it"
    assert torch.equal(out[..., ~sees, :], before[..., ~sees, :]), "a hidden value has changed a row"
    assert torch.equal(out[..., 2:], before[..., 2:]), "other columns have changed"
    return ours | {"spoiled": out[..., ~sees, :]}


def assert_like_own_keys(case: Case, ours: dict[str, Tensor]) -> None:
    """Asserts that heads get the bits that they get with keys, and so items of work, of their own."""
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    for name in ("key", "value"):
        tensors[name] = tensors[name].repeat_interleave(case.heads // case.kv_heads, 1)
    own = replace(case, kv_heads=case.heads).run(tensors)
    for name, result in ours.items():
        assert bytes_of(result) == bytes_of(own[name]), f"{name} of heads by themselves"
