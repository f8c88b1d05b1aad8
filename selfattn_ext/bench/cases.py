"""Cases to time: shapes, dtype, options and direction of one attention call, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from selfattn_ext import masks

Mask = Literal["none", "bool", "gradient"]
Precision = Literal["highest", "high", "medium"]

# Caches of gigabytes repeat this many random numbers, as drawing all of them takes longer than measuring. It
# is odd, so that a row recurs only after that many rows.
_DRAWN = 2**24 + 1


@dataclass(frozen=True)
class Case:
    """One row of a table. Fields that stay at their defaults are options that are off.

    ``mask`` is "bool" for a chequered pattern of 64 x 64 blocks, half of them hidden, and "gradient" for a
    float mask (length, keys) that gets a gradient where there is a backward pass. ``graph_kept`` times the
    backward pass alone, over and over on one graph. ``precision`` is torch's float32 matmul precision, and
    ``isa`` forces the instruction set of this package's kernels. With ``latent`` the value is a view of the
    key, its first ``value_dim`` columns.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    backward: bool = False
    graph_kept: bool = False
    keys: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    window: int | None = None  # keys to the left that a query sees
    mask: Mask = "none"
    dropout: float = 0.0
    precision: Precision = "highest"
    isa: str = ""
    latent: bool = False

    def __post_init__(self) -> None:
        if self.graph_kept and not self.backward:
            raise ValueError("graph_kept needs backward=True, as it times the backward pass")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def key_count(self) -> int:
        return self.length if self.keys is None else self.keys

    @property
    def kv_head_count(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dimension(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def query_offset(self) -> int:
        """The position of query 0: the queries stand at the end of the keys, as in decoding."""
        return self.key_count - self.length

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_formula(self) -> bool:
        """Whether the results depend on the fields of Case alone, so that the formula can compute them."""
        return True

    @property
    def direction(self) -> str:
        if not self.backward:
            return "forward"
        return "backward" if self.graph_kept else "forward+backward"

    def options(self) -> str:
        """Returns the options that are on, for people; "" for the plain call."""
        found = []
        if self.causal:
            found.append("causal")
        if self.keys is not None:
            found.append(f"keys={self.keys}")
        if self.kv_heads is not None:
            found.append(f"kv_heads={self.kv_heads}")
        if self.value_dim is not None:
            found.append(f"value_dim={self.value_dim}")
        if self.latent:
            found.append("latent")
        if self.window is not None:
            found.append(f"window={self.window}")
        if self.mask != "none":
            found.append(f"mask={self.mask}")
        if self.dropout:
            found.append(f"dropout={self.dropout:g}")
        if self.precision != "highest":
            found.append(f"precision={self.precision}")
        if self.isa:
            found.append(f"isa={self.isa}")
        return " ".join(found)

    def flops(self) -> float:
        """Returns the multiplications and additions of the matrix products over the visible pairs.

        It counts two products forward and five backward, where the scores are computed again, as is usual in
        reports on attention.
        """
        per_pair = 2 * (self.head_dim + self.value_dimension)
        passes = (2.5 if self.graph_kept else 3.5) if self.backward else 1.0
        return float(per_pair * self.pairs() * self.heads) * passes

    def pairs(self) -> int:
        """Returns the number of visible pairs in one head, summed over the batch."""
        return self.batch * self._pairs()

    def _pairs(self) -> int:
        if self.mask == "bool":
            seen, blocks = self.visible(), _half_of_the_blocks(self.length, self.key_count)
            return int((blocks if seen is None else blocks & seen).sum())
        positions = torch.arange(self.length) + self.query_offset
        first = torch.zeros_like(positions) if self.window is None else (positions - self.window).clamp(min=0)
        end = positions + 1 if self.causal else torch.full_like(positions, self.key_count)
        return int((end.clamp(max=self.key_count) - first).clamp(min=0).sum())

    def bytes_read(self) -> int:
        """Returns the bytes of query, key and value, which every implementation has to read at least once."""
        queries = self.total_queries() * self.heads * self.head_dim
        width = self.head_dim if self.latent else self.head_dim + self.value_dimension
        return (queries + self.total_keys() * self.kv_head_count * width) * self.dtype.itemsize

    def total_queries(self) -> int:
        """Returns the queries of one head, summed over the batch."""
        return self.batch * self.length

    def total_keys(self) -> int:
        """Returns the keys of one kv head, summed over the batch."""
        return self.batch * self.key_count

    def element(self, index: int) -> Case:
        """Returns one batch element as a case; its tensors are the first rows of those of inputs()."""
        return replace(self, batch=1)

    def new_keys(self, draw: Callable[..., Tensor], width: int) -> Tensor:
        """Returns keys or values (B, Hk, S, width) of numbers from draw(*shape)."""
        return draw(self.batch, self.kv_head_count, self.key_count, width)

    def further(self) -> dict[str, Any]:
        """Returns the fields that as_json adds for kinds of cases that have more."""
        return {}

    def visible(self) -> Tensor | None:
        """Returns the causal rule and the window as a (length, keys) mask, None if every pair is visible."""
        if not self.causal and self.window is None:
            return None
        return masks.visible_pairs(
            self.length,
            self.key_count,
            is_causal=self.causal,
            window_size=(-1 if self.window is None else self.window, -1),
            query_offset=self.query_offset,
        )


@dataclass(frozen=True)
class Inputs:
    """query (B, H, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev), grad_out (B, H, L, Ev), mask (L, S)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    mask: Tensor | None

    def leaves(self) -> list[Tensor]:
        """Returns the tensors that get a gradient."""
        tensors = [self.query, self.key, self.value, self.mask]
        return [
            tensor for tensor in tensors if tensor is not None and tensor.requires_grad and tensor.is_leaf
        ]


def inputs(case: Case, seed: int = 0, device: str = "cpu") -> Inputs:
    """Draws normally distributed tensors, which require gradients if the case has a backward pass."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, grad: bool = case.backward) -> Tensor:
        count = math.prod(shape)
        drawn = torch.randn(min(count, _DRAWN), generator=generator, device=device).to(case.dtype)
        if count > _DRAWN:
            drawn = drawn.repeat(-(-count // _DRAWN))[:count]
        return drawn.view(shape).requires_grad_(grad)

    mask: Tensor | None = None
    if case.mask == "gradient":
        mask = normal(case.length, case.key_count)
    elif case.mask == "bool":
        mask = _half_of_the_blocks(case.length, case.key_count).to(device)
    query = normal(case.batch, case.heads, case.length, case.head_dim)
    key = case.new_keys(normal, case.head_dim)
    return Inputs(
        query=query,
        key=key,
        value=key[..., : case.value_dimension]
        if case.latent
        else case.new_keys(normal, case.value_dimension),
        grad_out=normal(case.batch, case.heads, case.length, case.value_dimension, grad=False),
        mask=mask,
    )


def _half_of_the_blocks(length: int, keys: int, block: int = 64) -> Tensor:
    rows = torch.arange(length)[:, None] // block
    columns = torch.arange(keys) // block
    return (rows + columns) % 2 == 0


#: (batch, heads, length, head_dim): a small batch, a short, a middle and a long sequence.
SHAPES = ((4, 8, 64, 64), (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 128))
QUICK_SHAPES = SHAPES[:2]
DTYPES = (torch.float32, torch.bfloat16)


def standard(
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES, dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Case]:
    """Returns the cases of ``bench``: each shape and dtype, causal or not, without and with backward pass."""
    plain = [Case(*shape, dtype=dtype) for dtype in dtypes for shape in shapes]
    return [
        replace(case, causal=causal, backward=backward)
        for case in plain
        for backward in (False, True)
        for causal in (False, True)
    ]


def as_json(case: Case) -> dict[str, Any]:
    """Returns the case as plain data."""
    return {
        "batch": case.batch,
        "heads": case.heads,
        "length": case.length,
        "head_dim": case.head_dim,
        "dtype": case.dtype_name,
        "causal": case.causal,
        "direction": case.direction,
        "keys": case.key_count,
        "kv_heads": case.kv_head_count,
        "value_dim": case.value_dimension,
        "window": case.window,
        "mask": case.mask,
        "dropout": case.dropout,
        "precision": case.precision,
        "isa": case.isa,
        **case.further(),
    }
