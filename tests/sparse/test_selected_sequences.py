"""Selected keys of packed sequences: the same numbers as by the mask that each sequence's selection means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import varlen_cases
from cases import DTYPES, check, cotangents_of, gradients
from comparisons import assert_same
from selected_varlen_cases import BASE, KINDS, LENGTHS, selecting
from torch import Tensor
from varlen_cases import CASES, starts

import selfattn_ext
from selfattn_ext import sparse_attention, varlen_attention
from selfattn_ext.formula_steps import mask_of_sequence


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_kinds(number: int, isa: str) -> None:
    offsets = tuple(keys - queries for queries, keys in LENGTHS)
    for dtype in (torch.bfloat16, DTYPES[number % len(DTYPES)]):
        case = replace(BASE, dtype=dtype, is_causal=True, offsets=offsets)
        check(selecting(case, list(KINDS)[number]))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_options(number: int) -> None:
    """Weights and gradients of masks, which some of these cases have, come from the call with a mask."""
    case = replace(CASES[number], weights=CASES[number].weights and number % 4 == 0)
    if number % 2:
        case = replace(case, mask=None)
    check(selecting(case, list(KINDS)[number % len(KINDS)], selected=number % 4))


@pytest.mark.parametrize("mask", [None, "bool", "float heads"])
def test_the_mask_that_a_selection_becomes(mask: str | None) -> None:
    """It goes together with a mask of the user. More rows than the longest sequence has are in none."""
    for kind in ("keys of kv heads", "blocks of 7"):
        small = varlen_cases.of(((3, 9), (0, 2), (5, 4)), heads=4, kv_heads=2, head_dim=8, value_dim=3)
        check(selecting(replace(small, mask=mask, weights=True, lse=True, more=7), kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["keys", "keys of all heads", "blocks of 16"])
def test_a_sequence_gets_the_bits_of_a_call_of_its_own(
    kind: str, dtype: torch.dtype, one_thread: None
) -> None:
    """And so does a batch of sequences with any number of threads. Some make tiles of blocks, some do not."""
    lengths = ((701, 900), (9, 900), (130, 70), (1, 40))
    case = selecting(varlen_cases.of(lengths, heads=4, kv_heads=2, head_dim=64, dtype=dtype), kind, 9)
    case = replace(case, sinks=1, lse=True)
    tensors = case.inputs()
    alone = case.run_with_gradients(tensors)
    cotangents = cotangents_of(case.run(tensors), case.seed)
    torch.set_num_threads(3)
    assert_same(case.run_with_gradients(tensors), alone)
    torch.set_num_threads(1)
    at_query, at_key = 0, 0
    for queries, keys in lengths:
        rows, columns = slice(at_query, at_query + queries), slice(at_key, at_key + keys)
        at_query, at_key = at_query + queries, at_key + keys
        indices = {
            name: value[..., rows, :].view(1, -1, queries, 9) if isinstance(value, Tensor) else value
            for name, value in case.selection().items()
        }
        own = {
            name: tensors[name].detach()[place].transpose(0, 1)[None].requires_grad_()
            for name, place in (("query", rows), ("key", columns), ("value", columns))
        }
        out, lse = sparse_attention(
            **own, **indices, enable_gqa=True, sinks=tensors["sinks"].detach(), return_lse=True
        )
        assert_same(out[0].transpose(0, 1), alone["out"][rows])
        assert_same(lse[0], alone["lse"][:, rows])
        incoming = {
            "out": cotangents["out"][rows].transpose(0, 1)[None],
            "lse": cotangents["lse"][:, rows][None],
        }
        found = gradients({"out": out, "lse": lse}, incoming, own)
        for name, place in (("query", rows), ("key", columns), ("value", columns)):
            grad = f"grad of {name}"
            assert_same(found[grad][0].transpose(0, 1), alone[grad][place], name)


def test_derivatives() -> None:
    for kind in ("keys", "blocks of 7"):
        small = varlen_cases.of(((2, 4), (0, 2), (2, 8)), heads=2, kv_heads=1, head_dim=2, value_dim=1)
        case = selecting(replace(small, dtype=torch.float64, sinks=1, alibi=1, softcap=3.0, lse=True), kind)
        function, points = case.as_function()
        assert torch.autograd.gradcheck(function, points)
        assert torch.autograd.gradgradcheck(function, points)


@pytest.mark.parametrize("kind", ["keys of kv heads", "blocks of 16"])
def test_keys_that_are_not_selected_do_not_matter(kind: str, isa: str) -> None:
    """Nor do those of other sequences, and rows of none."""
    case = selecting(replace(BASE, kv_heads=4), kind, 3)
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    expected = case.run(tensors)
    hidden = [~case.visible(b, *lengths).expand(4, *lengths).any(1).T for b, lengths in enumerate(LENGTHS)]
    for name in ("key", "value"):
        tensors[name] = tensors[name].masked_fill(torch.cat(hidden)[..., None], torch.nan)
    assert_same(case.run(tensors), expected)


def test_a_list_of_masks_and_a_mask_with_a_gradient() -> None:
    case = selecting(replace(BASE, mask="float heads"), "keys")
    tensors = case.inputs()
    found = case.run_with_gradients(tensors)  # by the mask, because that requires a gradient
    given: dict[str, Any] = dict(tensors)
    given["attn_mask"] = [
        mask_of_sequence(tensors["attn_mask"].detach(), b, queries, keys)
        for b, (queries, keys) in enumerate(LENGTHS)
    ]
    options: dict[str, Any] = {**case.lengths(), **case.selection(), "enable_gqa": True}
    out = varlen_attention(**given, **options)
    torch.testing.assert_close(out, found["out"])
    with pytest.raises(TypeError, match="attn_mask must be one tensor where indices become a mask, got a li"):
        varlen_attention(**given, **options, return_weights=True)


def test_functions_of_scores_and_statistics() -> None:
    """They come from the call with the mask."""
    case = selecting(BASE, "blocks of 16")
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    options: dict[str, Any] = {**case.lengths(), **case.selection(), "enable_gqa": True}
    expected = varlen_attention(**tensors, **options, is_causal=True, return_lse=True)
    out = varlen_attention(**tensors, **options, mask_mod=lambda b, h, q, k: k <= q)
    torch.testing.assert_close(out, expected[0])
    request = selfattn_ext.AuxRequest(lse=True)
    out, aux = varlen_attention(**tensors, **options, is_causal=True, return_aux=request)
    torch.testing.assert_close((out, aux.lse), expected)


def test_compiled() -> None:
    case = selecting(BASE, "blocks of 16")
    tensors = case.inputs()
    lengths = case.lengths()

    def run(*tensors: Tensor) -> Tensor:
        query, key, value, indices, starts_q, starts_k = tensors
        result: Tensor = varlen_attention(
            query, key, value, starts_q, starts_k, lengths["max_seqlen_q"], lengths["max_seqlen_k"],
            block_indices=indices, block_size=16, enable_gqa=True,
        )  # fmt: skip
        return result

    inputs = [tensors[name] for name in ("query", "key", "value")]
    inputs += [case.indices(), lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]]
    expected = run(*inputs)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert_same(compiled, expected)
    wanted = torch.autograd.grad(expected.sum(), inputs[:3])
    assert_same(torch.autograd.grad(compiled.sum(), inputs[:3]), wanted)


ROWS = torch.zeros(9, 2, dtype=torch.int64)
REFUSALS = [
    ({"indices": ROWS.float()}, "indices must be int32 or int64, got torch.float32"),
    ({"indices": ROWS, "block_indices": ROWS}, "one of indices and block_indices must be given, but both"),
    ({"block_size": 2}, "one of indices and block_indices must be given, but neither"),
    ({"block_indices": ROWS}, "block_size must be given with block_indices"),
    ({"indices": ROWS[:8]}, r"indices must have the shape \(4, 4 or 1, 9, any\).*is \(1, 8, 2\)"),
    ({"indices": ROWS.expand(3, 9, 2)}, r"its shape is \(3, 9, 2\)"),
    ({"indices": ROWS.expand(1, 4, 9, 2)}, r"indices of packed queries must be \(heads, total, K\)"),
    ({"block_indices": ROWS[:5], "block_size": 2}, r"\(4, 4 or 1, 9, any\)"),  # rows of blocks of queries
    # The first sequence has two keys, the last one seven.
    ({"indices": ROWS + 2}, "indices must lie between 0 and 1, the last of the keys, .* one is 2"),
    ({"indices": ROWS + 7}, "indices must lie between 0 and 1, the last of the keys, .* one is 7"),
    ({"indices": ROWS - 2}, "indices must lie between 0 and .* one is -2"),
    ({"block_indices": ROWS + 1, "block_size": 2}, "0 and 0, the last of the blocks of 2 keys.*one is 1"),
]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"return_weights": True}], ids=["lists", "mask"])
@pytest.mark.parametrize(("given", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(given: dict[str, Any], message: str, more: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        varlen_attention(**varlen_cases.ARGUMENTS, **given, **more)


def test_the_operator_trusts_no_lists() -> None:
    """It checks numbers against the keys of each sequence, and the rows."""
    query = torch.randn(1, 2, 5, 8, device="cpu")
    lengths: dict[str, Any] = {"cu_seqlens_q": starts([2, 3], device="cpu"), "max_seqlen_q": 3}
    lengths["cu_seqlens_k"] = starts([1, 4], device="cpu")

    def run(lists: list[list[int]], size: tuple[int, int] = (1, 1)) -> None:
        given = torch.tensor([[lists]], dtype=torch.int32, device="cpu")
        selfattn_ext.ops.attention_forward(
            query, query, query, 1.0, **lengths, max_seqlen_k=4, selection=given, selection_size=list(size)
        )

    run([[0], [-1], [3], [0], [2]])
    with pytest.raises(ValueError, match=r"ascending numbers from 0 to 0 .* row 1 has 1"):
        run([[0], [1], [3], [0], [2]])
    with pytest.raises(ValueError, match=r"ascending numbers from 0 to 3 .* row 4 has 4"):
        run([[0], [0], [3], [0], [4]])
    with pytest.raises(ValueError, match=r"selection must have the shape \(1 or 1, 1, 2 or 2, 5, any\)"):
        run([[0], [0], [3], [0]])
    with pytest.raises(ValueError, match="packed queries do not share lists, but a row is for 2"):
        run([[0], [0], [0]], (2, 1))
