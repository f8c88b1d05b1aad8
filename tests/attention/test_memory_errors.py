"""Sizes that no memory holds: errors before anything is computed, which name what lacks memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch

from selfattn_ext import (
    attention_scores,
    attention_weights,
    attention_with_kvcache,
    masked_softmax,
    ops,
    reference,
    scaled_dot_product_attention,
    varlen_attention,
)


def test_sizes_whose_product_overflows() -> None:
    row = torch.zeros(1, 1, 1, 8)
    many = row.expand(2**30, 2**28, 1, 8)
    with pytest.raises(ValueError, match="than memory can address"):
        scaled_dot_product_attention(many, many, many)
    long = row.expand(1, 1, 2**41, 8)
    with pytest.raises(ValueError, match="than memory can address"):
        scaled_dot_product_attention(long, long, long)
    with pytest.raises(ValueError, match="than memory can address"):
        attention_scores(long, long)


def test_allocation_failure() -> None:
    # On CUDA the error and its words are those of torch's allocator.
    error, words = (MemoryError, "not enough memory for ")
    if gpu.DEVICE != "cpu":
        error, words = torch.OutOfMemoryError, "out of memory|"
    row = torch.ones(1, 1, 1, 8)
    long = row.expand(1, 1, 2**39, 8)
    with pytest.raises(error, match=words + r"out of shape \(1, 1, 549755813888, 8\)"):
        scaled_dot_product_attention(long, row, row)
    with pytest.raises(error, match=words + "scores"):
        attention_scores(long, row.expand(1, 1, 64, 8))
    assert scaled_dot_product_attention(row, row, row).isfinite().all()


LONG = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**23, 1)
ROWS, ENDS = LONG[0, 0].unsqueeze(1), torch.tensor([0, 2**23])
#: Calls whose weights take 2**48 bytes, which no process has, and whose forward would take hours.
NO_MEMORY: dict[str, Callable[..., Any]] = {
    "attention": lambda: scaled_dot_product_attention(LONG, LONG, LONG, return_weights=True),
    "bfloat16": lambda: scaled_dot_product_attention(
        *[LONG.bfloat16().expand(4, -1, -1, -1)] * 3, return_weights=True
    ),
    "training": lambda: scaled_dot_product_attention(
        LONG.detach().requires_grad_(), LONG, LONG, return_weights=True
    ),
    "torch.func": lambda: torch.func.vjp(attention_weights, LONG, LONG),
    "forward mode": lambda: torch.func.jvp(attention_weights, (LONG, LONG), (LONG, LONG)),
    "weights": lambda: attention_weights(LONG, LONG, is_causal=True),
    "rule": lambda: attention_weights(LONG[0], LONG[0], window_size=(3, 3), dropout_p=0.5),
    "scores": lambda: attention_scores(LONG, LONG),
    "softmax": lambda: masked_softmax(LONG.expand(-1, -1, -1, 2**23)),
    "varlen": lambda: varlen_attention(ROWS, ROWS, ROWS, ENDS, ENDS, 2**23, 2**23, return_weights=True),
    "varlen on caches": lambda: varlen_attention(
        ROWS, ROWS, ROWS, ENDS, ENDS, 2**23, 2**23, seqused_k=ENDS[1:], return_weights=True
    ),
    "cache": lambda: attention_with_kvcache(LONG, LONG, LONG, return_weights=True),
    "formula": lambda: reference.attention(LONG, LONG, LONG),
    "graph": lambda: torch.compile(attention_weights, backend="eager", fullgraph=True)(LONG, LONG),
}


@pytest.mark.parametrize("name", NO_MEMORY)
def test_weights_without_memory_are_refused_before_anything_is_computed(name: str) -> None:
    error: Any = torch.OutOfMemoryError if gpu.DEVICE != "cpu" else MemoryError
    # In a graph the operator itself reports the lack of memory, on any device.
    also = {"formula": RuntimeError, "graph": MemoryError}.get(name, error)
    with pytest.raises((error, also), match="memory"):
        NO_MEMORY[name]()


def test_a_step_without_memory_for_its_weights_leaves_the_cache_alone() -> None:
    caches = torch.zeros(2, 1, 1, 2**23, 1)
    query, token = LONG[:, :, : 2**22], torch.ones(1, 1, 1, 1)
    with pytest.raises((MemoryError, torch.OutOfMemoryError), match="memory"):
        attention_with_kvcache(
            query.expand(-1, 8, -1, -1), *caches, token, token, cache_seqlens=0, layout="bhld",
            return_weights=True,
        )  # fmt: skip
    assert not caches.any()


def test_sizes_of_weights_whose_product_overflows() -> None:
    row = torch.zeros(1, 1, 1, 1)
    long = row.expand(1, 1, 2**31, 1)
    for call in (
        lambda: scaled_dot_product_attention(long, long, long, return_weights=True),
        lambda: torch.func.jvp(attention_weights, (long, long), (long, long)),
        lambda: masked_softmax(row.expand(1, 1, 2**31, 2**31)),
        lambda: attention_scores(long, long),
        # These broadcast to too many batch elements and heads.
        lambda: scaled_dot_product_attention(row.expand(2**40, 1, 1, 1), *[row.expand(1, 2**40, 1, 1)] * 2),
        lambda: attention_scores(row.expand(2**40, 1, 1, 1), row.expand(1, 2**40, 1, 1)),
    ):
        with pytest.raises(ValueError, match="than memory can address"):
            call()


def test_allocation_failure_of_a_copy() -> None:
    """Gradients that torch has expanded are made dense; the error names the copy that lacks memory."""
    row, one = torch.ones(1, 1, 1, 8), torch.ones(1)
    long = row.expand(1, 1, 2**39, 8)
    rows = one.expand(1, 1, 2**39)
    with pytest.raises(MemoryError, match=r"a contiguous copy of grad_out \(17592186044416 bytes\)"):
        ops.attention_backward(one.expand(1, 1, 2**39, 8), long, row, row, long, rows, rows, 1.0)
    with pytest.raises(MemoryError, match=r"a contiguous copy of row_max \(2199023255552 bytes\)"):
        ops.attention_backward(long, long, row, row, long, rows, rows, 1.0)
