"""First derivatives: against finite differences, against torch, and only where they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, LAYOUTS, Case, check, gradients, remembered
from comparisons import GRADIENTS, assert_results, attend, exact_and_peer, results_of
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import (
    attention_weights,
    reference,
    scaled_dot_product_attention,
)

# There are thousands of tiny steps, which several threads only slow down.
pytestmark = pytest.mark.usefixtures("one_thread")


#: Small float64 cases that together have every option.
CASES = [
    Case(queries=4, keys=5, head_dim=3, value_dim=2, dtype=torch.float64, **options)
    for options in (
        {},
        {"is_causal": True, "lse": True},
        {"is_causal": True, "query_offset": 2, "heads": 4, "weights": True},
        {"window": (1, 1), "query_offset": -1, "alibi": 1, "lse": True},
        {"mask": "float", "softcap": 0.7, "sinks": True, "weights": True, "lse": True},
        {"mask": "float rows", "alibi": 2, "heads": 4, "kv_heads": 1, "weights": True},
        {"mask": "float keys", "sinks": True, "dropout_p": 0.4, "lse": True},
        {"mask": "bool", "dropout_p": 0.4, "weights": True, "lse": True, "softcap": 1.5},
        {"mask": "float heads", "window": (2, -1), "alibi": 1, "sinks": True, "dropout_p": 0.2}
        | {"layout": "transposed"},
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_finite_differences(case: Case) -> None:
    """test_options_pairwise.py compares all kernels with the formula."""
    assert torch.autograd.gradcheck(*case.as_function(), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_of_the_gradient_of_out(dtype: torch.dtype, layout: str, kernel: str) -> None:
    check(Case(queries=33, keys=65, dtype=dtype, grad_layout=layout, heads=4, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("keys", "is_causal"), [(64, False), (192, True), (200, False)])
def test_keys_beyond_the_end_stay_out(dtype: torch.dtype, keys: int, is_causal: bool, kernel: str) -> None:
    """If keys of 0 beyond the end had scores of 0, they would show, as exp(-lse) overflows at lse < -88.7."""
    queries = keys if is_causal else 70
    check(Case(1, 2, 1, queries, keys, 64, 64, dtype, opposed=30.0, is_causal=is_causal, lse=True))


@remembered
def of_torch(tensors: list[Tensor], incoming: Tensor, is_causal: bool) -> dict[str, Tensor]:
    return results_of(F.scaled_dot_product_attention, tensors, incoming, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_no_less_accurate_than_torch(dtype: torch.dtype, is_causal: bool, kv_heads: int, isa: str) -> None:
    *tensors, incoming = (torch.randn(1, heads, 97, 32).to(dtype) for heads in (8, kv_heads, kv_heads, 8))
    found = results_of(attend, tensors, incoming, is_causal=is_causal, return_lse=False)
    exact = of_torch([tensor.double() for tensor in tensors], incoming, is_causal)
    assert_results(found, (exact, of_torch(tensors, incoming, is_causal)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["plain", "lse", "mask", "torch.func", "weights"])
def test_rounding_of_the_output_stays_out_of_gradients(dtype: torch.dtype, way: str, kernel: str) -> None:
    """Values far from 0 have coarsely rounded outputs, which must not enter a difference of large terms."""
    query, key = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 70, 16)
    value = 30 + torch.randn(1, 2, 70, 16)
    points = [tensor.to(dtype) for tensor in (query, key, value)]
    incoming = torch.randn(1, 2, 20, 16).to(dtype)
    options = {"mask": {"attn_mask": torch.zeros(20, 70)}, "plain": {"return_lse": False}}.get(way, {})
    judges = exact_and_peer(points, {}, incoming)

    def weights_of_formula(query: Tensor, key: Tensor) -> Tensor:
        return reference.attention(query, key, key).weights

    if way == "torch.func":
        _, pull = torch.func.vjp(scaled_dot_product_attention, *points)
        found = dict(zip(GRADIENTS, pull(incoming), strict=True))
    elif way == "weights":
        incoming = (30 + torch.randn(1, 2, 20, 70)).to(dtype)
        found = results_of(attention_weights, points[:2], incoming)
        judges = tuple(
            results_of(weights_of_formula, [point.to(of) for point in points[:2]], incoming)
            for of in (torch.float64, dtype)
        )
    else:
        found = results_of(attend, points, incoming, **options)
    assert_results({name: found[name] for name in GRADIENTS if name in found}, judges)


def test_gradient_only_of_what_requires_one() -> None:
    case = Case(mask="float", alibi=1, sinks=True, dtype=torch.float64)
    names = list(case.inputs())
    everything = gradients(case.run(full := case.inputs()), {"out": torch.ones(2, 2, 17, 16)}, full)
    for name in names:
        tensors = {other: tensor.detach().requires_grad_(other == name) for other, tensor in full.items()}
        case.run(tensors)["out"].sum().backward()
        assert [other for other, tensor in tensors.items() if tensor.grad is not None] == [name]
        assert torch.equal(tensors[name].grad, everything[f"grad of {name}"])


@pytest.mark.parametrize("name", ["out", "weights", "lse"])
def test_gradient_through_one_result_alone(name: str) -> None:
    case = Case(weights=True, lse=True, dtype=torch.float64, sinks=True, mask="bool", softcap=2.0)
    tensors = case.inputs()
    results = [run(tensors)[name] for run in (case.run, case.formula)]
    cotangent = {name: torch.randn_like(results[0])}
    torch.testing.assert_close(*(gradients({name: result}, cotangent, tensors) for result in results))


def test_cotangents_of_any_layout() -> None:
    case = Case(weights=True, lse=True, dtype=torch.float64)
    tensors = case.inputs()
    results = case.run(tensors)
    exact = case.formula(tensors)
    for layout in ("expanded", "columns", "offset"):
        cotangents = {}
        for name, result in results.items():
            dense = torch.randn(result.shape, dtype=torch.float64)
            cotangents[name] = {
                "expanded": torch.ones((), dtype=torch.float64).expand(result.shape),
                "columns": dense.mT.contiguous().mT,
                "offset": torch.stack([dense, dense], dim=-1)[..., 1],
            }[layout]
        grads = [
            torch.autograd.grad(
                [*of.values()], [*tensors.values()], [*cotangents.values()], retain_graph=True
            )
            for of in (results, exact)
        ]
        torch.testing.assert_close(*grads)


def test_backward_twice_and_checkpoint() -> None:
    case = Case(dtype=torch.float64, dropout_p=0.3)
    tensors = case.inputs()
    out = case.run(tensors)["out"]
    first = torch.autograd.grad(out.sum(), tensors["query"], retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), tensors["query"])[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), tensors["query"])

    def attend(query: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, tensors["key"], tensors["value"], dropout_p=0.3)

    for reentrant in (False, True):
        torch.manual_seed(case.seed)
        # A reentrant checkpoint refuses torch.autograd.grad, and only knows tensors that are its arguments.
        point = tensors["query"].detach().requires_grad_()
        torch.utils.checkpoint.checkpoint(attend, point, use_reentrant=reentrant).sum().backward()
        assert torch.equal(point.grad, first)


@pytest.mark.parametrize("changed", ["query", "attn_mask"])
def test_a_changed_input_is_noticed(changed: str) -> None:
    tensors = Case(dtype=torch.float64).inputs()
    mask = torch.zeros(tensors["query"].shape[2], tensors["key"].shape[2])
    tensors |= {"query": tensors["query"] * 1.0, "attn_mask": mask}
    out = scaled_dot_product_attention(**tensors)
    tensors[changed].add_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_mask_gradient_has_the_shape_and_dtype_of_the_mask(kernel: str) -> None:
    query, key, value = (torch.randn(2, 2, length, 8) for length in (20, 70, 70))
    for shape in [(2, 2, 20, 70), (1, 2, 1, 70), (2, 1, 20, 1), (20, 70), (1, 1, 1, 1), (70,), (2, 1, 1, 1)]:
        for dtype in DTYPES:
            mask = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
            (grad,) = torch.autograd.grad(
                scaled_dot_product_attention(query, key, value, mask).sin().sum(), mask
            )
            exact_mask = mask.detach().double().requires_grad_()
            exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), exact_mask)
            (expected,) = torch.autograd.grad(exact.sin().sum(), exact_mask)
            assert grad.dtype == dtype
            assert_accurate("grad_mask", grad, expected, expected.to(dtype), 4.0, torch.float32)


def test_broadcast_mask_that_was_expanded_by_hand() -> None:
    tensors = Case(dtype=torch.float64).inputs()
    row = torch.randn(1, 33, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(scaled_dot_product_attention(**tensors, attn_mask=mask).sin().sum(), row)[0]
        for mask in (row, row.expand(2, 2, 17, 33))
    ]
    torch.testing.assert_close(*grads)


def test_attention_weights_against_finite_differences(kernel: str) -> None:
    query = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 2, 7, 5, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, s: attention_weights(q, k, enable_gqa=True, sinks=s, softcap=1.0, return_lse=True),
        (query, key, sinks),
        fast_mode=True,
    )
