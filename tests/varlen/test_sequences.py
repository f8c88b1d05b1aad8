"""A packed sequence gets the bits of its own call, in any batch and with any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, NAMES, drawn, exact_inputs, gradients
from option_pairs import covering
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import backends, scaled_dot_product_attention, varlen_attention

# (queries, keys): edges of tiles, blocks and chunks of keys, primes, few queries beside many, empty ones.
LENGTHS = (
    (1, 5),
    (0, 9),
    (49, 65),
    (5, 0),
    (48, 64),
    (4, 300),
    (0, 0),
    (17, 13),
    (131, 600),
    (2, 3),
    (64, 1),
)

#: name -> (the mask's shape, given B, H and the longest L and S; its dtype, where None is the query's).
MASKS = {
    "bool": (lambda b, h, q, k: (b, 1, q, k), torch.bool),
    "float": (lambda b, h, q, k: (b, h, q, k), None),
    "float rows": (lambda b, h, q, k: (b, h, q, 1), None),
    "float keys": (lambda b, h, q, k: (b, 1, 1, k), torch.float32),
    "shared": (lambda b, h, q, k: (h, q, k), None),
    "shared keys": (lambda b, h, q, k: (1, h, 1, k), torch.float32),
    "bfloat16": (lambda b, h, q, k: (q, k), torch.bfloat16),
}
# The gradients of these masks are sums over all sequences, so no call of one sequence has their bits.
SUMMED = ("shared", "shared keys", "bfloat16")


@dataclass(frozen=True)
class Packed:
    dtype: torch.dtype = torch.float32
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    heads_first: bool = False  # the order in memory
    mask: str | None = None
    mask_list: bool = False  # a tensor for each sequence, unless all share one
    is_causal: bool = False
    offsets: str = "none"  # or "one" number for all, or one for "each"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: int = 0  # their number of dimensions
    sinks: int = 0
    weights: bool = False
    device: str = gpu.DEVICE

    def __str__(self) -> str:
        shown = [NAMES[self.dtype]]
        for field, default in Packed.__dataclass_fields__.items():
            value = getattr(self, field)
            if field != "dtype" and value != default.default:
                shown.append(f"{field}={value}".replace(" ", ""))
        return "-".join(shown)

    def inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3000)
        batch, (heads, kv_heads), (dim, value_dim) = len(self.lengths), self.heads, self.dims
        total_q, total_k = (sum(lengths) for lengths in zip(*self.lengths, strict=True))

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return drawn(shape, generator).to(self.device, dtype)

        def rows(total: int, heads: int, dim: int) -> Tensor:
            return (
                normal(heads, total, dim).transpose(0, 1) if self.heads_first else normal(total, heads, dim)
            )

        tensors = {
            "query": rows(total_q, heads, dim),
            "key": rows(total_k, kv_heads, dim),
            "value": rows(total_k, kv_heads, value_dim),
        }
        if self.mask is not None:
            shape, dtype = MASKS[self.mask]
            mask = normal(*shape(batch, heads, *self.longest()), dtype=torch.float64)
            hidden = mask < -0.5
            mask = mask if 1 in mask.shape[-2:] else mask.masked_fill(hidden, -torch.inf)
            tensors["attn_mask"] = ~hidden if dtype is torch.bool else mask.to(dtype or self.dtype)
        if self.slopes:
            tensors["alibi_slopes"] = normal(batch, heads, dtype=torch.float32).abs()
        if self.sinks:
            tensors["sinks"] = normal(batch, heads, dtype=torch.float32)
        for name, dims in (("alibi_slopes", self.slopes), ("sinks", self.sinks)):
            if dims == 1:
                tensors[name] = tensors[name][0]
        if self.offsets == "each":
            tensors["query_offset"] = torch.tensor([5 * b - k // 8 for b, (_, k) in enumerate(self.lengths)])
        return {
            name: tensor.detach().requires_grad_(tensor.is_floating_point())
            for name, tensor in tensors.items()
        }

    def numbers(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "enable_gqa": True,
            "return_weights": self.weights,
            "return_lse": True,
        } | ({"query_offset": 7} if self.offsets == "one" else {})

    def starts(self, only: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns where the sequences begin and end; with ``only``, all others are empty."""
        lengths = [pair if only in (None, b) else (0, 0) for b, pair in enumerate(self.lengths)]
        starts = torch.tensor([(0, 0), *lengths], device=self.device).cumsum(0)
        return starts[:, 0], starts[:, 1]

    def run(
        self, tensors: dict[str, Tensor], only: int | None = None, dropout_p: float = 0.0
    ) -> dict[str, Tensor]:
        """Makes a packed call; with ``only``, ``tensors`` are those of that sequence alone."""
        torch.manual_seed(0)
        query, key, value, options = split(tensors)
        starts = self.starts(only)
        if self.mask_list and self.mask not in (None, *SUMMED):
            masks = [self.part(b, "attn_mask", options["attn_mask"]) for b in range(len(self.lengths))]
            options["attn_mask"] = masks
        results = varlen_attention(
            query, key, value, *starts, *self.longest(), **options, **self.numbers(), dropout_p=dropout_p
        )
        return dict(zip(self.names(), results, strict=True))

    def run_alone(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Calls attention for one sequence alone; returns its results in the form of a packed call."""
        query, key, value, options = split(tensors)
        if "query_offset" in options:
            options["query_offset"] = int(options["query_offset"])
        packed = (tensor.transpose(0, 1) for tensor in (query, key, value))
        results = scaled_dot_product_attention(*packed, **options, **self.numbers())
        named = dict(zip(self.names(), results, strict=True))
        return named | {"out": named["out"].transpose(0, 1)}

    def longest(self) -> tuple[int, int]:
        return max(queries for queries, _ in self.lengths), max(keys for _, keys in self.lengths)

    def names(self) -> tuple[str, ...]:
        return ("out", "weights", "lse") if self.weights else ("out", "lse")

    def part(self, b: int, name: str, tensor: Tensor) -> Tensor:
        """Returns the part of an input or of a result that is sequence b's."""
        starts_q, starts_k = (starts.tolist() for starts in self.starts())
        queries, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if name in ("query", "out"):
            return tensor[queries]
        if name in ("key", "value"):
            return tensor[keys]
        if name == "lse":
            return tensor[:, queries]
        if name in ("alibi_slopes", "sinks"):
            return tensor[b] if tensor.dim() == 2 else tensor
        if name == "query_offset":
            return tensor[b]
        for dimension, length in zip((-2, -1), self.lengths[b], strict=True):
            tensor = tensor if tensor.shape[dimension] == 1 else tensor.narrow(dimension, 0, length)
        return tensor[b if tensor.shape[0] > 1 else 0] if tensor.dim() == 4 else tensor

    def parts(self, b: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the parts that are sequence b's."""
        return {
            name: self.part(b, name, tensor).detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in tensors.items()
        }


def split(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    options: dict[str, Any] = dict(tensors)
    return options.pop("query"), options.pop("key"), options.pop("value"), options


def everything(
    case: Packed, results: dict[str, Tensor], tensors: dict[str, Tensor], b: int | None = None
) -> dict[str, Tensor]:
    """Returns the results and the gradients of the inputs, given sequence b's part of the cotangents, or all.

    Gradients through the weights are left out: torch sums padded rows in another order than shorter ones.
    """
    generator = torch.Generator().manual_seed(4000)
    total = sum(queries for queries, _ in case.lengths)
    shapes = {"out": (total, case.heads[0], case.dims[1]), "lse": (case.heads[0], total)}
    cotangents = {name: drawn(shape, generator).to(case.device, case.dtype) for name, shape in shapes.items()}
    if b is not None:
        cotangents = {name: case.part(b, name, tensor) for name, tensor in cotangents.items()}
    return results | gradients({name: results[name] for name in shapes}, cotangents, tensors)


def check_alone(case: Packed) -> None:
    """Asserts that each sequence has the bits that it has alone, that rows of no sequence are zero, and that
    the gradients of tensors that sequences share are the sums over these.
    """
    tensors = case.inputs()
    packed = everything(case, case.run(tensors), tensors)
    shared = {
        f"grad of {name}"
        for name, dims in (("alibi_slopes", case.slopes), ("sinks", case.sinks))
        if dims == 1
    }
    if case.mask in SUMMED:
        shared.add("grad of attn_mask")
    rest = {name: tensor.detach().clone() for name, tensor in packed.items() if name not in shared}
    exact_case, exact_tensors = replace(case, dtype=torch.float64), exact_inputs(tensors)
    inputs = {name: name.removeprefix("grad of ") for name in packed}
    exact, peer = (
        {name: torch.zeros_like(tensors[inputs[name]], dtype=torch.float64) for name in shared}
        for _ in range(2)
    )
    for b in range(len(case.lengths)):
        own = case.parts(b, tensors)
        for name, result in everything(case, case.run_alone(own), own, b).items():
            if name in shared:
                case.part(b, inputs[name], peer[name]).add_(result)
                continue
            assert torch.equal(case.part(b, inputs[name], packed[name]), result), f"{name} of sequence {b}"
            case.part(b, inputs[name], rest[name]).zero_()
        if shared:
            own = exact_case.parts(b, exact_tensors)
            results = everything(exact_case, exact_case.run_alone(own), own, b)
            for name in shared:
                case.part(b, inputs[name], exact[name]).add_(results[name])
    for name, tensor in rest.items():
        assert not tensor.any(), f"{name} is not zero in rows of no sequence"
    for name in shared:
        assert_accurate(name, packed[name], exact[name], peer[name], dtype=case.dtype)


OPTIONS = {
    "dtype": list(DTYPES),
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (64, 64), (33, 7)],
    "heads_first": [False, True],
    "mask": [None, *MASKS],
    "mask_list": [False, True],
    "is_causal": [False, True],
    "offsets": ["none", "one", "each"],
    "window": [(-1, -1), (40, 9)],
    "softcap": [0.0, 1.5],
    "slopes": [0, 1, 2],
    "sinks": [0, 1, 2],
    "weights": [False, True],
}
CASES = [Packed(**row) for row in covering(OPTIONS)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pair_of_options(case: Packed, one_thread: None) -> None:
    check_alone(case)


#: On instruction sets that multiply bfloat16 numbers, float32 numbers are sums of up to three of them.
ARITHMETICS = [*((dtype, "highest") for dtype in DTYPES), (torch.float32, "high"), (torch.float32, "medium")]


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Lets a test set torch's precision of float32 products, and restores it after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dtype", "exactness"), ARITHMETICS, ids=lambda x: NAMES[x] if isinstance(x, torch.dtype) else x
)
def test_instruction_sets(
    dtype: torch.dtype, exactness: str, isa: str, one_thread: None, precision: Callable[[str], None]
) -> None:
    precision(exactness)
    case = Packed(dtype, is_causal=True, offsets="each")
    # Two masks take turns.
    if (ARITHMETICS.index((dtype, exactness)) + [*backends.cpu_isas(), *gpu.KERNELS].index(isa)) % 2:
        mask = "bfloat16" if exactness == "highest" else "float keys"
        check_alone(replace(case, mask=mask, weights=True))
    else:
        check_alone(replace(case, mask="float", mask_list=True, slopes=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kernel(dtype: torch.dtype, device: str, one_thread: None) -> None:
    """The loops, and the kernels of a GPU, if there is one."""
    lengths = ((3, 40), (0, 0), (1, 90), (30, 7), (16, 17))
    check_alone(Packed(dtype, lengths, is_causal=True, offsets="each", slopes=2, sinks=2, device=device))


@pytest.mark.parametrize("mask_list", [False, True])
@pytest.mark.parametrize("mask", ["float", "float rows", "float keys"])
def test_one_query_or_one_key(mask: str, mask_list: bool, isa: str, one_thread: None) -> None:
    """The own mask of such a sequence has one row or one column, and looks as if it were broadcast."""
    lengths = ((1, 200), (70, 1), (150, 90), (1, 1))
    check_alone(Packed(lengths=lengths, heads=(4, 2), mask=mask, mask_list=mask_list))


@pytest.mark.parametrize(
    "case",
    [
        # With one kv head, three threads work on two sequences at once.
        Packed(torch.bfloat16, ((400, 600), (390, 600), (380, 590)), heads=(4, 1), slopes=1),
        Packed(torch.bfloat16, heads=(2, 1), dims=(64, 64), mask="shared keys"),
        Packed(torch.float32, heads=(2, 1), mask="shared"),
        Packed(torch.bfloat16, mask="bfloat16"),
        Packed(torch.float32, heads=(2, 1), mask="float keys", mask_list=True),
        Packed(torch.bfloat16, mask="float", mask_list=True),
    ],
    ids=str,
)
def test_threads(case: Packed, isa: str, one_thread: None) -> None:
    tensors = case.inputs()
    first = everything(case, case.run(tensors), tensors)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        again = everything(case, case.run(tensors), tensors)
        for name, result in first.items():
            assert torch.equal(result, again[name]), f"{name} with {threads} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_counts_sequences(dtype: torch.dtype, isa: str) -> None:
    """A sequence drops the same weights in any batch: its number counts, not its place."""
    case = Packed(dtype, weights=True)
    tensors = case.inputs()
    packed = case.run(tensors, dropout_p=0.4)
    dropped = packed["weights"][8] == 0
    assert 0.3 < float(dropped[..., :600].float().mean()) < 0.5
    for b in range(len(case.lengths)):
        own = case.parts(b, tensors)
        for name, result in case.run(own, b, dropout_p=0.4).items():
            result = case.part(b, name, result) if name == "weights" else result
            assert torch.equal(case.part(b, name, packed[name]), result), f"{name} of sequence {b}"
