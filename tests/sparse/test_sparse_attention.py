"""Attention to selected keys: the same numbers as by the mask that the selection means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, check, cotangents_of, gradients
from comparisons import assert_same
from option_pairs import CASES
from sparse_cases import BASE, KINDS, SparseCase, sparse
from tolerances import assert_accurate
from torch import Tensor

import selfattn_ext
from selfattn_ext import reference, sparse_attention


def visible_by_hand(case: SparseCase) -> Tensor:
    """Returns what :meth:`SparseCase.visible` returns, one list at a time."""
    keys, _, by_blocks = KINDS[case.kind]
    indices = case.indices()
    seen = torch.zeros(case.batch, case.heads, case.queries, case.keys, dtype=torch.bool)
    for b in range(case.batch):
        for h in range(case.heads):
            for i in range(case.queries):
                row = indices[b, h * indices.size(1) // case.heads, i // keys if by_blocks else i]
                for block in row.tolist():
                    if block >= 0:
                        seen[b, h, i, block * keys : (block + 1) * keys] = True
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_that_a_selection_means(kind: str) -> None:
    case = sparse(replace(BASE, queries=25, keys=53), kind)
    assert torch.equal(case.visible().expand(2, 4, 25, 53), visible_by_hand(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dtype: torch.dtype, isa: str) -> None:
    check(sparse(replace(BASE, dtype=dtype), kind))
    # Many queries of a head share each block, in strips that are full and strips that are not.
    many = replace(BASE, batch=1, queries=149, keys=130, dtype=dtype, is_causal=True, query_offset=40)
    check(sparse(many, kind, selected=3))


SIZES = [(0, 5), (3, 0), (1, 1), (1, 64), (1, 300), (300, 1), (300, 63), (300, 64), (300, 65), (31, 130)]


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("kind", ["keys", "blocks of 16", "blocks of 64"])
def test_sizes(kind: str, queries: int, keys: int, isa: str) -> None:
    for selected in (0, 1, 6):
        case = replace(BASE, batch=1, queries=queries, keys=keys, head_dim=17, value_dim=33)
        check(sparse(case, kind, selected))


@pytest.mark.parametrize("kind", ["keys", "keys of all heads", "blocks of 64"])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 9, 17, 70])
def test_groups_of_heads(group: int, kind: str, isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = replace(BASE, batch=1, heads=2 * group, queries=9, keys=120, head_dim=64, dtype=dtype)
        check(sparse(case, kind))


@pytest.mark.parametrize(
    ("heads", "dtype"), [(3, torch.float64), (3, torch.bfloat16), (20, torch.float32)], ids=str
)
@pytest.mark.parametrize("kind", ["keys of all heads", "blocks of 7"])
def test_keys_are_met_in_parts(kind: str, heads: int, dtype: torch.dtype, isa: str) -> None:
    """More keys than a cache holds: a list goes on where a part ended, even inside a block."""
    case = replace(BASE, batch=1, heads=heads, kv_heads=1, queries=3, keys=701, head_dim=640, value_dim=500)
    case = replace(case, dtype=dtype, is_causal=True, query_offset=690)
    check(sparse(case, kind, 400 if "keys" in kind else 70))


@pytest.mark.parametrize("heads", [4, 20])
@pytest.mark.parametrize("kind", ["keys", "blocks of 7", "blocks of 64", "blocks of 100"])
def test_dropout(kind: str, heads: int, isa: str) -> None:
    """Keys of a block are neighbours, whose random numbers may begin inside of a group of four."""
    for queries, dtype in ((9, torch.float64), (149, torch.float32)):
        case = replace(BASE, batch=1, heads=heads, queries=queries, dropout_p=0.3, dtype=dtype, seed=heads)
        check(sparse(case, kind))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_options(number: int) -> None:
    case = CASES[number]
    kind = list(KINDS)[number % len(KINDS)]
    # Masks that have a row for each query and hide some of their keys are among these.
    check(sparse(case, kind, selected=1 + number % 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["keys", "keys of all heads", "blocks of 16", "blocks by blocks"])
def test_threads(kind: str, dtype: torch.dtype, one_thread: None) -> None:
    """Any number of threads gives the same bits."""
    case = sparse(replace(BASE, queries=701, keys=1500, dtype=dtype, sinks=1), kind, 40)
    tensors = case.inputs()
    alone = case.run_with_gradients(tensors)
    torch.set_num_threads(3)
    assert_same(case.run_with_gradients(tensors), alone)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["keys of kv heads", "blocks of 16", "blocks of 64"])
def test_keys_that_are_not_selected_do_not_matter(
    kind: str, dtype: torch.dtype, junk: float, isa: str
) -> None:
    """Nor do keys that the causal rule hides, although they are in the lists."""
    case = sparse(replace(BASE, batch=1, queries=150, keys=150, dtype=dtype, is_causal=True), kind, 4)
    tensors = case.inputs()
    seen = (case.visible() & torch.ones(150, 150).tril().bool()).unflatten(
        1, (-1, case.heads // case.kv_heads)
    )
    seen = seen.any(2).expand(1, 2, 150, 150) if seen.size(1) == 2 else seen.any(2)
    hidden = ~seen.any(2)
    # Later keys hold junk, and the queries that see one of them are left out of the comparison.
    hidden[..., 100:] = True
    dirty = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name in ("key", "value"):
        dirty[name][hidden] = junk
    dirty = {name: tensor.requires_grad_() for name, tensor in dirty.items()}
    clean_rows = ~(seen & hidden.unsqueeze(2)).any(-1).repeat_interleave(2, 1)
    results, expected = case.run(dirty), case.run(tensors)
    for name, result in results.items():
        rows = clean_rows if result.dim() == 3 else clean_rows.unsqueeze(-1)
        assert_same(result.where(rows, 0.0), expected[name].where(rows, 0.0), name)
    incoming = {
        name: one.where(clean_rows.unsqueeze(-1) if one.dim() == 4 else clean_rows, 0.0)
        for name, one in cotangents_of(expected, 0).items()
    }
    found, wanted = gradients(results, incoming, dirty), gradients(expected, incoming, tensors)
    rows = clean_rows.unsqueeze(-1)
    query = "grad of query"
    assert_same(found[query].where(rows, 0.0), wanted[query].where(rows, 0.0))
    assert not found[query].where(rows, 0.0).isnan().any()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (20, 1)])
@pytest.mark.parametrize("kind", ["keys of all heads", "blocks of 16"])
def test_selected_keys_that_a_mask_hides_do_not_matter(
    kind: str, heads: int, kv_heads: int, junk: float, isa: str
) -> None:
    shape = replace(BASE, batch=1, heads=heads, kv_heads=kv_heads, queries=40, keys=150)
    case = sparse(shape, kind, 9)
    hidden = torch.arange(150) % 5 < 2
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    tensors["attn_mask"] = ~hidden[None, None, None]

    def results(value: float) -> tuple[Tensor, ...]:
        own = dict(tensors)
        for name in ("query", "key", "value"):
            own[name] = tensors[name].clone()
            if name != "query":
                own[name][:, :, hidden] = value
            own[name].requires_grad_()
        out = case.run(own)["out"]
        return out, *torch.autograd.grad(out.square().sum(), [own["query"], own["key"], own["value"]])

    for found, expected in zip(results(junk), results(0.0), strict=True):
        assert_same(found, expected)
        assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["keys", "blocks of 16"])
def test_large_values_and_scores(kind: str, isa: str) -> None:
    """Sums of values near the largest number overflow where their mean does not."""
    case = sparse(replace(BASE, batch=1, queries=150, keys=64), kind, 9)
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    tensors["value"] = torch.full_like(tensors["value"], 3e38)
    tensors["query"] = tensors["query"] * 1e4
    out = case.run(tensors)["out"]
    seen = case.visible().any(-1).expand(out.shape[:3])
    assert out.isfinite().all()
    assert (out[seen] >= 2.9e38).all()
    assert (out[~seen] == 0).all()


def test_first_and_second_derivatives() -> None:
    for kind in ("keys", "blocks of 7"):
        case = replace(sparse(BASE, kind), dtype=torch.float64, queries=5, keys=19, head_dim=3, value_dim=2)
        function, points = replace(case, batch=1, sinks=1, alibi=1, softcap=3.0).as_function()
        assert torch.autograd.gradcheck(function, points)
        assert torch.autograd.gradgradcheck(function, points)


def test_transforms() -> None:
    """torch.func and forward mode compute by the mask."""
    case = sparse(replace(BASE, dtype=torch.float64, lse=False), "blocks of 16")
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    selection = case.selection()

    def run(query: Tensor) -> Tensor:
        result: Tensor = sparse_attention(
            query, tensors["key"], tensors["value"], enable_gqa=True, **selection
        )
        return result

    expected = run(tensors["query"])
    several = torch.stack([tensors["query"], 2 * tensors["query"]])
    torch.testing.assert_close(torch.func.vmap(run)(several)[0], expected)
    direction = torch.randn_like(tensors["query"])
    out, tangent = torch.func.jvp(run, (tensors["query"],), (direction,))
    torch.testing.assert_close(out, expected)

    def formula(query: Tensor) -> Tensor:
        return reference.attention(query, tensors["key"], tensors["value"], visible=case.visible()).out

    torch.testing.assert_close(tangent, torch.func.jvp(formula, (tensors["query"],), (direction,))[1])


def test_compiled() -> None:
    case = sparse(BASE, "blocks of 16")
    tensors = case.inputs()

    def run(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
        result: Tensor = sparse_attention(
            query, key, value, block_indices=indices, block_size=16, is_causal=True, enable_gqa=True
        )
        return result

    inputs = (*(tensors[name] for name in ("query", "key", "value")), case.indices())
    expected = run(*inputs)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert_same(compiled, expected)
    wanted = torch.autograd.grad(expected.sum(), inputs[:3])
    assert_same(torch.autograd.grad(compiled.sum(), inputs[:3]), wanted)


def test_statistics_and_other_kernels() -> None:
    """They come from the call with the mask."""
    case = sparse(BASE, "blocks of 16")
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    request = selfattn_ext.AuxRequest(entropy=True, key_weights=True)
    found = sparse_attention(**tensors, **case.selection(), enable_gqa=True, return_aux=request)[1]
    query, key, seen = tensors["query"], tensors["key"], case.visible()
    exact = reference.score_statistics(query.double(), key.double(), visible=seen)
    peer = reference.score_statistics(query, key, visible=seen)
    for name in ("entropy", "key_weights"):
        assert_accurate(name, *(getattr(each, name) for each in (found, exact, peer)))
    with selfattn_ext.backends.use("loops" if gpu.DEVICE == "cpu" else "sm80"):
        by_loops = case.run(tensors)
    torch.testing.assert_close(by_loops["out"], case.run(tensors)["out"])


def test_shapes_of_users() -> None:
    """Indices may lack heads and the batch, and query, key and value may have fewer dimensions."""
    query, key, value = torch.randn(3, 2, 4, 30, 16).unbind()
    indices = torch.randint(-1, 30, (30, 5))
    expected = sparse_attention(query, key, value, indices=indices.expand(2, 4, 30, 5))
    for given in (
        indices,
        indices.expand(2, 30, 5),
        indices.expand(1, 1, 30, 5),
        indices.expand(2, 1, 30, 5),
    ):
        assert_same(sparse_attention(query, key, value, indices=given), expected)
    assert_same(sparse_attention(query[0], key[0], value[0], indices=indices), expected[0])
    assert_same(sparse_attention(query[0], key[0], value[0], indices=indices.expand(4, 30, 5)), expected[0])
    assert_same(sparse_attention(query[0, 0], key[0, 0], value[0, 0], indices=indices), expected[0, 0])


REFUSALS = [
    ({}, "one of indices and block_indices must be given, but neither was"),
    ({"indices": torch.zeros(30, 2).long(), "block_indices": torch.zeros(30, 2).long()}, "but both were"),
    ({"indices": torch.zeros(30, 2)}, "indices must be int32 or int64, got torch.float32"),
    ({"indices": torch.zeros(29, 2).int()}, r"indices must have the shape \(2 or 1, 4, 4 or 1, 30, any\)"),
    ({"indices": torch.full((30, 2), 30)}, "indices must lie between 0 and 29.*one is 30"),
    ({"indices": torch.full((30, 2), -2)}, "indices must lie between 0 and 29.*one is -2"),
    ({"indices": torch.zeros(30, 2).int(), "block_size": 4}, "block_size goes with block_indices"),
    ({"block_indices": torch.zeros(30, 2).int()}, "block_size must be given with block_indices"),
    ({"block_indices": torch.zeros(30, 2).int(), "block_size": 0}, "block_size must"),
    ({"block_indices": torch.full((30, 2), 4), "block_size": 8}, "0 and 3, the last of the blocks of 8 keys"),
    ({"block_indices": torch.zeros(5, 2).int(), "block_size": 8}, r"30 or 4, any\)"),
    ({"indices": torch.zeros(3, 4, 30, 2).int()}, "indices must have the shape"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(given: dict[str, Any], message: str) -> None:
    query = torch.randn(2, 4, 30, 16)
    with pytest.raises((ValueError, TypeError), match=message):
        sparse_attention(query, query, query, **given)


def test_the_operator_trusts_no_lists() -> None:
    """Lists on the CPU, as nothing reads those on a GPU."""
    query = torch.randn(1, 1, 2, 8, device="cpu")
    size = [1, 1]
    for lists in ([[0, 2]], [[1, 1]], [[1, 0]]):
        given = torch.tensor([[lists * 2]], dtype=torch.int32, device="cpu")
        with pytest.raises(ValueError, match="ascending numbers from 0 to 1"):
            selfattn_ext.ops.attention_forward(query, query, query, 1.0, selection=given, selection_size=size)
