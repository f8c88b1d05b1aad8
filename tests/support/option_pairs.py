"""Cases in which every value of every option meets every value of every other one."""

from __future__ import annotations

import itertools
import random

from cases import DTYPES, LAYOUTS, MASKS, Case

OPTIONS = {
    "dtype": list(DTYPES),
    "length": [(1, 1), (7, 13), (16, 64), (33, 65), (49, 129), (3, 200)],
    "head_counts": [(2, 2), (4, 2), (4, 1)],
    "dims": [(16, 16), (64, 64), (5, 9), (33, 1), (80, 48)],
    "layout": list(LAYOUTS),
    "mask": [None, *MASKS],
    "is_causal": [False, True],
    "query_offset": [0, 5, -3],
    "window": [(-1, -1), (4, -1), (-1, 6), (9, 2)],
    "softcap": [0.0, 1.5],
    "alibi": [0, 1, 2],
    "sinks": [False, True],
    "dropout_p": [0.0, 0.3],
    "weights": [False, True],
    "lse": [False, True],
    "statistics": [False, True],
}


def covering(options: dict[str, list]) -> list[dict]:
    """Returns combinations in which every pair of values of two options occurs (greedy, reproducible)."""
    names = list(options)
    open_pairs = {
        ((first, a), (second, b))
        for first, second in itertools.combinations(names, 2)
        for a in range(len(options[first]))
        for b in range(len(options[second]))
    }
    choose = random.Random(0)

    def gained(row: dict[str, int]) -> int:
        return sum(pair in open_pairs for pair in itertools.combinations(row.items(), 2))

    rows = []
    while open_pairs:
        seed_pair = min(open_pairs)
        candidates = []
        for _ in range(12):
            row = dict(seed_pair)
            for name in choose.sample(names, len(names)):
                if name not in row:
                    values = choose.sample(range(len(options[name])), len(options[name]))
                    trial = [
                        {n: row.get(n, value) for n in names if n in row or n == name} for value in values
                    ]
                    row = max(trial, key=gained)
            candidates.append({name: row[name] for name in names})
        best = max(candidates, key=gained)
        open_pairs -= set(itertools.combinations(best.items(), 2))
        rows.append({name: options[name][index] for name, index in best.items()})
    return rows


def as_case(index: int, row: dict) -> Case:
    row = dict(row, seed=index)
    for option, fields in (
        ("length", ("queries", "keys")),
        ("head_counts", ("heads", "kv_heads")),
        ("dims", ("head_dim", "value_dim")),
    ):
        row |= dict(zip(fields, row.pop(option), strict=True))
    return Case(**row)


CASES = [as_case(index, row) for index, row in enumerate(covering(OPTIONS))]
