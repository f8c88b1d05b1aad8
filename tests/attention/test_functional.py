"""Arguments and results of public functions: shapes, broadcasting, layouts, autocast, conversions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES
from comparisons import assert_results, results_of
from tolerances import assert_accurate
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import selfattn_ext
from selfattn_ext import (
    attention_scores,
    attention_weights,
    masked_softmax,
    reference,
    scaled_dot_product_attention,
)

# There are thousands of tiny steps, which several threads only slow down.
pytestmark = pytest.mark.usefixtures("one_thread")


def qkv(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(8, 4), (3, 8, 4), (2, 3, 8, 4), (2, 2, 3, 8, 4), (1, 2, 2, 3, 8, 4)], ids=str
)
def test_any_number_of_leading_dimensions(shape: tuple[int, ...], is_causal: bool) -> None:
    query, key, value = qkv(shape, shape, shape)
    out = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=is_causal))
    assert out.is_contiguous()


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4, 5), (1, 3, 6, 5), (2, 1, 6, 5)),
        ((1, 1, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5)),
        ((4, 5), (2, 3, 6, 5), (3, 6, 5)),
        ((3, 4, 5), (6, 5), (6, 5)),
        ((7, 2, 3, 4, 5), (2, 3, 6, 5), (1, 1, 3, 6, 5)),
        ((7, 1, 3, 4, 5), (1, 2, 1, 6, 5), (7, 2, 1, 6, 5)),
        ((2, 3, 4, 5), (2, 1, 6, 5), (2, 1, 6, 5)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = [tensor.requires_grad_() for tensor in qkv(*shapes)]
    peers = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    lead = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    out = scaled_dot_product_attention(*tensors)
    expected = F.scaled_dot_product_attention(*(peer.expand(*lead, *peer.shape[-2:]) for peer in peers))
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, cotangent)
    for grad, other in zip(grads, torch.autograd.grad(expected, peers, cotangent), strict=True):
        torch.testing.assert_close(grad, other)


def test_grouped_query_heads() -> None:
    query, key, value = qkv((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    out = scaled_dot_product_attention(query[0], key[0], value[0], enable_gqa=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0])


def test_three_dimensional_heads_and_torch_batches_agree() -> None:
    query, key, value = qkv((5, 6, 4), (5, 7, 4), (5, 7, 4))
    mask = torch.rand(5, 6, 7) < 0.8
    mask[..., 0] = True
    out = scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, mask))


@pytest.mark.parametrize(
    "shape", [(), (1,), (6,), (5, 1), (1, 6), (5, 6), (3, 1, 6), (2, 1, 5, 6), (1, 3, 1, 6), (2, 3, 5, 6)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str) -> None:
    query, key, value = qkv((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape).double()
    out = scaled_dot_product_attention(query, key, value, mask)
    expected = reference.attention(query, key, value, mask).out
    torch.testing.assert_close(out, expected)
    wide = scaled_dot_product_attention(*(t.unflatten(0, (1, 2)) for t in (query, key, value)), mask)
    assert torch.equal(wide[0], out)


def test_mask_of_many_leading_dimensions() -> None:
    query, key, value = qkv((3, 2, 2, 5, 4), (3, 2, 2, 6, 4), (3, 2, 2, 6, 4))
    for shape in [(3, 1, 1, 5, 6), (1, 2, 1, 1, 6), (2, 1, 5, 6), (3, 2, 2, 5, 6), (1, 3, 1, 2, 5, 6)]:
        mask = torch.randn(shape).double().requires_grad_()
        out = scaled_dot_product_attention(query, key, value, mask)
        full = mask.reshape(shape[-5:]).expand(3, 2, 2, 5, 6)
        expected = F.scaled_dot_product_attention(query, key, value, full)
        torch.testing.assert_close(out, expected)
        (grad,) = torch.autograd.grad(out.sin().sum(), mask)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.sin().sum(), mask)[0])


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(make, lengths: tuple[int, int]) -> None:
    query, key, value = qkv((1, 2, lengths[0], 4), (1, 2, lengths[1], 4), (1, 2, lengths[1], 4))
    bias = make(*lengths)
    offset = 0 if make is causal_upper_left else lengths[1] - lengths[0]
    seen = torch.ones(lengths, dtype=torch.bool).tril(offset)
    out = scaled_dot_product_attention(query, key, value, bias)
    torch.testing.assert_close(out, reference.attention(query, key, value, seen).out)
    # These rules use positions, which the mask must not move.
    for options in ({"window_size": (2, 3)}, {"is_causal": True}, {"alibi_slopes": torch.rand(2)}):
        if offset < 0 and "is_causal" not in options:
            with pytest.raises(ValueError, match="CausalBias"):
                scaled_dot_product_attention(query, key, value, bias, **options)
            continue
        out = scaled_dot_product_attention(query, key, value, bias, **options)
        torch.testing.assert_close(out, reference.attention(query, key, value, seen, **options).out)


def test_query_offset_is_position_of_first_query() -> None:
    query, key, value = qkv((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    options = {"is_causal": True, "window_size": (3, -1), "alibi_slopes": torch.tensor([0.5, 0.1]).double()}
    whole = scaled_dot_product_attention(query, key, value, **options)
    parts = [
        scaled_dot_product_attention(query[:, :, i : i + 3], key, value, query_offset=i, **options)
        for i in (0, 3, 6)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)


def test_scale() -> None:
    query, key, value = qkv((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    for scale in (0.3, np.float64(0.3), torch.tensor(0.3, dtype=torch.float64)):
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, scale=scale), expected)
    for scale in (0, -1, 2):
        expected = F.scaled_dot_product_attention(query, key, value, scale=scale)
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, scale=scale), expected)


def test_positional_arguments_are_those_of_torch() -> None:
    query, key, value = qkv((2, 4, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
    arguments = (None, 0.0, True, 0.4, True)
    expected = F.scaled_dot_product_attention(query, key, value, *arguments[:3], scale=0.4, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, *arguments), expected)


@pytest.mark.parametrize(("weights", "lse"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_what_is_returned(weights: bool, lse: bool, lead: tuple[int, ...]) -> None:
    query, key, value = qkv((*lead, 4, 8), (*lead, 5, 8), (*lead, 5, 2), dtype=torch.bfloat16)
    results = scaled_dot_product_attention(query, key, value, return_weights=weights, return_lse=lse)
    if not weights and not lse:
        assert isinstance(results, torch.Tensor)
        results = (results,)
    assert len(results) == 1 + weights + lse
    assert results[0].shape == (*lead, 4, 2)
    assert results[0].dtype == torch.bfloat16
    if weights:
        assert results[1].shape == (*lead, 4, 5)
        assert results[1].dtype == torch.bfloat16
    if lse:
        assert results[-1].shape == (*lead, 4)
        assert results[-1].dtype == torch.float32
        exact = torch.logsumexp(query.double() @ key.double().mT / 8**0.5, -1)
        assert_accurate("lse", results[-1], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_has_the_layout_of_the_query(dtype: torch.dtype) -> None:
    tokens = torch.randn(2, 7, 3, 8, dtype=dtype)
    query, key, value = (tokens.transpose(1, 2).requires_grad_() for _ in range(3))
    out = scaled_dot_product_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads)
    dense = tokens.transpose(1, 2).contiguous()
    assert scaled_dot_product_attention(dense, key, value).is_contiguous()
    expanded = dense[:, :1].expand(-1, 3, -1, -1)
    assert scaled_dot_product_attention(expanded, dense, dense).is_contiguous()
    # Multi-head modules have this layout: (L, B, H * E), viewed as heads.
    merged = torch.randn(7, 2, 24, dtype=dtype).view(7, 6, 8).transpose(0, 1)
    assert scaled_dot_product_attention(merged, merged, merged).transpose(0, 1).is_contiguous()


def test_parameters_and_frozen_inputs() -> None:
    query = torch.nn.Parameter(torch.randn(2, 2, 5, 4))
    key, value = qkv((2, 2, 6, 4), (2, 2, 6, 4), dtype=torch.float32)
    out = scaled_dot_product_attention(query, key, value)
    out.sum().backward()
    assert type(out) is torch.Tensor
    assert query.grad is not None
    assert key.grad is None
    with torch.no_grad():
        assert not scaled_dot_product_attention(query, key, value).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value), out.detach())
    assert not scaled_dot_product_attention(query.detach(), key, value).requires_grad


def test_attention_weights_need_no_value() -> None:
    query, key, value = qkv((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))
    options = {
        "attn_mask": torch.rand(5, 6) < 0.8,
        "enable_gqa": True,
        "softcap": 2.0,
        "sinks": torch.randn(4),
        "window_size": (3, 2),
        "scale": 0.5,
    }
    _, weights, lse = scaled_dot_product_attention(
        query, key, value, **options, return_weights=True, return_lse=True
    )
    assert torch.equal(attention_weights(query, key, **options), weights)
    alone, alone_lse = attention_weights(query, key, **options, return_lse=True)
    assert torch.equal(alone, weights)
    assert torch.equal(alone_lse, lse)
    assert attention_weights(query[0, 0], key[0, 0]).shape == (5, 6)


@pytest.mark.parametrize(
    "shapes",
    [((5, 8), (6, 8)), ((3, 5, 8), (3, 6, 8)), ((2, 4, 5, 8), (2, 2, 6, 8)), ((7, 2, 4, 5, 8), (2, 1, 6, 8))],
)
def test_attention_scores(kernel: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    for dtype in DTYPES:
        tensors = qkv(*shapes, dtype=dtype)
        incoming = torch.randn(*shapes[0][:-1], 6)
        found = results_of(attention_scores, tensors, incoming, enable_gqa=True)
        exact = results_of(reference.attention_scores, [tensor.double() for tensor in tensors], incoming)
        assert found["out"].is_contiguous()
        assert_results(found, (exact, {name: result.to(dtype) for name, result in exact.items()}))


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 5, 67), (2, 1, 3, 33, 129)], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "float", "row", "column"])
def test_masked_softmax(kernel: str, shape: tuple[int, ...], mask: str | None) -> None:
    for dtype in DTYPES:
        scores = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        bias = {
            None: None,
            "bool": torch.rand(shape[-2:]) < 0.7,
            "float": torch.randn(shape[-2:]).to(dtype),
            "row": torch.randn(shape[-1]),
            "column": torch.randn(*shape[:-2], shape[-2], 1),
        }[mask]
        tensors = [scores] if mask in (None, "bool") else [scores, bias.requires_grad_()]
        exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
        options = {"scale": 0.7, "is_causal": mask is None, "query_offset": 2}
        weights = masked_softmax(scores, bias, **options)
        exact_bias = exact_tensors[1] if len(tensors) == 2 else bias
        exact = reference.masked_softmax(exact_tensors[0], exact_bias, **options)
        assert weights.is_contiguous()
        assert_accurate("weights", weights.detach(), exact.detach(), exact.detach().to(dtype))
        cotangent = torch.randn_like(weights)
        grads = torch.autograd.grad(weights, tensors, cotangent)
        exact_grads = torch.autograd.grad(exact, exact_tensors, cotangent.double())
        for name, grad, exact_grad in zip(("grad_scores", "grad_mask"), grads, exact_grads, strict=False):
            terms = 1.0 if name == "grad_scores" else float(torch.tensor(shape[:-1]).prod()) ** 0.5
            assert_accurate(name, grad, exact_grad, exact_grad.to(dtype), terms, dtype)


def test_public_names() -> None:
    for name in selfattn_ext.__all__:
        assert hasattr(selfattn_ext, name)
    assert selfattn_ext.__version__
