"""torch.func: grad, vmap, their compositions, jacobians, forward mode."""

from __future__ import annotations

from typing import Any

import gpu
import pytest
import torch
from cases import Case
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from selfattn_ext import attention_scores, masked_softmax, reference, scaled_dot_product_attention

# There are thousands of tiny steps, which several threads only slow down.
pytestmark = pytest.mark.usefixtures("one_thread")


CASE = Case(
    queries=3, keys=4, head_dim=3, value_dim=2, heads=4, dtype=torch.float64, mask="float", alibi=1,
    sinks=True, softcap=1.2, weights=True, lse=True,
)  # fmt: skip
NAMES = list(CASE.inputs())
EVERY = tuple(range(len(NAMES)))


def points() -> list[torch.Tensor]:
    tensors = CASE.inputs()
    tensors["attn_mask"] = tensors["attn_mask"].detach().nan_to_num(neginf=-1.0)
    return [tensor.detach().double() for tensor in tensors.values()]


def total(*tensors: torch.Tensor, function: Any = CASE.run) -> torch.Tensor:
    return sum(result.sin().sum() for result in function(dict(zip(NAMES, tensors, strict=True))).values())


def exact_total(*tensors: torch.Tensor) -> torch.Tensor:
    return total(*tensors, function=CASE.formula)


def assert_all_close(results: Any, expected: Any) -> None:
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact)


def batched(size: int) -> list[torch.Tensor]:
    return [torch.stack([tensor + 0.3 * n for n in range(size)]) for tensor in points()]


def test_grad_is_that_of_autograd() -> None:
    tensors = [tensor.requires_grad_() for tensor in points()]
    expected = torch.autograd.grad(total(*tensors), tensors)
    results, value = grad_and_value(total, argnums=EVERY)(*points())
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    torch.testing.assert_close(value, total(*tensors).detach())


@pytest.mark.parametrize(
    "in_dims",
    [(0,) * 6, (0, None, 0, None, None, None), (None, None, None, 0, 0, 0), (None, 0, None, None, 0, None)],
    ids=str,
)
def test_vmap_and_per_sample_gradients(in_dims: tuple[int | None, ...]) -> None:
    single, many = points(), batched(3)
    arguments = [one if dim is None else all for one, all, dim in zip(single, many, in_dims, strict=True)]

    def slice_of(n: int) -> list[torch.Tensor]:
        return [value if dim is None else value[n] for value, dim in zip(arguments, in_dims, strict=True)]

    torch.testing.assert_close(
        vmap(total, in_dims)(*arguments), torch.stack([total(*slice_of(n)) for n in range(3)])
    )
    results = vmap(grad(total, argnums=EVERY), in_dims)(*arguments)
    expected = [grad(total, argnums=EVERY)(*slice_of(n)) for n in range(3)]
    assert_all_close(results, [torch.stack(parts) for parts in zip(*expected, strict=True)])


def test_mapped_dimension_anywhere() -> None:
    many = batched(3)
    query, key, value = (tensor.movedim(0, dim) for tensor, dim in zip(many[:3], (4, 2, -1), strict=True))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    results = vmap(attend, in_dims=(4, 2, -1), out_dims=1)(query, key, value)
    expected = [attend(*(tensor[n] for tensor in many[:3])) for n in range(3)]
    assert torch.equal(results, torch.stack(expected, dim=1))


def test_nested_vmap() -> None:
    query = torch.randn(2, 3, 4, 5, 6)
    key = torch.randn(3, 4, 7, 6)
    results = vmap(vmap(scaled_dot_product_attention), in_dims=(0, None, None))(query, key, key)
    for n in range(2):
        for m in range(3):
            torch.testing.assert_close(
                results[n, m], scaled_dot_product_attention(query[n, m], key[m], key[m])
            )


def test_grad_of_vmap() -> None:
    many = batched(2)
    results = grad(lambda *tensors: vmap(total)(*tensors).sum(), argnums=EVERY)(*many)
    expected = grad(lambda *tensors: vmap(exact_total)(*tensors).sum(), argnums=EVERY)(*many)
    assert_all_close(results, expected)


def test_second_derivatives() -> None:
    single = points()

    def along(function: Any, n: int) -> Any:
        return lambda tensor: function(*single[:n], tensor, *single[n + 1 :])

    for n, tensor in enumerate(single):
        if tensor.numel() > 24:
            tensor = single[n] = tensor[..., :1, :].expand_as(tensor).clone()
        exact = hessian(along(exact_total, n))(tensor)
        torch.testing.assert_close(jacrev(jacrev(along(total, n)))(tensor), exact)
        torch.testing.assert_close(hessian(along(total, n))(tensor), exact)
    torch.testing.assert_close(jacfwd(jacfwd(along(total, 5)))(single[5]), exact)


def test_jacobians() -> None:
    query, key, value = points()[:3]

    def attend(query: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, is_causal=True)

    expected = torch.autograd.functional.jacobian(attend, query)
    torch.testing.assert_close(jacrev(attend)(query), expected)
    torch.testing.assert_close(jacfwd(attend)(query), expected)
    out, pull = vjp(attend, query)
    torch.testing.assert_close(pull(torch.ones_like(out))[0], expected.sum((0, 1, 2, 3)))


def test_forward_mode() -> None:
    tensors, tangents = points(), [torch.randn_like(tensor) for tensor in points()]
    value, tangent = jvp(total, tuple(tensors), tuple(tangents))
    grads = grad(total, argnums=EVERY)(*tensors)
    torch.testing.assert_close(value, total(*tensors))
    torch.testing.assert_close(tangent, sum((g * t).sum() for g, t in zip(grads, tangents, strict=True)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tangents[0])
        result = torch.autograd.forward_ad.unpack_dual(total(dual, *tensors[1:]))
    torch.testing.assert_close(result.tangent, (grads[0] * tangents[0]).sum())


@pytest.mark.parametrize(
    "call",
    [
        lambda x, other: scaled_dot_product_attention(x, other, other),
        lambda x, other: scaled_dot_product_attention(x, other, other, return_lse=True)[0],
        lambda x, other: attention_scores(x, other),
        lambda x, other: masked_softmax(x),
    ],
    ids=["plain attention", "attention", "scores", "softmax"],
)
def test_forward_mode_of_a_graph_recorded_before(call: Any) -> None:
    """A gradient is linear in its cotangent, so its tangent is the gradient of the cotangent's tangent."""
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = call(x, torch.randn(1, 2, 5, 4, dtype=torch.float64))
    cotangent, tangent = torch.randn_like(out), torch.randn_like(out)
    expected = torch.autograd.grad(out, x, tangent, retain_graph=True)[0]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(cotangent, tangent)
        result = torch.autograd.forward_ad.unpack_dual(torch.autograd.grad(out, x, dual)[0])
    torch.testing.assert_close(result.tangent, expected)


def test_batched_gradients_of_autograd() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in points()[:3])
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    cotangents = torch.randn(3, *out.shape, dtype=torch.float64)
    (results,) = torch.autograd.grad(out, query, cotangents, is_grads_batched=True, retain_graph=True)
    for result, cotangent in zip(results, cotangents, strict=True):
        torch.testing.assert_close(result, torch.autograd.grad(out, query, cotangent, retain_graph=True)[0])


def test_randomness_of_dropout() -> None:
    key = value = torch.randn(2, 4, 16, 8)
    query = torch.randn(1, 2, 4, 16, 8).expand(3, -1, -1, -1, -1)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    torch.manual_seed(3)
    same = vmap(attend, randomness="same")(query)
    torch.manual_seed(3)
    assert torch.equal(same[0], attend(query[0]))
    assert torch.equal(same[0], same[1])
    different = vmap(attend, randomness="different")(query)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(attend)(query)
    torch.manual_seed(3)
    results = vmap(grad(lambda query: attend(query).sum()), randomness="same")(query)
    torch.manual_seed(3)
    assert torch.equal(results[2], grad(lambda query: attend(query).sum())(query[2]))


def test_masked_softmax_and_scores() -> None:
    def softmax_total(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked_softmax(scores, mask, scale=0.5, is_causal=True).sin().sum()

    def exact_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(4, 5, dtype=torch.bool).triu(1)
        return (scores * 0.5 + mask).masked_fill(hidden, -torch.inf).softmax(-1).sin().sum()

    def scores_total(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attention_scores(query, key, 0.3, enable_gqa=True).sin().sum()

    def exact_product(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (0.3 * query @ key.repeat_interleave(2, dim=-3).mT).sin().sum()

    for ours, exact, shapes in (
        (softmax_total, exact_softmax, ((3, 2, 4, 5), (4, 1))),
        (scores_total, exact_product, ((3, 4, 5, 2), (2, 6, 2))),
    ):
        given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        for transform in (
            lambda f: vmap(f, (0, None)),
            lambda f: vmap(grad(f, argnums=(0, 1)), (0, None)),
            lambda f: grad(f, argnums=(0, 1)),
            lambda f: hessian(f, argnums=(0, 1)),
            lambda f: jacrev(jacrev(f, argnums=0), argnums=1),
            lambda f: jacfwd(f, argnums=0),
        ):
            torch.testing.assert_close(transform(ours)(*given), transform(exact)(*given))


def test_autocast_reaches_no_judge() -> None:
    """Second derivatives and forward mode compute in float32 even under autocast."""
    tensors = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    with torch.autocast(gpu.DEVICE, dtype=torch.bfloat16):
        inside = reference.attention(*tensors).out
    assert torch.equal(inside, reference.attention(*tensors).out)
