"""Times of sparse_attention over dense attention with the same selection as a mask: ours and torch's.

    python benchmarks/sparse_attention.py              # 8192 tokens, 16 of 128 blocks; 2048 of 32768 keys
    python benchmarks/sparse_attention.py --quick --threads 1 --dtypes bfloat16 --head-dims 128
    python benchmarks/sparse_attention.py --length 4096 --block-size 128 --selected 4

The first table is self-attention of queries that select blocks of keys by chance, a selection for each
key-value head. In the second it is causal: a query selects its own block, and others before it. A query sees
half of the keys on average then, of which it selects a larger part, and our dense attention passes over the
other half. The third is a few queries that select single keys by chance, one selection for all heads. "f" is
the forward, "f+b" forward and backward. "ours" is the scaled_dot_product_attention of this package, "torch"
that of torch, with a bool mask that is made before. All are called in turns; a ratio is the median over the
rounds of their time over that of sparse_attention, so that more than 1 means that selecting is faster, and
quartiles stand beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext import masks, scaled_dot_product_attention, sparse_attention
from selfattn_ext.bench import thread_counts, warn_if_busy
from selfattn_ext.bench.timer import FULL, QUICK, Effort, Ratio, interleave
from selfattn_ext.terminal import table


class Shape(NamedTuple):
    """Queries (1, heads, queries, head_dim) on keys and values (1, kv_heads, keys, head_dim)."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Draws query, key and value, which require gradients."""
        generator = torch.Generator().manual_seed(0)

        def drawn(heads: int, length: int) -> Tensor:
            tensor = torch.randn(1, heads, length, self.head_dim, generator=generator)
            return tensor.to(dtype).requires_grad_()

        return (
            drawn(self.heads, self.queries),
            drawn(self.kv_heads, self.keys),
            drawn(self.kv_heads, self.keys),
        )


class Selected(NamedTuple):
    """A selection as keyword arguments of sparse_attention, and as the mask that it means."""

    arguments: dict[str, Any]
    mask: Tensor


def blocks(shape: Shape, block_size: int, selected: int, is_causal: bool) -> Selected:
    """Draws blocks for each query and key-value head; causal ones, if asked, among them the query's own."""
    number = -(-shape.keys // block_size)
    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(1, shape.kv_heads, shape.queries, number, generator=generator)
    if is_causal:
        own, block = torch.arange(shape.queries)[:, None] // block_size, torch.arange(number)
        chance.masked_fill_(block > own, -1.0).masked_fill_(block == own, 2.0)
    best = chance.topk(min(selected, number), -1)
    indices = best.indices.masked_fill(best.values < 0, -1)
    size = (1, block_size)
    mask = masks.selected_pairs(indices, shape.queries, shape.keys, shape.heads, size)
    if is_causal:
        mask &= masks.Causal().visible(shape.queries, shape.keys)
    return Selected({"block_indices": indices, "block_size": block_size, "is_causal": is_causal}, mask)


def keys(shape: Shape, selected: int) -> Selected:
    """Draws keys for each query, the same for all heads."""
    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(1, 1, shape.queries, shape.keys, generator=generator)
    indices = chance.topk(min(selected, shape.keys), -1).indices.int()
    mask = masks.selected_pairs(indices, shape.queries, shape.keys, shape.heads, (1, 1))
    return Selected({"indices": indices}, mask)


def calls_of(
    shape: Shape, dtype: torch.dtype, selection: Selected, backward: bool
) -> dict[str, Callable[[], Any]]:
    """Returns what is timed, by name. With ``backward`` a call returns the gradients, else the output."""
    query, key, value = shape.inputs(dtype)
    grad_out = torch.ones_like(query)
    grouped = shape.heads != shape.kv_heads

    def timed(attend: Callable[..., Tensor], **given: Any) -> Callable[[], Any]:
        def forward() -> Tensor:
            return attend(query, key, value, enable_gqa=grouped, **given)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), (query, key, value), grad_out)

        return both if backward else torch.no_grad()(forward)

    return {
        "sparse": timed(sparse_attention, **selection.arguments),
        "ours": timed(scaled_dot_product_attention, attn_mask=selection.mask),
        "torch": timed(F.scaled_dot_product_attention, attn_mask=selection.mask),
    }


def lines(
    shape: Shape, selection: Selected, dtypes: Sequence[torch.dtype], effort: Effort
) -> list[list[str]]:
    """Measures a shape on the present number of threads, and returns its rows."""
    rows = []
    for dtype in dtypes:
        for backward in (False, True):
            times = interleave(calls_of(shape, dtype, selection, backward), effort)
            name = str(dtype).removeprefix("torch.")
            cells = [str(shape.head_dim), name, str(torch.get_num_threads()), "f+b" if backward else "f"]
            cells += [f"{timing.median * 1e3:.3f}" for timing in times.values()]
            for other in ("ours", "torch"):
                ratio = Ratio.of(times[other], times["sparse"])
                low, high = ratio.quartiles
                cells += [f"{ratio.median:.2f}", f"{low:.2f} to {high:.2f}"]
            rows.append(cells)
    return rows


HEADER = [
    "D",
    "dtype",
    "threads",
    "",
    "sparse ms",
    "ours ms",
    "torch ms",
    "ours / sparse",
    "",
    "torch / sparse",
    "",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = {
        "heads": (8, "query heads"),
        "kv-heads": (2, "key-value heads"),
        "length": (8192, "tokens of the first two tables"),
        "block-size": (64, "keys of a block"),
        "selected": (16, "blocks per query"),
        "queries": (64, "queries of the third table; 0 leaves it out"),
        "keys": (32768, "keys of the third table"),
        "selected-keys": (2048, "keys per query"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of torch, by name")
    parser.add_argument("--threads", type=int, nargs="*", help="by default one, and as many as torch uses")
    parser.add_argument("--quick", action="store_true", help="a few rounds of each row")
    given = parser.parse_args(arguments)
    warn_if_busy()
    effort = QUICK if given.quick else FULL
    dtypes = [getattr(torch, name) for name in given.dtypes]
    shapes = [
        [Shape(given.heads, given.kv_heads, queries, length, dim) for dim in given.head_dims]
        for queries, length in ((given.length, given.length), (given.queries, given.keys))
    ]
    of_all = f"{given.heads} query heads, {given.kv_heads} key-value heads"
    before = torch.get_num_threads()
    try:
        threads = thread_counts(given.threads)
        number = -(-given.length // given.block_size)
        for is_causal in (False, True):
            print(
                f"{given.selected} of {number} blocks of {given.block_size} keys per query, "
                f"{'causal, ' if is_causal else ''}{given.length} tokens, {of_all}"
            )
            selection = blocks(shapes[0][0], given.block_size, given.selected, is_causal)
            _print(shapes[0], selection, threads, dtypes, effort)
            print()
        if given.queries:
            print(f"{given.selected_keys} of {given.keys} keys per query, {given.queries} queries, {of_all}")
            _print(shapes[1], keys(shapes[1][0], given.selected_keys), threads, dtypes, effort)
    finally:
        torch.set_num_threads(before)
    return 0


def _print(
    shapes: Sequence[Shape],
    selection: Selected,
    threads: Sequence[int],
    dtypes: Sequence[torch.dtype],
    effort: Effort,
) -> None:
    """Prints a table. A selection does not depend on the head dim, which is all that the shapes differ in."""
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        for shape in shapes:
            rows += lines(shape, selection, dtypes, effort)
    print(table(HEADER, rows, left=0))


if __name__ == "__main__":
    sys.exit(main())
