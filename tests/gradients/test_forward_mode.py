"""Forward mode by the operator attention_jvp: every pair of options, and special cases of tangents."""

from __future__ import annotations

from typing import Any

import derivatives
import pytest
import torch
from cases import Case, laid_out
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize, vmap

from selfattn_ext import (
    attention_scores,
    attention_weights,
    masked_softmax,
    reference,
    scaled_dot_product_attention,
    varlen_attention,
)
from selfattn_ext.autograd import by_formula

pytestmark = pytest.mark.usefixtures("one_thread")


def qkv(*lengths: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draws query, key and value, with one length or with that of the query and that of the keys."""
    return [torch.randn(2, 2, length, 4, dtype=dtype) for length in (lengths[0], lengths[-1], lengths[-1])]


@pytest.fixture
def no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes calls of the formula fail."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the formula was called")

    monkeypatch.setattr(by_formula, "formula", refuse)


@pytest.mark.parametrize("case", derivatives.CASES, ids=str)
def test_pair_of_options(case: Case, tangent_kernel: str) -> None:
    """Second derivatives are checked as well, as they share the judge."""
    derivatives.check(case)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_against_finite_differences(mask: str | None, no_formula: None) -> None:
    """The results of all kernels are compared with the formula above."""
    case = Case(
        batch=1, heads=2, kv_heads=1, queries=3, keys=4, head_dim=2, value_dim=2, dtype=torch.float64,
        mask=mask, alibi=1, sinks=1, softcap=1.2, lse=True,
    )  # fmt: skip
    function, points = case.as_function()
    assert torch.autograd.gradcheck(
        function, points, check_forward_ad=True, check_batched_forward_grad=True, check_batched_grad=True
    )


def test_eager_level_and_its_gradients(no_formula: None) -> None:
    """Results within forward_ad.dual_level can be differentiated by primals and tangents."""
    points = [tensor.requires_grad_() for tensor in (*qkv(3, 5), *qkv(3, 5))]

    def total(attend: Any) -> Tensor:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(points[:3], points[3:], strict=True)]
            results = [part for result in attend(*duals)[::2] for part in forward_ad.unpack_dual(result)]
            return sum(part.sin().sum() for part in results)

    def ours(*duals: Tensor) -> tuple[Tensor, ...]:
        out, lse = scaled_dot_product_attention(*duals, is_causal=True, return_lse=True)
        return out, out, lse

    def exact(*duals: Tensor) -> tuple[Tensor, ...]:
        return reference.attention(*duals, is_causal=True)

    torch.testing.assert_close(
        torch.autograd.grad(total(ours), points), torch.autograd.grad(total(exact), points)
    )


def test_gradients_within_an_eager_level(no_formula: None) -> None:
    """Gradients have tangents, which depend on those of the inputs."""
    points = [tensor.requires_grad_() for tensor in qkv(3, 5)]
    tangents = qkv(3, 5)

    def moving_gradients(attend: Any) -> list[Tensor | None]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(points, tangents, strict=True)]
            grads = torch.autograd.grad(attend(*duals).sin().sum(), duals)
            return [forward_ad.unpack_dual(grad).tangent for grad in grads]

    torch.testing.assert_close(
        moving_gradients(scaled_dot_product_attention),
        moving_gradients(lambda *duals: reference.attention(*duals).out),
    )


def test_a_level_without_tangents() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in qkv(3))
    with forward_ad.dual_level():
        out = scaled_dot_product_attention(query, key, value)
        assert forward_ad.unpack_dual(out).tangent is None
    expected = scaled_dot_product_attention(query, key, value)
    assert torch.equal(out, expected)
    grads = (torch.autograd.grad(result.sum(), query) for result in (out, expected))
    assert torch.equal(*(grad for (grad,) in grads))


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "alibi_slopes", "sinks"])
def test_one_tangent_alone(name: str, no_formula: None) -> None:
    """A missing tangent is 0; the tangents of one input are mapped, the other inputs are shared."""
    case = Case(queries=3, keys=5, dtype=torch.float64, mask="float square", alibi=1, sinks=1, lse=True)
    tensors = {key: tensor.detach() for key, tensor in case.inputs().items()}
    tensors["attn_mask"] = tensors["attn_mask"].nan_to_num(neginf=-1.0)
    tangents = torch.randn(3, *tensors[name].shape).to(tensors[name].dtype)

    def along(function: Any, tangent: Tensor) -> dict[str, Tensor]:
        return jvp(lambda point: function({**tensors, name: point}), (tensors[name],), (tangent,))[1]

    mapped = vmap(lambda tangent: along(case.run, tangent))(tangents)
    for n, tangent in enumerate(tangents):
        expected = along(case.formula, tangent)
        for key, result in mapped.items():
            torch.testing.assert_close(result[n], expected[key], check_dtype=False)


def test_linearize(no_formula: None) -> None:
    query, key, value = qkv(3, 5)
    out, along = linearize(
        lambda query, key: scaled_dot_product_attention(query, key, value, is_causal=True), query, key
    )
    tangents = (torch.randn_like(query), torch.randn_like(key))
    expected = jvp(lambda q, k: reference.attention(q, k, value, is_causal=True).out, (query, key), tangents)
    torch.testing.assert_close((out, along(*tangents)), expected)


def test_jacobian_of_packed_sequences(no_formula: None) -> None:
    """Jagged tensors are packed sequences, too."""
    query, key, value = (torch.randn(7, 2, 3, dtype=torch.float64) for _ in range(3))
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    tangents = tuple(torch.randn_like(tensor) for tensor in (query, key, value))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return varlen_attention(query, key, value, starts, starts, 4, 4, is_causal=True, return_lse=True)

    def exact(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            reference.attention(*(tensor[a:b].transpose(0, 1) for tensor in tensors), is_causal=True)
            for a, b in ((0, 3), (3, 7))
        ]
        return torch.cat([part.out.transpose(0, 1) for part in parts]), torch.cat([p.lse for p in parts], -1)

    torch.testing.assert_close(jvp(attend, (query, key, value), tangents),
                               jvp(exact, (query, key, value), tangents))  # fmt: skip
    torch.testing.assert_close(jacfwd(lambda k: attend(query, k, value)[0])(key),
                               jacfwd(lambda k: exact(query, k, value)[0])(key))  # fmt: skip


def test_a_hidden_nan_stays_hidden(tangent_kernel: str) -> None:
    """The NaN may be in primals and in tangents of keys, values and the mask."""
    query, key, value = qkv(5, 7)
    mask = torch.randn(5, 7, dtype=torch.float64)
    mask[:, 2] = mask[3] = -torch.inf
    tangents = [torch.randn_like(tensor) for tensor in (query, key, value, mask)]

    def attend(*points: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_dot_product_attention(*points, return_lse=True)

    clean = jvp(attend, (query, key, value, mask), tuple(tangents))
    for tensor in (key, value, tangents[1], tangents[2]):
        tensor[:, :, 2] = torch.nan
    tangents[3][mask == -torch.inf] = torch.nan
    dirty = jvp(attend, (query, key, value, mask), tuple(tangents))
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    (_, _), (out, lse) = dirty
    assert not out[:, :, 3].any()
    assert not lse[:, :, 3].any()


def test_rows_hidden_by_the_lowest_number(tangent_kernel: str) -> None:
    query, key, value = qkv(5, 7, dtype=torch.float32)
    mask = torch.zeros(5, 7)
    mask[:, 2] = mask[3] = torch.finfo(torch.float32).min
    tangents = tuple(torch.randn_like(tensor) for tensor in (query, key, value))

    def of(function: Any, dtype: torch.dtype) -> Any:
        points, moving = (
            tuple(tensor.to(dtype) for tensor in given) for given in ((query, key, value), tangents)
        )
        return jvp(lambda *points: function(*points, mask), points, moving)

    exact = of(lambda *given: reference.attention(*given).out, torch.float64)
    torch.testing.assert_close(of(scaled_dot_product_attention, torch.float32), exact, check_dtype=False)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend_to(lengths: tuple[int, int], tangent_kernel: str) -> None:
    points = tuple(qkv(*lengths))
    out, tangent = jvp(lambda *points: scaled_dot_product_attention(*points), points, points)
    assert out.shape == tangent.shape == (2, 2, lengths[0], 4)
    assert not tangent.any()


@pytest.mark.parametrize("layout", ["transposed", "offset", "columns"])
def test_layouts_of_tangents(layout: str, tangent_kernel: str) -> None:
    points = tuple(qkv(5, 7))
    tangents = [torch.randn_like(tensor) for tensor in points]
    moved = tuple(laid_out(tangent, layout) for tangent in tangents)
    results = [jvp(scaled_dot_product_attention, points, tuple(given)) for given in (tangents, moved)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    same = laid_out(tangents[0], "expanded")
    shared = vmap(lambda tangent: jvp(lambda q: scaled_dot_product_attention(q, *points[1:]), points[:1],
                                      (tangent,))[1])(same.expand(3, *same.shape))  # fmt: skip
    for result in shared:
        torch.testing.assert_close(result, shared[0], rtol=0, atol=0)


def test_no_matrices() -> None:
    """With (L, S) matrices this would take 160 GB."""
    points = tuple(torch.randn(1, 1, 200_000, 4) for _ in range(3))

    def attend(*points: Tensor) -> Tensor:
        return scaled_dot_product_attention(*points, window_size=(3, 0))

    _, tangent = jvp(attend, points, points)
    tail = tuple(point[:, :, -8:] for point in points)
    torch.testing.assert_close(tangent[:, :, -4:], jvp(attend, tail, tail)[1][:, :, -4:])


def test_weights_have_tangents_by_the_formula() -> None:
    query, key, value = qkv(3, 5)
    tangents = (torch.randn_like(query), torch.randn_like(key))

    def attend(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return scaled_dot_product_attention(query, key, value, return_weights=True, return_lse=True)

    def exact(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference.attention(query, key, value))

    expected = jvp(exact, (query, key), tangents)
    torch.testing.assert_close(jvp(attend, (query, key), tangents), expected)
    alone = jvp(lambda q, k: attention_weights(q, k), (query, key), tangents)
    torch.testing.assert_close(alone, (expected[0][1], expected[1][1]))
    many = vmap(lambda q, k: jvp(attend, (q, k), tangents), randomness="same")
    torch.testing.assert_close(many(query[None], key[None])[1][1][0], expected[1][1])


def test_scores_and_softmax(kernel: str) -> None:
    """The tangent of each is computed by itself: a product, and a symmetric matrix of derivatives."""
    query, key = qkv(3, 4)[:2]
    query, key = query[:1].requires_grad_(), key[:1, :1].requires_grad_()
    check = {"check_forward_ad": True, "check_batched_forward_grad": True, "check_batched_grad": True}

    def scores_of(query: Tensor, key: Tensor) -> Tensor:
        return attention_scores(query, key, 0.3, enable_gqa=True)

    assert torch.autograd.gradcheck(scores_of, (query, key), **check)
    scores = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)

    def softmax(scores: Tensor, mask: Tensor) -> Tensor:
        return masked_softmax(scores, mask, scale=0.7, is_causal=True)

    assert torch.autograd.gradcheck(softmax, (scores, mask), **check)
    for function, points in ((scores_of, (query, key)), (softmax, (scores, mask))):
        assert torch.autograd.gradgradcheck(
            function, points, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
        )
