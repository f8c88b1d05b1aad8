"""Offsets, lengths, positions and page numbers that lead outside of a tensor.

The operators refuse them before a kernel reads or writes by them, even if no public function called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from selfattn_ext import ops

MOST, LEAST = 2**63 - 1, -(2**63)

#: 3 packed sequences have 9 rows. A batch has 3 times 2 queries, and caches of 8 rows or 5 pages of 4.
PACKED = torch.randn(1, 2, 9, 8)
QUERY, CACHE, PAGES = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 8, 8), torch.randn(5, 2, 4, 8)
STATISTICS = torch.ones(3, 2, 2)


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def table(*pages: int) -> Tensor:
    return torch.tensor(pages, dtype=torch.int32).reshape(3, 2)


STARTS, LENGTHS, TABLE = index(0, 2, 2, 9), index(3, 0, 8), table(0, 1, 2, 3, 4, 1)


@dataclass
class Calls:
    """Calls that must all refuse, and leave the caches unchanged."""

    calls: list[Callable[[], Any]]
    caches: list[Tensor] = field(default_factory=list)

    def check(self, text: str) -> None:
        before = [cache.clone() for cache in self.caches]
        for call in self.calls:
            with pytest.raises(ValueError, match=text):
                call()
        assert all(torch.equal(cache, kept) for cache, kept in zip(self.caches, before, strict=True))


def packed(**changes: Any) -> Calls:
    """Returns calls of all three passes, each of which must check by itself."""
    given: dict[str, Any] = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    given |= {"max_seqlen_q": 7, "max_seqlen_k": 7, **changes}
    rows = torch.ones(1, 2, 9)
    forward = [
        lambda: ops.attention_forward(PACKED, PACKED, PACKED, 1.0, **given),
        lambda: ops.attention_weights(PACKED, PACKED, rows, rows, 1.0, **given),
    ]
    four = (PACKED,) * 5
    return Calls([*forward, lambda: ops.attention_backward(*four, rows, rows, 1.0, **given)])


def own_masks(*shapes: int, numbers: Tensor = torch.ones(1)) -> Calls:  # noqa: B008
    return packed(attn_mask=numbers, mask_shapes=list(shapes))


def cached(paged: bool = False, **changes: Any) -> Calls:
    given: dict[str, Any] = {"seqlens_k": LENGTHS} | ({"block_table": TABLE} if paged else {}) | changes
    keys = PAGES if paged else CACHE
    return Calls(
        [
            lambda: ops.attention_forward(QUERY, keys, keys, 1.0, **given),
            lambda: ops.attention_weights(QUERY, keys, STATISTICS, STATISTICS, 1.0, **given),
        ]
    )


def append(paged: bool = False, rows: Tensor = QUERY, **changes: Any) -> Calls:
    caches = [(PAGES if paged else CACHE).clone() for _ in range(2)]
    given: dict[str, Any] = {"seqlens": index(3, 0, 6), "block_table": TABLE if paged else None, **changes}
    return Calls([lambda: ops.append_to_cache(*caches, rows, rows, **given)], caches)


def append_values(value_cache: Tensor) -> Calls:
    caches = [CACHE.clone(), value_cache]
    return Calls([lambda: ops.append_to_cache(*caches, QUERY, QUERY, index(3, 0, 6))], caches)


def with_cache(paged: bool = False, **changes: Any) -> Calls:
    caches = [(PAGES if paged else CACHE).clone() for _ in range(2)]
    given: dict[str, Any] = ({"block_table": TABLE} if paged else {}) | changes
    return Calls([lambda: ops.attention_with_cache(QUERY, *caches, QUERY, QUERY, 1.0, **given)], caches)


WILD: dict[str, tuple[Calls, str]] = {
    "first start": (packed(cu_seqlens_q=index(1, 2, 2, 9)), "cu_seqlens_q must start with 0"),
    "least first start": (packed(cu_seqlens_k=index(LEAST, 2, 2, 9)), "cu_seqlens_k must start with 0"),
    "decreasing": (packed(cu_seqlens_q=index(0, 5, 4, 9)), "cu_seqlens_q must not decrease"),
    "least": (packed(cu_seqlens_q=index(0, 7, LEAST, 9)), "cu_seqlens_q must not decrease"),
    "decreasing end": (packed(cu_seqlens_k=index(0, 5, 9, 8)), "cu_seqlens_k must not decrease"),
    "past the rows": (packed(cu_seqlens_q=index(0, 2, 3, 10)), "beyond the 9 rows"),
    "past the keys": (packed(cu_seqlens_k=index(0, 2, 3, 10)), "cu_seqlens_k ends at 10"),
    "most": (packed(cu_seqlens_k=index(0, 2, 3, MOST), max_seqlen_k=MOST), "beyond the 9 rows"),
    "longer than the longest": (packed(max_seqlen_k=6), "cu_seqlens_k .* 7 rows, longer"),
    "negative longest": (packed(max_seqlen_q=-1), "cannot have -1 rows"),
    "fewer keys": (packed(cu_seqlens_k=index(0, 2, 9)), "2 sequences, but there are 3"),
    "no starts": (packed(cu_seqlens_q=STARTS[:0]), "empty"),
    "int32 starts": (packed(cu_seqlens_q=STARTS.int()), "cu_seqlens_q must be an int64"),
    "mask shapes by two": (own_masks(2, 2), "heads, queries and keys of each mask, but it has 2"),
    "fewer masks": (own_masks(1, 2, 2), "1 masks, but there are 3"),
    "mask of another sequence": (own_masks(1, 1, 2, 1, 1, 1, 1, 2, 2), r"mask 2 of shape \(1, 2, 2\)"),
    "mask of more heads": (own_masks(3, 1, 1, 1, 1, 1, 1, 1, 1), r"mask 0 of shape \(3, 1, 1\)"),
    "negative mask": (own_masks(1, 1, 1, 1, -1, 1, 1, 1, 1), "mask 1 has -1"),
    "endless masks": (own_masks(1, MOST, MOST, 1, 1, 1, 1, 1, 1), "more elements than memory"),
    "masks beyond the buffer": (own_masks(*[1] * 9, numbers=torch.ones(2)), r"attn_mask must have .* \(3,\)"),
    "masks in steps": (own_masks(*[1] * 9, numbers=torch.ones(6)[::2]), "attn_mask must be contiguous"),
    "integer masks": (own_masks(*[1] * 9, numbers=torch.ones(3).int()), "attn_mask must be float"),
    "masks without numbers": (packed(mask_shapes=[1] * 9), "mask_shapes was given without attn_mask"),
    "masks of no sequences": (
        cached(attn_mask=torch.ones(3), mask_shapes=[1] * 9),
        "mask_shapes is for packed",
    ),
    "starts in steps": (packed(cu_seqlens_q=STARTS.repeat_interleave(2)[::2]), "contiguous"),
    "a batch of packed rows": (
        Calls([lambda: ops.attention_forward(QUERY, CACHE, CACHE, 1.0, cu_seqlens_q=STARTS, max_seqlen_q=7)]),
        "query must be",
    ),
    "a batch without lengths": (cached(seqlens_k=None, block_table=TABLE), "needs seqlens_k"),
    "negative length": (cached(seqlens_k=index(3, -1, 8)), "seqlens_k must lie between 0 and 8"),
    "least length": (cached(seqlens_k=index(3, 0, LEAST)), "seqlens_k must lie between 0 and 8"),
    "length": (cached(seqlens_k=index(3, 0, 9)), "seqlens_k must lie between 0 and 8"),
    "fewer lengths": (cached(seqlens_k=index(3, 0)), "seqlens_k must have 3"),
    "position": (cached(query_offsets=index(0, 2**40 + 1, 0)), "query_offsets must lie"),
    "least position": (cached(query_offsets=index(0, 0, LEAST)), "query_offsets must lie"),
    "fewer positions": (cached(query_offsets=index(0, 0)), "query_offsets must have 3"),
    "page": (cached(True, block_table=table(0, 1, 2, 3, 4, 5)), "names page 5 for element 2"),
    "last page": (cached(True, block_table=table(0, 1, 2, 3, 4, 2**31 - 1)), "names page 2147483647"),
    "negative page": (cached(True, block_table=table(-1, 1, 2, 3, 4, 1)), "names page -1 for element 0"),
    "length of pages": (cached(True, seqlens_k=index(3, 0, 9)), "seqlens_k must lie between 0 and 8"),
    "fewer tables": (cached(True, block_table=TABLE[:2]), "block_table must have 3 rows"),
    "int64 pages": (cached(True, block_table=TABLE.long()), "block_table must be an int32"),
    "full": (append(seqlens=index(3, 0, 7)), "sequence 2 of the cache is full"),
    "negative start": (append(seqlens=index(-1, 0, 6)), "between 0 and the capacity 8"),
    "most rows": (append(seqlens=index(3, 0, MOST)), "between 0 and the capacity 8"),
    "new page": (append(True, block_table=table(0, 1, 2, 3, 4, 5)), r"block_table\[2, 1\] is 5"),
    "negative new page": (append(True, block_table=table(-7, 1, 2, 3, 4, 0)), r"block_table\[0, 0\] is -7"),
    "new page behind another": (
        append(True, block_table=table(0, 5, 2, 3, 4, 1)),
        r"block_table\[0, 1\] is 5",
    ),
    "rows of two that overlap": (
        append(True, seqlens=index(1, 2, 6), block_table=table(2, 1, 2, 3, 4, 0)),
        "sequences 0 and 1 write to the same rows",
    ),
    "one page for two": (
        append(True, seqlens=index(2, 2, 6), block_table=table(2, 1, 2, 3, 4, 0)),
        "sequences 0 and 1 write to the same rows",
    ),
    "another dtype": (append_values(CACHE.double()), "value_cache"),
    "packed rows past the end": (append(rows=PACKED, cu_seqlens=index(0, 2, 3, 10)), "not pass the 9 rows"),
    "packed rows that decrease": (
        append(rows=PACKED, cu_seqlens=index(0, 3, 2, 4)),
        "never decrease.*element 1 is 3 and the next 2",
    ),
    "packed rows from -1": (append(rows=PACKED, cu_seqlens=index(-1, 1, 2, 4)), "begin with 0"),
    "packed rows to the least": (append(rows=PACKED, cu_seqlens=index(0, 3, LEAST, 4)), "never decrease"),
    "less than the new rows": (with_cache(seqlens_k=index(3, 2, 1)), "sequence 2 .* length -1"),
    "least after": (with_cache(seqlens_k=index(3, 2, LEAST)), "sequence 2 of the cache"),
    "full after": (with_cache(seqlens_k=index(3, 2, 9)), "sequence 2 of the cache is full"),
    "new page after": (
        with_cache(True, seqlens_k=index(3, 2, 8), block_table=table(0, 1, 2, 3, 4, -1)),
        r"block_table\[2, 1\] is -1",
    ),
    "old page after": (
        with_cache(True, seqlens_k=index(3, 2, 8), block_table=table(0, 1, 2, 3, 5, 1)),
        "names page 5 for element 2",
    ),
}


@pytest.mark.parametrize("name", WILD)
def test_refused(name: str) -> None:
    calls, text = WILD[name]
    calls.check(text)


def test_taken() -> None:
    """The calls above are accepted without their one mistake."""
    four = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 7, "max_seqlen_k": 7}
    assert ops.attention_forward(PACKED, PACKED, PACKED, 1.0, **four)[0].shape == PACKED.shape
    for keys, more in ((CACHE, {}), (PAGES, {"block_table": TABLE})):
        out = ops.attention_forward(QUERY, keys, keys, 1.0, seqlens_k=LENGTHS, **more)[0]
        assert out.shape == QUERY.shape
        caches = keys.clone(), keys.clone()
        ops.append_to_cache(*caches, QUERY, QUERY, index(2, 0, 6), **more)
        ops.attention_with_cache(QUERY, *caches, QUERY, QUERY, 1.0, seqlens_k=index(3, 2, 8), **more)
        assert not torch.equal(caches[0], keys)
