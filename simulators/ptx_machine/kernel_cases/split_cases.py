"""Few queries and many keys at the edges of splits, on one kernel.

Long sequences are in a batch with sequences of fewer keys than a split has (csrc/cuda/split/split_keys.h).

The cases are checked like those of sequence_cases.py.
"""

from __future__ import annotations

from . import plugin  # noqa: F401  (before the package)

# isort: split
import torch

from .sequence_case import SequenceCase
from .sequence_cases import check, compute

__all__ = ["cases", "check", "compute"]

#: A sequence's keys are split if it has at most this many queries.
FEW_QUERIES = 16
#: Keys of a split, unless that made too many splits.
SPLIT = 256
#: There are at most this many splits; more keys make them longer.
MOST_SPLITS = 64

#: Queries and keys: one query with keys around the edges of splits, and with fewer keys than a split.
EDGES = ((1, SPLIT - 1), (1, SPLIT), (1, SPLIT + 1), (1, 30), (1, 2 * SPLIT), (1, 2 * SPLIT + 1))
#: More queries, up to the most that count as few, and one more than that.
QUERIES = ((2, SPLIT + 1), (16, SPLIT + 64), (17, SPLIT + 64), (3, 0), (0, SPLIT + 1), (5, 7))


def cases() -> list[SequenceCase]:
    """Every dtype, form and option that concerns what splits compute and how they are joined."""
    float64, float32, bfloat16, float16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
    chosen = [
        # These take the bare paths.
        SequenceCase(lengths=EDGES, form="cache", dtype=float64),
        SequenceCase(lengths=EDGES, form="pages", dtype=float32, page_size=7),
        SequenceCase(lengths=QUERIES, form="packed cache", dtype=bfloat16),
        SequenceCase(lengths=QUERIES, form="packed pages", dtype=float16, page_size=128),
        # Sinks and dropout, which join once at the end and not in each split, and rows that see nothing.
        SequenceCase(lengths=EDGES, form="cache", dtype=float32, sinks=2, heads=4, kv_heads=2),
        SequenceCase(lengths=QUERIES, form="packed pages", dtype=float64, sinks=1, heads=3, kv_heads=1),
        SequenceCase(lengths=EDGES, form="pages", dtype=float32, dropout_p=0.3, sinks=1),
        SequenceCase(lengths=QUERIES, form="packed", dtype=float64, dropout_p=0.3, mask="float keys"),
        SequenceCase(lengths=((8, 600), (8, 100)), form="cache", dtype=float32, mask="bool tiles"),
        SequenceCase(lengths=((8, 600), (8, 257)), form="pages", dtype=float16, mask="bool tiles", sinks=1),
        # Whole splits that no query sees, and splits that some queries see.
        SequenceCase(lengths=QUERIES, form="packed cache", dtype=float64, offsets="end", window=(9, 2)),
        SequenceCase(lengths=EDGES, form="pages", dtype=float32, offsets="end", window=(70, 0)),
        SequenceCase(
            lengths=((4, 514), (4, 300)), form="cache", dtype=bfloat16, query_offset=254, window=(3, 0)
        ),
        # Heads that share keys are rows of one block. Here are more heads than a block has room for, so that
        # another block takes the rest, and options that differ from head to head.
        SequenceCase(
            lengths=EDGES, form="pages", dtype=bfloat16, heads=16, kv_heads=2, alibi=2, sinks=2, page_size=7
        ),
        SequenceCase(
            lengths=QUERIES, form="packed pages", dtype=float64, heads=10, kv_heads=2, mask="bool", sinks=2
        ),
        SequenceCase(
            lengths=QUERIES,
            form="packed cache",
            dtype=float32,
            heads=9,
            kv_heads=1,
            layout="transposed",
            head_dim=33,
            value_dim=65,
            mask="float rows",
            offsets="end",
            window=(270, 0),
            dropout_p=0.3,
        ),
        SequenceCase(
            lengths=((1, 300), (1, 90)),
            form="cache",
            dtype=float32,
            heads=70,
            kv_heads=1,
            alibi=1,
            softcap=1.5,
        ),
        # Head dims that blocks share out, that cannot be loaded 16 bytes at a time, or that sm80 does not
        # take.
        SequenceCase(lengths=EDGES, form="cache", dtype=float32, head_dim=33, value_dim=65, softcap=1.5),
        SequenceCase(lengths=EDGES, form="pages", dtype=float64, value_dim=130, alibi=2),
        SequenceCase(lengths=((2, 300), (2, 90)), form="cache", dtype=float32, head_dim=16, value_dim=331),
        SequenceCase(lengths=((1, 400), (1, 90)), form="pages", dtype=bfloat16, head_dim=264, value_dim=264),
        # More keys than the most splits of the least size hold, so that each split becomes longer.
        SequenceCase(
            lengths=((1, MOST_SPLITS * SPLIT + 1), (1, MOST_SPLITS * SPLIT), (1, 9)),
            form="packed cache",
            dtype=float32,
            heads=1,
            kv_heads=1,
        ),
    ]
    return [case.made() for case in chosen]
