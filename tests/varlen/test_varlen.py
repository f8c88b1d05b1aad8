"""Packed sequences: every option, and the packing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import varlen_cases
from cases import Case, Judge, check, cotangents_of, dropout_seed, gradients
from conftest import KERNELS, forced
from tolerances import assert_accurate
from torch import Tensor
from varlen_cases import CASES, Results, VarlenCase, packed, starts

from selfattn_ext import ops, reference, scaled_dot_product_attention, varlen_attention

#: Lengths around the tiles of kernels, and all options at once.
MIXED = varlen_cases.of(
    ((3, 40), (64, 64), (0, 0), (1, 200), (130, 7), (16, 17), (17, 16)),
    heads=4,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    mask="float heads",
    is_causal=True,
    offsets=(37, 0, 0, 199, 5, 1, -1),
    alibi=2,
    sinks=2,
    dropout_p=0.2,
    weights=True,
    lse=True,
)


@pytest.mark.parametrize("case", [*CASES, MIXED], ids=lambda case: f"{case.seed}-{case}")
def test_options(case: VarlenCase) -> None:
    """One judge serves all kernels, because it takes longer than they do."""
    tensors = case.inputs()
    cotangents = cotangents_of(case.run(tensors), case.seed)
    judge = Judge(case, tensors, cotangents)
    for kernel in KERNELS:
        with forced(kernel):
            ours = case.run(tensors)
            judge.assert_accurate(ours | gradients(ours, cotangents, tensors))


def test_dropout_drops_what_a_padded_call_drops() -> None:
    case = varlen_cases.of(((7, 9), (0, 4), (12, 5)), dropout_p=0.4, weights=True, seed=3)
    padded = super(VarlenCase, case).inputs()
    torch.manual_seed(3)
    _, whole = scaled_dot_product_attention(**padded, dropout_p=0.4, return_weights=True)
    ours = case.run(case.inputs())["weights"]
    for index, (queries, keys) in enumerate(case.sequences):
        kept = whole[index, :, :queries, :keys] != 0
        assert torch.equal(ours[index, :, :queries, :keys] != 0, kept)
        assert queries * keys == 0 or 0.3 < float(kept.float().mean()) < 0.9


def padded_attention(padded: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the packed rows of torch's own attention with a padding mask, and of its gradients."""
    padded = padded.detach().requires_grad_()
    longest = padded.shape[2]
    real = torch.arange(longest, device=padded.device) < torch.tensor(lengths, device=padded.device)[:, None]
    mask = (
        real[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool, device=padded.device).tril()
    )
    out = F.scaled_dot_product_attention(padded, padded, padded, mask)
    (grad,) = torch.autograd.grad((out.square() * real[:, None, :, None]).sum(), padded)
    return packed(out.detach(), lengths), packed(grad, lengths)


def test_torch_padded(device: str) -> None:
    """A judge that is not ours: torch's own attention in float64, with its float32 result as the peer."""
    lengths = [11, 3, 29, 1]
    padded = torch.randn(4, 3, 29, 32, device=device)
    rows = packed(padded, lengths).requires_grad_()
    offsets = starts(lengths, torch.int32, device)
    out = varlen_attention(rows, rows, rows, offsets, offsets, 29, 29, is_causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), rows)
    exact, peer = padded_attention(padded.double(), lengths), padded_attention(padded, lengths)
    assert_accurate("out", out.detach(), exact[0], peer[0])
    assert_accurate("grad", grad, exact[1], peer[1])


def test_views_of_one_packed_tensor_are_not_copied() -> None:
    qkv = torch.randn(24, 3, 4, 16)
    offsets = starts((11, 0, 13), torch.int32)
    with Results() as results:
        out = varlen_attention(*qkv.unbind(1), offsets, offsets, 13, 13, is_causal=True)
    # Tensors as large as a query lie in the given memory, or in that of results of ours.
    mine = {tensor.untyped_storage().data_ptr() for name, tensor in results.found if name == ops.NAMESPACE}
    known = {qkv.untyped_storage().data_ptr(), *mine}
    large = [tensor for _, tensor in results.found if tensor.numel() >= 24 * 4 * 16]
    assert all(tensor.untyped_storage().data_ptr() in known for tensor in large)
    assert out.shape == (24, 4, 16)
    assert out.is_contiguous()
    qkv.requires_grad_()
    out = varlen_attention(*qkv.unbind(1), offsets, offsets, 13, 13, is_causal=True)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape


def test_offsets_may_be_strided_and_written_after_the_call() -> None:
    query = torch.randn(9, 2, 8, requires_grad=True)
    expected = varlen_attention(query, query, query, starts((4, 5)), starts((4, 5)), 5, 5)
    wide = torch.stack([starts((4, 5)), starts((4, 5)) + 77], dim=1)
    offsets = wide[:, 0]
    assert not offsets.is_contiguous()
    out = varlen_attention(query, query, query, offsets, offsets, 5, 5)
    wide.zero_()
    assert torch.equal(out, expected)
    gradients = [torch.autograd.grad(result.square().sum(), query)[0] for result in (out, expected)]
    assert torch.equal(*gradients)


def test_rows_of_no_sequence() -> None:
    """Such rows have results 0 and -inf and gradients 0, and no influence, whatever they hold."""
    case = varlen_cases.of(((5, 6), (2, 3)), more=4, lse=True)
    ours = check(case)
    assert ours["out"][7:].abs().max() == 0
    assert torch.isneginf(ours["lse"][:, 7:]).all()
    assert ours["grad of query"][7:].abs().max() == ours["grad of value"][9:].abs().max() == 0


def test_no_sequences_and_no_rows() -> None:
    none, empty = starts(()), starts((0, 0, 0))
    query = torch.randn(0, 2, 8, requires_grad=True)
    for offsets in (none, empty):
        out, weights, lse = varlen_attention(
            query, query, query, offsets, offsets, 0, 0, return_weights=True, return_lse=True
        )
        assert out.shape == (0, 2, 8)
        assert weights.shape == (len(offsets) - 1, 2, 0, 0)
        assert lse.shape == (2, 0)
        assert torch.autograd.grad(out.sum() + weights.sum() + lse.sum(), query)[0].shape == (0, 2, 8)
    rows = torch.randn(3, 2, 8)
    assert varlen_attention(rows, rows, rows, none, none, 4, 4).abs().max() == 0


def test_longest_lengths_may_be_generous() -> None:
    case = varlen_cases.of(((5, 6), (2, 3)), is_causal=True)
    tensors = case.inputs()
    generous = replace(case, queries=50, keys=90)
    assert torch.equal(case.run(tensors)["out"], generous.run(tensors)["out"])
    assert replace(generous, weights=True).run(tensors)["weights"].shape == (2, 2, 50, 90)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (3, {"is_causal": True, "offsets": (1, -1, 0), "softcap": 2.0, "sinks": 2, "lse": True}),
        (2, {"mask": "float keys", "alibi": 2, "dropout_p": 0.3, "weights": True, "kv_heads": 1}),
    ],
    ids=str,
)
def test_gradcheck_of_both_orders(count: int, options: dict[str, Any]) -> None:
    case = varlen_cases.of(((2, 2), (1, 1), (0, 1))[:count], head_dim=1, value_dim=1, **options)
    function, points = case.as_function()
    assert torch.autograd.gradcheck(function, points)
    assert torch.autograd.gradgradcheck(function, points)


def test_the_reference_is_the_formula_of_each_sequence() -> None:
    """The judge itself equals the padded formula with the padding hidden."""
    case: Case = varlen_cases.of(((4, 6), (3, 2)), is_causal=True, dropout_p=0.3, sinks=2, alibi=2)
    padded = super(VarlenCase, case).inputs()
    seed = dropout_seed(0)
    real = torch.arange(6) < torch.tensor(case.key_lengths)[:, None]
    whole = reference.attention(
        **padded, attn_mask=real[:, None, None, :], is_causal=True, dropout_p=0.3, dropout_seed=seed
    )
    ours = reference.varlen_attention(
        **case.inputs(), **case.lengths(), is_causal=True, dropout_p=0.3, dropout_seed=seed
    )
    torch.testing.assert_close(ours.out, packed(whole.out, case.query_lengths))
    assert ours.weights[1, :, 3:].abs().max() == ours.weights[1, :, :, 2:].abs().max() == 0
