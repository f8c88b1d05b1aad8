"""Packed sequences with a list of masks, one for each: results, gradients and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch
import varlen_cases
from cases import drawn, exact_inputs, gradients
from tolerances import assert_accurate
from torch import Tensor
from varlen_cases import Results, starts

from selfattn_ext import reference, scaled_dot_product_attention, varlen_attention


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_for_each_sequence(kind: str) -> None:
    case = varlen_cases.of(((7, 9), (1, 4), (12, 12), (0, 2)), heads=2)
    tensors = case.inputs()
    generator = torch.Generator().manual_seed(0)

    def mask(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, device="cpu").to(gpu.DEVICE)
        return numbers > -0.5 if kind == "bool" else numbers.requires_grad_()

    masks = [mask(1, 9), mask(2, 1, 4), mask(12, 1), mask(1, 0, 2)]
    lengths = case.lengths()
    leaves = {name: tensors[name] for name in ("query", "key", "value")}
    leaves |= {f"mask {n}": m for n, m in enumerate(masks)}

    def results(attention: Callable[..., Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        query, key, value, *masks = leaves.values()
        out = attention(query, key, value, **lengths, attn_mask=masks)
        return {"out": out} | gradients({"out": out.square()}, {"out": torch.ones_like(out)}, leaves)

    def formula(*three: Tensor, **options: Any) -> Tensor:
        return reference.varlen_attention(*three, **options).out

    exact, peer = results(formula, exact_inputs(leaves)), results(formula, leaves)
    for name, result in results(varlen_attention, leaves).items():
        assert_accurate(name, result.detach(), exact[name].detach(), peer[name].detach())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", ["square", "keys", "heads"])
def test_masks_of_sequences_are_not_padded(shape: str, requires_grad: bool) -> None:
    """With one long and many short sequences, no tensor is larger than all masks together, or than query."""
    lengths = [64, *[3] * 30]
    shapes = {"square": lambda n: (n, n), "keys": lambda n: (n,), "heads": lambda n: (2, n, n)}
    masks = [torch.randn(shapes[shape](n)).requires_grad_(requires_grad) for n in lengths]
    rows = torch.randn(sum(lengths), 2, 8, requires_grad=requires_grad)
    offsets = starts(lengths)
    with Results() as results:
        out = varlen_attention(rows, rows, rows, offsets, offsets, 64, 64, masks)
        if requires_grad:
            out.sum().backward()
            assert all(mask.grad is not None and mask.grad.shape == mask.shape for mask in masks)
    largest = max(tensor.untyped_storage().nbytes() for _, tensor in results.found)
    assert largest <= max(sum(mask.nbytes for mask in masks), rows.nbytes)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_some_masks(mask_dtype: torch.dtype, device: str) -> None:
    """Masks with and without gradients, one given twice, and one that is no leaf get the gradients of calls
    with their sequence alone, in their own dtype.
    """
    lengths = [20, 7, 7, 0, 33]
    rows = torch.randn(sum(lengths), 4, 16, device=device)
    leaf = torch.randn(4, 33, 33, device=device, dtype=mask_dtype, requires_grad=True)
    twice = torch.randn(7, 7, device=device, dtype=mask_dtype, requires_grad=True)
    fixed = torch.randn(1, 20, device=device, dtype=mask_dtype)
    none = torch.randn(0, 0, device=device, dtype=mask_dtype, requires_grad=True)
    masks = [fixed, twice, twice, none, leaf.mT]
    offsets = starts(lengths, device=device)
    out = varlen_attention(rows, rows, rows, offsets, offsets, 40, 50, masks)
    out.square().sum().backward()
    grads = {}
    for mask, piece, result in zip(masks, rows.split(lengths), out.detach().split(lengths), strict=True):
        own, part = mask.detach().requires_grad_(), piece.transpose(0, 1)
        alone = scaled_dot_product_attention(part, part, part, own)
        assert torch.equal(alone.transpose(0, 1), result)
        (grad,) = torch.autograd.grad(alone.square().sum(), own)
        grads[mask] = grads.get(mask, 0) + grad
    assert fixed.grad is None
    for given, expected in ((twice, grads[twice]), (none, grads[none]), (leaf, grads[masks[-1]].mT)):
        assert given.grad is not None
        assert given.grad.dtype == mask_dtype
        if device == "cpu":
            assert torch.equal(given.grad, expected)
        else:
            torch.testing.assert_close(given.grad, expected)


def test_second_derivatives_of_masks() -> None:
    rows = torch.randn(6, 2, 3, dtype=torch.float64)
    masks = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 2), (1, 1), (2, 1, 3), (0, 0))]
    offsets = starts((2, 1, 3, 0))

    def attend(rows: Tensor, *masks: Tensor) -> Tensor:
        return varlen_attention(rows, rows, rows, offsets, offsets, 3, 3, masks)

    points = [tensor.requires_grad_() for tensor in (rows, *masks)]
    assert torch.autograd.gradcheck(attend, points)
    assert torch.autograd.gradgradcheck(attend, points)


def test_masks_under_transforms() -> None:
    """These are torch.func's gradients, forward mode and vmap over masks."""
    rows, offsets = torch.randn(5, 2, 4), starts((2, 3))
    masks = (torch.randn(2, 2, 2), torch.randn(2, 1, 3))

    def loss(*masks: Tensor) -> Tensor:
        return varlen_attention(rows, rows, rows, offsets, offsets, 3, 3, list(masks)).sin().sum()

    leaves = [mask.clone().requires_grad_() for mask in masks]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(*masks), expected)
    directions = tuple(torch.randn_like(mask) for mask in masks)
    _, slope = torch.func.jvp(loss, masks, directions)
    torch.testing.assert_close(slope, sum((g * d).sum() for g, d in zip(expected, directions, strict=True)))
    stacks = [torch.stack([mask, 2 * mask], -1) for mask in masks]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=-1)(*stacks)
    torch.testing.assert_close([grad[0] for grad in mapped], list(expected))


def test_threads_change_no_bit_of_a_list_of_numbers(one_thread: None) -> None:
    """If a mask is one number for all queries and keys of a sequence, its gradient is one long sum."""
    offsets = starts((300, 5))
    query, key, value = (torch.randn(305, 2, 4, device=gpu.DEVICE) for _ in range(3))
    shapes = ((), (1, 1, 1))
    masks = [torch.zeros(shape, device=gpu.DEVICE, requires_grad=True) for shape in shapes]
    outcomes = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = varlen_attention(query, key, value, offsets, offsets, 300, 300, masks, softcap=2.0)
        outcomes.append(torch.autograd.grad(out.square().sum(), masks))
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_masks_of_unlike_heads_in_company(isa: str, one_thread: None) -> None:
    """One sequence's sums need more memory than the sums of another sequence with more keys."""
    lengths, heads = (300, 128, 200), 16
    query, key, value = (
        drawn((sum(lengths), n, 8), torch.Generator().manual_seed(n)).to(gpu.DEVICE, torch.float32)
        for n in (heads, 1, 1)
    )
    masks = [torch.zeros(shape, device=gpu.DEVICE) for shape in ((1, 1, 300), (heads, 1, 128), (heads, 1, 1))]

    def gradients_of(chosen: list[int]) -> tuple[Tensor, ...]:
        some = [masks[b].clone().requires_grad_() for b in chosen]
        rows = [torch.cat([one.split(lengths)[b] for b in chosen]) for one in (query, key, value)]
        offsets = starts([lengths[b] for b in chosen])
        longest = max(lengths[b] for b in chosen)
        out = varlen_attention(*rows, offsets, offsets, longest, longest, some, softcap=2.0, enable_gqa=True)
        return torch.autograd.grad(out.square().sum(), some)

    for b, grad in enumerate(gradients_of([0, 1, 2])):
        assert torch.equal(grad, gradients_of([b])[0]), b
