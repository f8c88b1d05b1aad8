"""Score functions in varlen_attention: each sequence equals its own call, and the formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gpu
import pytest
import torch
from functions import (
    Functions,
    assert_derivatives,
    assert_same,
    assert_same_dropout,
    assert_same_on_threads,
    flex_attention,
    gradients,
    mask_of,
    options_of,
    without_compiler,
)
from functions import formula as formula_of_batch
from test_flex_functions import DTYPES
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import selfattn_ext
from selfattn_ext import backends

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")

#: The type leaves out the signature, because tests unpack tensors and options into one call.
varlen_attention: Any = selfattn_ext.varlen_attention

#: (queries, keys) of sequences: different lengths, empty ones, without keys and with one key.
LENGTHS = ((33, 70), (0, 5), (4, 0), (67, 64), (1, 1), (130, 131), (0, 0))
HEADS = 4


@dataclass
class Packed:
    """Packed sequences, followed by rows of NaN that belong to none of them."""

    lengths: Sequence[tuple[int, int]] = LENGTHS
    dtype: torch.dtype = torch.float32
    kv_heads: int = 2

    def __post_init__(self) -> None:
        rows = [sum(each) + 3 for each in zip(*self.lengths, strict=True)]
        shapes = ((rows[0], HEADS, 16), (rows[1], self.kv_heads, 16), (rows[1], self.kv_heads, 24))
        self.tensors = [torch.randn(shape).to(self.dtype) for shape in shapes]
        for tensor in self.tensors:
            tensor[-3:] = torch.nan
            tensor.requires_grad_()
        self.starts = [
            torch.tensor([0, *itertools.accumulate(each)]) for each in zip(*self.lengths, strict=True)
        ]
        self.longest = [max(each) for each in zip(*self.lengths, strict=True)]

    def run(self, functions: Functions, **options: Any) -> Any:
        return varlen_attention(
            *self.tensors,
            *self.starts,
            *self.longest,
            enable_gqa=True,
            score_mod=functions.score_mod,
            mask_mod=functions.mask_mod,
            **options,
        )

    def sequence(self, b: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns one sequence's rows as (1, H, L, E)."""
        sides = (0, 1, 1)
        first, end = ([int(starts[b + n]) for starts in self.starts] for n in range(2))
        return [
            tensor[first[side] : end[side]].transpose(0, 1).unsqueeze(0)
            for side, tensor in zip(sides, tensors, strict=True)
        ]

    def alone(
        self, functions: Functions, compute: Callable[..., Tensor], tensors: Sequence[Tensor], **options: Any
    ) -> Tensor:
        """Returns out (total, H, Ev), computed by a call for each sequence, which may have its own mask."""
        masks = options.pop("attn_mask", None)
        outs = []
        for b in range(len(self.lengths)):
            if masks is not None:
                options["attn_mask"] = masks[b]
            out = compute(*self.sequence(b, tensors), moved(functions, b), **options)
            outs.append(out[0].transpose(0, 1))
        return torch.cat([*outs, outs[0].new_zeros(3, *outs[0].shape[1:])])


def moved(functions: Functions, number: int, first: int = 0) -> Functions:
    """Returns the functions as a call for one sequence needs them, whose queries are counted from 0."""
    score_mod, mask_mod = functions.score_mod, functions.mask_mod
    return Functions(
        score_mod and (lambda s, b, h, q, kv: score_mod(s, b + number, h, q + first, kv)),
        mask_mod and (lambda b, h, q, kv: mask_mod(b + number, h, q + first, kv)),
        functions.learned,
    )


def formula(query: Tensor, key: Tensor, value: Tensor, functions: Functions, **options: Any) -> Any:
    """Computes the formula for a batch of one; without scores, torch.vmap would not call the functions."""
    if 0 in (query.size(2), key.size(2)):
        functions = Functions()
    return formula_of_batch(query, key, value, functions, **options)


def by_formula(*arguments: Any, **options: Any) -> Tensor:
    out: Tensor = formula(*arguments, **options).out
    return out


def by_itself(query: Tensor, key: Tensor, value: Tensor, functions: Functions) -> Tensor:
    """Computes flex_attention for a batch of one."""
    sizes = (1, HEADS, query.size(2), key.size(2))
    mask = mask_of(functions, sizes, 16) if 0 not in sizes else None
    out: Tensor = flex_attention(query, key, value, functions.score_mod, mask, enable_gqa=True)
    return out


def learned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    ).requires_grad_()


def of_sequences(dtype: torch.dtype) -> Functions:
    """These read tensors by sequence number, by query and by distance, and hide scores."""
    prefix = torch.arange(len(LENGTHS)) * 3 + 1
    factors, table = learned(len(LENGTHS), 200, dtype=dtype), learned(HEADS, 300, dtype=dtype)
    return Functions(
        lambda s, b, h, q, kv: s * torch.sigmoid(factors[b, q]) + table[h, q - kv + 150],
        lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv),
        [factors, table],
    )


def of_scores(dtype: torch.dtype) -> Functions:
    slopes = learned(HEADS, dtype=dtype)
    return Functions(
        lambda s, b, h, q, kv: 3 * torch.tanh(s / 3) - slopes[h] * (q - kv).abs() / 50, None, [slopes]
    )


def of_masks(dtype: torch.dtype) -> Functions:
    """The sequences consist of documents; every seventh row sees no key."""
    ids = torch.randint(0, 3, (len(LENGTHS), 200))
    return Functions(None, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q % 7 != 3))


ALL = {make.__name__: make for make in (of_sequences, of_scores, of_masks)}


def check(name: str, dtype: torch.dtype, kv_heads: int = 2, **options: Any) -> None:
    packed, functions = Packed(dtype=dtype, kv_heads=kv_heads), ALL[name](dtype)
    out = packed.run(functions, **options)
    results = [out, *gradients(out, [*packed.tensors, *functions.learned])]
    judges, terms = [], [1.0] * 4
    for judge in (torch.float64, dtype):
        given = [tensor.detach().to(judge).requires_grad_() for tensor in packed.tensors]
        right = packed.alone(functions, by_formula, given, **options)
        judges.append([right, *gradients(right, [*given, *functions.learned])])
    if functions.learned:
        # The gradients of learned tensors are sums over many scores.
        doubles = [tensor.detach().double() for tensor in packed.tensors]
        scores = [torch.zeros(1, HEADS, *each, requires_grad=True) for each in packed.lengths]
        right = packed.alone(functions, by_formula, doubles, attn_mask=scores, **options)
        of_scores = sum(float(each.abs().sum()) for each in gradients(right, scores))
        terms += [of_scores / tensor.numel() for tensor in functions.learned]
    for index, (result, exact, peer, term) in enumerate(zip(results, *judges, terms, strict=True)):
        largest = max(term, float(exact.detach().abs().max()))
        assert_accurate(f"{name} {index}", result.detach(), exact.detach(), peer.detach(), largest, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("isa", backends.cpu_isas())
def test_instruction_sets(isa: str) -> None:
    with backends.use_cpu_isa(isa):
        for dtype in (torch.float32, torch.bfloat16):
            check("of_sequences", dtype)


@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_heads(kv_heads: int) -> None:
    check("of_sequences", torch.float32, kv_heads)


OPTIONS = options_of(HEADS)


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_pairs_of_options(pair: tuple[str, str]) -> None:
    check("of_sequences", torch.float32, **OPTIONS[pair[0]], **OPTIONS[pair[1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_the_bits_of_calls_of_their_own(name: str, dtype: torch.dtype) -> None:
    functions = ALL[name](dtype)
    for lengths in (LENGTHS, LENGTHS[:1], LENGTHS[3:4]):
        packed = Packed(lengths, dtype)
        out = packed.run(functions)
        alone = packed.alone(functions, by_itself, packed.tensors)
        assert_same([out, *gradients(out, packed.tensors)], [alone, *gradients(alone, packed.tensors)])


def test_weights_and_statistics() -> None:
    packed, functions = Packed(dtype=torch.float64), of_sequences(torch.float64)
    out, weights, lse = packed.run(functions, return_weights=True, return_lse=True)
    assert torch.equal(out, packed.run(functions))
    outside, mine, right = torch.ones(weights.shape, dtype=torch.bool), [], []
    for b, (queries, keys) in enumerate(LENGTHS):
        exact = formula(*packed.sequence(b, packed.tensors), moved(functions, b))
        first = int(packed.starts[0][b])
        outside[b, :, :queries, :keys] = False
        mine += [weights[b, :, :queries, :keys], lse[:, first : first + queries]]
        right += [exact.weights[0], exact.lse[0]]
    torch.testing.assert_close(mine, right)
    assert (weights[outside] == 0).all()
    leaves = [*packed.tensors[:2], *functions.learned]
    for which in (0, 1):
        totals = (
            sum((each.nan_to_num(neginf=0.0) ** 2).sum() for each in results[which::2])
            for results in (mine, right)
        )
        grads = (torch.autograd.grad(total, leaves, retain_graph=True) for total in totals)
        torch.testing.assert_close(*grads)


def test_masks_with_gradients_beside_functions() -> None:
    """Each sequence has a mask of its own, which is not padded."""
    packed, functions = Packed(dtype=torch.float64), of_sequences(torch.float64)
    masks = [torch.randn(HEADS, *each, dtype=torch.float64, requires_grad=True) for each in LENGTHS]
    out = packed.run(functions, attn_mask=masks)
    right = packed.alone(functions, by_formula, packed.tensors, attn_mask=masks)
    torch.testing.assert_close(out, right)
    leaves = [*packed.tensors, *functions.learned, *masks]
    torch.testing.assert_close(gradients(out, leaves), gradients(right, leaves))


def test_dropout_has_the_pattern_of_plain_attention() -> None:
    packed = Packed()
    out, weights = assert_same_dropout(
        lambda score_mod, **options: packed.run(Functions(score_mod), **options)
    )
    value = packed.sequence(3, packed.tensors)[2]
    mixed = weights[3, :, :67, :64] @ value[0].repeat_interleave(2, 0)
    torch.testing.assert_close(out[37:104].transpose(0, 1), mixed)


def test_what_is_hidden_may_be_nan() -> None:
    packed = Packed([(40, 50), (30, 20)])
    table = torch.randn(2, 50)
    table[0, 45:], table[1, 20:] = torch.nan, torch.nan
    table.requires_grad_()
    hides = torch.tensor([45, 20])
    functions = Functions(lambda s, b, h, q, kv: s + table[b, kv], lambda b, h, q, kv: kv < hides[b])
    clean = packed.run(functions)
    leaves = [*packed.tensors, table]
    before = gradients(clean, leaves)
    with torch.no_grad():
        packed.tensors[1][45:50], packed.tensors[2][45:50] = torch.nan, torch.inf
    out = packed.run(functions)
    assert clean[:-3].isfinite().all()
    assert_same([out, *gradients(out, leaves)], [clean, *before])


def test_any_number_of_threads_gives_the_same_bits(one_thread: None) -> None:
    packed, functions = Packed([(300, 290), (7, 70), (150, 300)]), of_sequences(torch.float32)
    functions.learned = [learned(3, 300, dtype=torch.float32), learned(HEADS, 700, dtype=torch.float32)]
    factors, table = functions.learned
    functions.score_mod = lambda s, b, h, q, kv: s * factors[b, q] + table[h, q - kv + 350]

    def compute() -> list[Tensor]:
        out = packed.run(functions)
        return [out, *gradients(out, [*packed.tensors, *functions.learned])]

    assert_same_on_threads(compute)


def test_second_derivatives_are_those_of_the_formula() -> None:
    table = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    given = [torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    starts = torch.tensor([0, 4, 6])

    def attend(query: Tensor, key: Tensor, value: Tensor, learned: Tensor) -> Tensor:
        out: Tensor = varlen_attention(
            query, key, value, starts, starts, 4, 4,
            score_mod=lambda s, b, h, q, kv: s * s * 0.3 + torch.tanh(learned)[b, q - kv + 4],
            mask_mod=lambda b, h, q, kv: q >= kv - 1,
        )  # fmt: skip
        return out

    assert_derivatives(attend, given, table)


def test_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="no compiler today.*takes longer") as warned:
        check("of_sequences", torch.float32, window_size=(30, 20))
    assert warned[0].filename == __file__


class TestRefusals:
    packed = Packed([(3, 4), (2, 2)])

    def test_functions(self) -> None:
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4, 4, device=gpu.DEVICE)
        with pytest.raises(
            TypeError, match=r"mask_mod must be a function, but it is a BlockMask.*pass its mask_mod"
        ):
            self.packed.run(Functions(None, mask))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="score_mod must be a function, but it is int"):
            self.packed.run(Functions(3))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"torch.where.*test_flex_sequences.py"):
            self.packed.run(Functions(lambda s, b, h, q, kv: s if q > kv else s * 2))
        with pytest.raises(ValueError, match="mask function must return a bool"):
            self.packed.run(Functions(None, lambda b, h, q, kv: q))
        with pytest.raises(ValueError, match="cu_seqlens_q must end within query"):
            varlen_attention(
                *self.packed.tensors, torch.tensor([0, 3, 90]), self.packed.starts[1], 90, 4,
                enable_gqa=True, mask_mod=lambda b, h, q, kv: q >= kv,
            )  # fmt: skip

    def test_indices_beside_a_tensor(self) -> None:
        two = torch.randn(2)
        out = self.packed.run(Functions(lambda s, b, h, q, kv: s + two[b]))
        assert out[:-3].isfinite().all()
        with pytest.raises(IndexError, match="outside"):
            self.packed.run(Functions(lambda s, b, h, q, kv: s + two[q]))
        self.packed.run(Functions(lambda s, b, h, q, kv: s + two[q], lambda b, h, q, kv: q < 2))
