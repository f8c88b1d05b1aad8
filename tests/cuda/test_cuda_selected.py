"""Selected keys on a GPU: kernels that go through the lists, and no mask.

Pairs of options, groups of heads and sizes are judged on every device by tests/sparse.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, check, cotangents_of, gradients
from comparisons import assert_same
from sparse_cases import BASE, SparseCase, sparse
from torch import Tensor

from selfattn_ext import backends, batch_invariant, ops, sparse_attention

gpu.need()

SMALL = replace(BASE, batch=1, queries=19, keys=67, head_dim=20, device="cuda")
kinds = pytest.mark.parametrize("kind", ["keys", "blocks of 16", "blocks of 64", "blocks by blocks"])


@pytest.fixture(autouse=True)
def _no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it an error if a selection becomes a mask."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a selection became a mask")

    monkeypatch.setattr(importlib.import_module("selfattn_ext.sparse.sparse_attention"), "selected", refuse)


class FixedMask(SparseCase):
    """A case whose mask requires no gradient, for which calls take the mask of the selection."""

    def inputs(self) -> dict[str, Tensor]:
        tensors = super().inputs()
        return {name: it.detach() if name == "attn_mask" else it for name, it in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    check(sparse(replace(SMALL, batch=2, dtype=dtype, is_causal=True, query_offset=30), kind))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 67])
@kinds
def test_lengths(kind: str, length: int) -> None:
    check(
        sparse(replace(SMALL, queries=length, keys=length, is_causal=True), kind, 70 if length == 65 else 3)
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (19, 4), "query_offset": 20},
    "bool mask": {"mask": "bool", "sinks": 2},
    "float mask": {"mask": "float heads", "alibi": 2},
    "softcap": {"softcap": 2.0, "sinks": 1},
    "dropout": {"dropout_p": 0.4, "alibi": 1},
    "all": {"window": (30, 9), "mask": "float", "softcap": 3.0, "sinks": 2, "alibi": 1, "dropout_p": 0.2},
    "strides": {"layout": "columns", "grad_layout": "transposed"},
    "wide": {"head_dim": 131, "value_dim": 150},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@kinds
def test_options(kind: str, options: dict[str, Any]) -> None:
    case = sparse(replace(SMALL, batch=2, keys=41, **options), kind)
    check(FixedMask(**vars(case)))


@pytest.mark.parametrize("group", [3, 65])
def test_more_heads_than_a_tile_has_rows(group: int) -> None:
    case = replace(SMALL, heads=2 * group, queries=5, keys=20, value_dim=9)
    for kind in ("keys of kv heads", "keys of all heads", "blocks by blocks"):
        check(sparse(case, kind))


@kinds
def test_keys_that_are_not_selected_do_not_matter(kind: str) -> None:
    """Nor do selected keys that the causal rule hides: keys that no query sees hold NaN."""
    case = sparse(replace(SMALL, queries=67, is_causal=True), kind, 2)
    tensors = case.inputs()
    seen = (case.visible() & torch.ones(67, 67, device="cuda").tril().bool()).any(-2).any(1)
    hidden = (~seen)[:, None].expand(1, 2, 67) | (torch.arange(67, device="cuda") >= 50)
    dirty = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name in ("key", "value"):
        dirty[name][hidden] = torch.nan
    dirty = {name: tensor.requires_grad_() for name, tensor in dirty.items()}
    results, expected = case.run(dirty), case.run(tensors)
    incoming = {name: one.clone() for name, one in cotangents_of(expected, 0).items()}
    for name, one in expected.items():
        # Later queries see keys with NaN.
        assert_same(results[name][:, :, :50], one[:, :, :50], name)
        incoming[name][:, :, 50:] = 0.0
    assert hidden.any()
    found, wanted = gradients(results, incoming, dirty), gradients(expected, incoming, tensors)
    assert_same(found["grad of query"][:, :, :50], wanted["grad of query"][:, :, :50])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_whose_sum_overflows(dtype: torch.dtype) -> None:
    """Only rows whose sums overflow are computed again."""
    case = sparse(replace(SMALL, keys=64, dtype=dtype), "blocks by blocks", 2)
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    largest = torch.finfo(dtype).max * 0.9
    small = case.run(tensors)["out"]
    tensors["value"][..., :2] = largest
    tensors["query"][:, 0] = 0.0
    found, seen = case.run(tensors)["out"], case.visible().any(-1).expand(1, 4, 19)
    assert bool(found.isfinite().all())
    assert bool((found[seen][:, :2] >= 0.85 * torch.finfo(dtype).max).all())
    torch.testing.assert_close(found[:, 2:, :, 2:], small[:, 2:, :, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@kinds
def test_same_bits(kind: str, dtype: torch.dtype) -> None:
    """Two runs give the same bits, and so do indices in another order, and in int32."""
    case = sparse(replace(BASE, dtype=dtype, dropout_p=0.3, alibi=1, sinks=1, device="cuda"), kind, 9)
    tensors: dict[str, Any] = case.inputs()
    once = case.run_with_gradients(tensors)
    assert_same(case.run_with_gradients(tensors), once)
    numbers, given = case.indices().flip(-1).int(), case.selection()
    given["indices" if "indices" in given else "block_indices"] = numbers
    torch.manual_seed(case.seed)
    results = sparse_attention(**tensors, **given, **case.numbers(), enable_gqa=True, return_lse=True)
    assert_same(case.named(results), {name: once[name] for name in ("out", "lse")})


@pytest.mark.parametrize("kind", ["keys", "blocks by blocks"])
def test_a_chunk_of_the_queries_has_the_bits_of_the_whole(kind: str) -> None:
    """Windows leave out other keys of a list for other queries, and yet sums have the same order."""
    case = sparse(replace(SMALL, queries=70, keys=300, window=(60, 9), query_offset=200), kind, 40)
    tensors, given = case.inputs(), case.selection()
    indices = next(it for it in given.values() if isinstance(it, Tensor))
    rows = slice(2, 3) if indices.size(2) < 70 else slice(48, 59)
    with batch_invariant():
        whole = case.run(tensors)
        tensors["query"] = tensors["query"][:, :, 48:59]
        given[next(iter(given))] = indices[:, :, rows]
        numbers = case.numbers() | {"query_offset": 248}
        part = case.named(
            sparse_attention(**tensors, **given, **numbers, enable_gqa=True, return_lse=True)  # type: ignore[arg-type]
        )
    assert_same(part, {name: one[:, :, 48:59] for name, one in whole.items()})


@kinds
def test_dropout_is_that_of_the_cpu(kind: str) -> None:
    """The same seed drops the same pairs: values of 1 show the sums of the weights that are left."""
    case = sparse(replace(SMALL, device="cpu"), kind)
    tensors, queries_and_keys = case.inputs(), case.selection()
    indices = next(it for it in queries_and_keys.values() if isinstance(it, Tensor))
    keys = queries_and_keys.get("block_size", 1)
    lists = ops.sorted_selection(indices, -(-case.keys // keys))
    size = [keys if kind == "blocks by blocks" else 1, keys]
    given: dict[str, Any] = {"dropout_p": 0.5, "selection_size": size}
    seed = torch.tensor([77])
    query, key, value = tensors["query"].detach(), tensors["key"].detach(), torch.ones_like(tensors["value"])

    def run(device: str) -> Tensor:
        moved = {"selection": lists.to(device), "dropout_seed": seed.to(device)}
        of_device = query.to(device), key.to(device), value.to(device)
        return ops.attention_forward(*of_device, 0.1, **given, **moved)[0]

    torch.testing.assert_close(run("cuda").cpu(), run("cpu"))


def test_a_graph_replays_with_other_indices() -> None:
    """Nothing reads indices or lists on the host."""
    case = sparse(replace(SMALL, is_causal=True, query_offset=48), "blocks of 16", 3)
    given = case.selection()
    tensors: dict[str, Any] = case.inputs()

    def step() -> list[Tensor]:
        out = sparse_attention(**tensors, **given, is_causal=True, query_offset=48, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))]

    graph, found = gpu.captured(step)
    for shift in (0, 1):
        given["block_indices"].copy_(given["block_indices"].roll(shift, 2))
        graph.replay()
        assert_same(found, step())


def test_compiled() -> None:
    case = sparse(SMALL, "blocks of 16")
    tensors = case.inputs()

    def run(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> Tensor:
        result: Tensor = sparse_attention(
            query, key, value, block_indices=blocks, block_size=16, enable_gqa=True
        )
        return result

    inputs = (*tensors.values(), case.indices())
    expected = run(*inputs)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert_same(compiled, expected)
    wanted = torch.autograd.grad(expected.sum(), inputs[:3])
    assert_same(torch.autograd.grad(compiled.sum(), inputs[:3]), wanted)


def test_other_kernels_take_the_mask() -> None:
    case = sparse(SMALL, "blocks of 16")
    tensors = case.inputs()
    with backends.use("simt"):
        by_lists = case.run_with_gradients(tensors)
    assert_same(by_lists, case.run_with_gradients(tensors))
    if torch.cuda.get_device_capability() >= (8, 0):
        with backends.use("sm80"), pytest.raises(AssertionError, match="became a mask"):
            case.run(tensors)


@pytest.mark.parametrize(
    "numbers", [[90, 2, 2], [3, 1, 0], [2, 2, 2], [-1, 0, 1], [-(2**31), 5, 2**31 - 1], [4, 2**31 - 1, -7]]
)
def test_wild_lists_lead_nowhere(numbers: list[int]) -> None:
    """The operators cannot check lists on a GPU; kernels stay inside of the tensors, whatever lists hold."""
    case = replace(SMALL, queries=70, head_dim=16, value_dim=16)
    query, key, value = (tensor.detach() for tensor in case.inputs().values())
    lists = torch.tensor(numbers, dtype=torch.int32, device="cuda").repeat(1, 2, 70, 1)
    for size in ([1, 1], [1, 16]):
        given: dict[str, Any] = {"selection": lists, "selection_size": size}
        out, row_max, row_sum, _ = ops.attention_forward(query, key, value, 0.2, **given)
        grads = ops.attention_backward(out, query, key, value, out, row_max, row_sum, 0.2, **given)
        torch.cuda.synchronize()
        assert all(
            tensor.shape == grad.shape for tensor, grad in zip((query, key, value), grads, strict=False)
        )


def test_refusals() -> None:
    query = torch.randn(1, 2, 9, 16, device="cuda")
    with pytest.raises(ValueError, match="indices must lie between 0 and 8"):
        sparse_attention(query, query, query, indices=torch.full((9, 2), 9, device="cuda"))
    given: dict[str, Any] = {
        "selection": torch.zeros(1, 1, 9, 1, dtype=torch.int32, device="cuda"),
        "selection_size": [1, 1],
    }
    older = torch.cuda.get_device_capability() < (8, 0)
    reason = "needs compute capability 8.0" if older else "does not apply selection"
    with pytest.raises(ValueError, match=f'"sm80".*{reason}'):
        ops.attention_forward(query, query, query, 1.0, kernel_name="sm80", **given)
    rows = torch.ones(1, 2, 9, device="cuda")
    with pytest.raises(ValueError, match="with selection there are no weights"):
        ops.attention_weights(query, query, rows, rows, 1.0, **given)
