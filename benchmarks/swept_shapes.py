"""The shapes of the sweep: how they are drawn, what they are called, and the lines that name them.

A shape is everything that decides how long a call takes: sizes, dtype, mask, layout, gradient. Three of four
are drawn freely from lists of usual sizes, every fourth from one of the families, which are kinds of calls
that models make.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch

from selfattn_ext.bench.cases import Case
from selfattn_ext.bench.varlen import VarlenCase, draw_lengths
from selfattn_ext.terminal import CommandError

#: "bool": a fifth of the pairs is hidden; "float": random numbers (1, H, L, S) are added; "padding": the last
#: quarter of the keys is hidden.
Mask = Literal["none", "bool", "float", "padding"]

#: "blhd": views of tensors (B, L, H, E); "packed": sequences end to end; "jagged": torch's nested tensors. In
#: the last two, sequences have between one and ``queries`` tokens.
Layout = Literal["bhld", "blhd", "packed", "jagged"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """One call of the sweep. ``heads`` are those of the queries; ``group`` of them share a kv head."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = False
    backward: bool = False
    mask: Mask = "none"
    layout: Layout = "bhld"
    group: int = 1

    def __str__(self) -> str:
        """Returns the line that parse() reads; options that are off are left out."""
        sizes = ",".join(map(str, (self.batch, self.heads, self.queries, self.keys, self.head_dim)))
        words = [sizes, self.dtype, "f+b" if self.backward else "forward"]
        words += ["causal"] * self.causal
        words += [f"mask={self.mask}"] * (self.mask != "none")
        words += [f"layout={self.layout}"] * (self.layout != "bhld")
        words += [f"group={self.group}"] * (self.group != 1)
        return " ".join(words)

    def case(self) -> Case:
        """Returns the shape as a case of the benchmarks, which has neither mask nor layout."""
        options: dict[str, Any] = {
            "dtype": DTYPES[self.dtype],
            "causal": self.causal,
            "backward": self.backward,
            "kv_heads": None if self.group == 1 else self.heads // self.group,
        }
        if self.layout in ("packed", "jagged"):
            lengths = draw_lengths(self.batch, 1, self.queries)
            return VarlenCase.of(lengths, self.heads, self.head_dim, **options)
        return Case(self.batch, self.heads, self.queries, self.head_dim, keys=self.keys, **options)

    def products(self) -> int:
        """Returns the multiplications of queries with keys."""
        return self.batch * self.heads * self.queries * self.keys * self.head_dim


def parse(line: str) -> Shape:
    """Reads what str() of a shape returns: "1,2,1,2048,8 float32 f+b mask=padding", options in any order.

    Raises:
        CommandError: a word means nothing, or the shape does not exist.
    """
    sizes, *words = line.split() or [""]
    try:
        batch, heads, queries, keys, head_dim = map(int, sizes.split(","))
    except ValueError:
        raise CommandError(
            f"{line!r} must begin with five sizes: batch,heads,queries,keys,head_dim"
        ) from None
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if word in DTYPES:
            options["dtype"] = word
        elif word in ("forward", "f+b"):
            options["backward"] = word == "f+b"
        elif word == "causal":
            options["causal"] = True
        elif (name == "mask" and value in get_args(Mask)) or (name == "layout" and value in get_args(Layout)):
            options[name] = value
        elif name == "group" and value.isdecimal():
            options[name] = int(value)
        else:
            raise CommandError(
                f"{line!r}: {word} is none of {', '.join(DTYPES)}, forward, f+b, causal, group=N, "
                f"mask={'|'.join(get_args(Mask))}, layout={'|'.join(get_args(Layout))}"
            )
    shape = Shape(batch, heads, queries, keys, head_dim, **options)
    if (reason := _impossible(shape)) is not None:
        raise CommandError(f"{line!r}: {reason}")
    return shape


def _impossible(shape: Shape) -> str | None:
    """Returns why there is no such shape, or None."""
    if min(shape.batch, shape.heads, shape.queries, shape.keys, shape.head_dim, shape.group) < 1:
        return "sizes must be at least 1"
    if shape.heads % shape.group:
        return f"group={shape.group} must divide {shape.heads} heads"
    if shape.causal and (shape.queries != shape.keys or shape.mask != "none"):
        return "causal shapes must have as many keys as queries, and no mask"
    if shape.layout in ("packed", "jagged"):
        if shape.queries != shape.keys or shape.mask != "none" or shape.batch < 2:
            return "sequences must be two or more, of as many keys as queries, without a mask"
        if shape.layout == "jagged" and (shape.causal or shape.group != 1):
            return "torch takes neither causal nor grouped nested tensors on the CPU"
    return None


def kind(shape: Shape) -> str:
    """Returns the kind of a shape: what most decides how its time is spent."""
    return " ".join([_base(shape), *["masked"] * (shape.mask != "none"), *["f+b"] * shape.backward])


def _base(shape: Shape) -> str:
    narrow = shape.head_dim < 32
    if shape.layout in ("packed", "jagged"):
        return shape.layout
    if shape.products() <= 10_000:
        return "tiny"
    if shape.group > 1:
        return "grouped heads"
    if shape.keys <= 4:
        return "few keys"
    if shape.queries <= 4:
        return "few queries, narrow head" if narrow else "few queries"
    if shape.keys == 77 != shape.queries:
        return "cross 77"
    if shape.queries == shape.keys and shape.keys in (197, 257):
        return "ViT"
    if shape.queries <= 64 and shape.keys >= 1024:
        return "cache"
    if shape.queries <= 64 and shape.keys <= 64:
        return "short"
    if narrow:
        return "narrow head"
    return "long" if shape.keys >= 1024 else "middle"


@dataclass(frozen=True)
class Family:
    """Calls that models make: the values of each size. ``keys`` 0 means as many as queries."""

    batch: Sequence[int]
    kv_heads: Sequence[int]
    queries: Sequence[int]
    keys: Sequence[int]
    head_dim: Sequence[int]
    group: Sequence[int] = (1,)
    layouts: Sequence[Layout] = ("bhld", "blhd")


_FREE = Family(
    batch=(1, 2, 4, 8, 32),
    kv_heads=(1, 2, 4, 8, 12, 16),
    queries=(1, 1, 2, 4, 7, 16, 17, 32, 50, 64, 77, 100, 128, 197, 256, 300, 512, 577, 1024),
    keys=(0, 0, 0, 77, 512, 1024, 2048),
    head_dim=(8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256),
)

FAMILIES = {
    "grouped heads": Family(
        batch=(1, 2, 4, 8),
        kv_heads=(1, 2, 4, 8),
        queries=(1, 1, 2, 4, 16, 64, 128, 512),
        keys=(0, 128, 512, 2048),
        head_dim=(32, 64, 80, 128),
        group=(2, 3, 4, 8),
    ),
    "queries on a cache": Family(
        batch=(1, 2, 4, 8),
        kv_heads=(1, 2, 4, 8, 16),
        queries=(1, 2, 3, 4, 5, 8, 16, 31, 64),
        keys=(1024, 2048, 4096, 8192, 16384),
        head_dim=(16, 24, 32, 64, 80, 96, 128),
    ),
    "77 keys of a text": Family(
        batch=(1, 2, 4),
        kv_heads=(5, 8, 10, 20),
        queries=(64, 256, 1024, 4096),
        keys=(77,),
        head_dim=(40, 64, 80, 160),
    ),
    "patches of a picture": Family(
        batch=(1, 2, 8, 32),
        kv_heads=(3, 6, 12, 16),
        queries=(197, 257),
        keys=(0,),
        head_dim=(32, 64, 80),
    ),
    "short sequences": Family(
        batch=(1, 4, 16, 64),
        kv_heads=(1, 2, 4, 8),
        queries=(16, 20, 24, 32, 33, 48, 50, 64),
        keys=(0,),
        head_dim=(24, 32, 40, 48),
    ),
    "few keys": Family(
        batch=(1, 2, 8, 32),
        kv_heads=(1, 4, 12),
        queries=(1, 2, 3, 4, 16, 64, 256),
        keys=(1, 2, 3, 4),
        head_dim=(8, 16, 32, 64, 128, 256),
    ),
    "sequences of one or two tokens": Family(
        batch=(8, 32, 128, 512),
        kv_heads=(1, 2, 8),
        queries=(1, 2),
        keys=(0,),
        head_dim=(16, 32, 64, 128),
        layouts=("packed", "jagged"),
    ),
}

# These weights are how often a dtype is drawn.
_DTYPES = ("float32", "bfloat16", "float16", "float32", "bfloat16", "float64")

# Larger shapes take seconds, or read more than any cache holds; both have their own classes in classes.py.
_MOST_PRODUCTS = 3e9
_MOST_NUMBERS = 2e7


def is_free(index: int) -> bool:
    """Tells whether the shape of this index was drawn freely, and not from a family."""
    return index % 4 != 3


def draw(seed: int, count: int) -> list[Shape]:
    """Draws shapes, the same for a seed on every machine; fewer of them are the first of more.

    Freely drawn shapes and those of families have generators of their own, so that a new family leaves the
    others as they are.
    """
    free, of_family = random.Random(seed), random.Random(f"families, {seed}")
    families = list(FAMILIES.values())
    return [
        _draw(free, _FREE) if is_free(index) else _draw(of_family, families[index // 4 % len(families)])
        for index in range(count)
    ]


def _draw(generator: random.Random, family: Family) -> Shape:
    """Draws until the shape is small enough."""

    def one_of(values: Sequence[T]) -> T:
        # A single value is no draw.
        return values[0] if len(values) == 1 else generator.choice(values)

    while True:
        dtype, batch, kv_heads = one_of(_DTYPES), one_of(family.batch), one_of(family.kv_heads)
        head_dim, queries = one_of(family.head_dim), one_of(family.queries)
        keys = one_of([size or queries for size in family.keys])
        group = one_of(family.group)
        shape = Shape(batch, kv_heads * group, queries, keys, head_dim, dtype, group=group)
        numbers = batch * kv_heads * (group * queries + keys) * head_dim
        if shape.products() <= _MOST_PRODUCTS and numbers <= _MOST_NUMBERS:
            return _with_options(shape, generator, family.layouts)


def _with_options(shape: Shape, generator: random.Random, layouts: Sequence[Layout]) -> Shape:
    causal = generator.random() < 0.3 and shape.queries == shape.keys
    backward = generator.random() < 0.5
    masks: tuple[Mask, ...] = ("bool", "float", "padding")
    mask = "none" if causal or generator.random() < 0.6 else generator.choice(masks)
    layout = generator.choice(layouts)
    if layout in ("packed", "jagged"):
        causal, mask = causal and layout == "packed", "none"
    return replace(shape, causal=causal, backward=backward, mask=mask, layout=layout)
