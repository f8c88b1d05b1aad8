"""What functions of scores do besides computing a number.

They stop or replace gradients, change tensors in place, read tensors of every kind and ask for values. The
judge is the function itself, called for each score.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from functions import flex_attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from selfattn_ext import varlen_attention
from selfattn_ext.flex import kernel_calls
from selfattn_ext.flex.indexing import Indexing
from selfattn_ext.flex.tracing import INDEX_DTYPE, trace

pytestmark = pytest.mark.cpu_only

SIZES = (1, 2, 5, 6)


def given() -> list[Tensor]:
    shapes = ((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor]) -> Tensor:
    """Attention with a function that is called for each score."""
    scores = query @ key.mT / query.size(-1) ** 0.5
    at = torch.cartesian_prod(*(torch.arange(size, dtype=INDEX_DTYPE) for size in SIZES))
    with Indexing():
        changed = [
            score_mod(score, *(index.clone() for index in indices)).to(scores.dtype)
            for score, indices in zip(scores.flatten().unbind(), at, strict=True)
        ]
    return torch.stack(changed).view(scores.shape).softmax(-1) @ value


def gradients(out: Tensor, leaves: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    weights = torch.arange(out.size(-1)) % 5 - 1
    found = torch.autograd.grad(
        (out * weights).sin().sum(), leaves, create_graph=create_graph, materialize_grads=True
    )
    return list(found)


def checked(
    score_mod: Callable[..., Tensor], learned: list[Tensor], second: bool = True, compiled: bool = True
) -> None:
    """The result, its gradients, the same gradients where they are differentiated, and theirs."""
    tensors = given()
    leaves = [*tensors, *learned]
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if compiled else "ignore", "selfattn_ext does not compile")
        flex_attention(*tensors, score_mod)
    out, right = flex_attention(*tensors, score_mod), one_by_one(*tensors, score_mod)
    torch.testing.assert_close(out, right)
    first, expected = gradients(out, leaves), gradients(right, leaves, create_graph=True)
    torch.testing.assert_close(first, expected)
    assert len(learned) == sum(bool(each.abs().max() > 0) for each in expected[3:])
    if not second:
        return
    once_more = gradients(flex_attention(*tensors, score_mod), leaves, create_graph=True)
    torch.testing.assert_close(once_more, first)
    sums = [sum((each * each).sum() for each in some if each.requires_grad) for some in (once_more, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, materialize_grads=True) for each in sums))


def table(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


def test_gradients_that_a_function_stops() -> None:
    """Straight-through rounding, detached tables, no_grad, a gradient that the function computes."""
    t, u = table(6), table(2)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        with torch.no_grad():
            still = s.round() * u[h]
        with torch.enable_grad():
            x = s * 1
            (slope,) = torch.autograd.grad(x**3 * t[kv], x, create_graph=s.requires_grad)
            slope = slope + torch.func.jvp(torch.sin, (s,), (torch.ones_like(s),))[1]
        rounded = s + (s.round() - s).detach()
        return rounded * t[kv] + s * u.detach()[h] + still * s * u[h] + 0.1 * slope + s.data

    checked(score_mod, [t, u])


def test_gradients_that_end() -> None:
    checked(lambda s, *at: (s * s).detach(), [])


def test_operations_in_place() -> None:
    """What is overwritten is read as it was before, by torch's own derivatives, too, and through views."""
    t = table(6)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        constant = torch.empty((), dtype=torch.float64).fill_(3.0)
        product = s + constant
        constant.fill_(-2.0).mul_(s.sigmoid())
        x = t[kv] * 1
        x.mul_(s)
        seen = x.view(()).detach()
        y = x * 2
        x.add_(y)
        q += 1
        y *= q
        total = torch.zeros((), dtype=torch.float64).add_(product).add_(seen)
        mixed = torch.lerp(s, s * s, s.sigmoid()) + torch.addcdiv(t[kv], s, t[kv] + 1)
        return constant + x + y * 0.1 + total + mixed + torch.atanh(s.sigmoid())

    checked(score_mod, [t])


def test_learned_numbers_without_an_index() -> None:
    """In operations that are written as others; of another dtype; beside an int64 number without dimensions,
    with which int32 ones are no longer int32; behind operations on themselves.
    """
    c, d = table(), torch.tensor(1.25, requires_grad=True)
    t, many, rows = table(97), torch.tensor(2**31 + 11), torch.arange(6, dtype=torch.int32)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = torch.xlogy(s, c) + torch.special.xlog1py(s, c.exp()) + torch.logaddexp(s, d)
        place = (rows[q] * many + rows[kv] * torch.tensor(2**31 + 3)) % 97
        return x * t[place] + F.softplus(s) * t.tanh()[h] + torch.clamp(s, min=c)

    checked(score_mod, [c, t, d], second=False)
    tensors = given()
    first, again = (
        gradients(flex_attention(*tensors, score_mod), [*tensors, c, t], create_graph)
        for create_graph in (False, True)
    )
    torch.testing.assert_close(again, first)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x.round() * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * 3 * y, grad * x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        ctx.h = h
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -grad * torch.arange(1.0, 3.0, dtype=torch.float64)[ctx.h], None


def test_derivatives_of_ones_own() -> None:
    """Second derivatives are refused: nobody knows what such a function computes of all scores at once."""
    t, u = table(6), table(2)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return Reversed.apply(Rounded.apply(s, t[kv]), h) + s * u[h]

    checked(score_mod, [t, u], second=False)
    tensors = given()
    with pytest.raises(
        RuntimeError, match=r"second derivatives are not available .* torch.autograd.Function"
    ):
        gradients(flex_attention(*tensors, score_mod), tensors, create_graph=True)
    c = table()
    kernel_calls._warned.clear()
    with (
        pytest.warns(UserWarning, match="it learns a tensor that"),
        pytest.raises(RuntimeError, match="vmap"),
    ):
        flex_attention(*tensors, lambda s, *at: Rounded.apply(s, c))  # no mode sees c


def steep(x: Tensor, y: Tensor) -> Tensor:
    return x * y + torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_functions() -> None:
    """Which TorchScript differentiates itself, from the second call on."""
    t, scripted = table(2), torch.jit.script(steep)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        result: Tensor = scripted(s, t[h])
        return result

    for _ in range(3):
        checked(score_mod, [t], second=False)
    tensors = given()
    with pytest.raises(RuntimeError, match=r"that torch.autograd does not see"):
        gradients(flex_attention(*tensors, score_mod), tensors, create_graph=True)


def test_hooks_and_checkpoints_in_functions() -> None:
    t = table(2)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        y = checkpoint(lambda x: (x * t[h]).exp().log() * x, s, use_reentrant=False)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 3)
        return y

    def right(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        y = (s * t[h]).exp().log() * s
        y.register_hook(lambda grad: grad * 3)
        return y

    tensors = given()
    torch.testing.assert_close(
        gradients(flex_attention(*tensors, score_mod), [*tensors, t]),
        gradients(one_by_one(*tensors, right), [*tensors, t]),
    )


def test_what_torch_has_no_gradient_of() -> None:
    """It can be computed; the backward says so."""
    tensors = given()
    for score_mod in (lambda s, *at: s // 0.5, lambda s, *at: s.exp().mul_(s)):
        out = flex_attention(*tensors, score_mod)
        torch.testing.assert_close(out, one_by_one(*tensors, score_mod))
        with pytest.raises(RuntimeError, match=r"not implemented|modified by an inplace"):
            out.sum().backward()


def test_indices_of_every_form() -> None:
    t, u, w = table(6), table(5, 6), table(2, 2, 5, 6)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = t[..., kv] + u[..., kv][q] + u[:, kv][q] + u[q][kv] + u[-1, kv] + t.take(kv) + u.take(q * 6 + kv)
        return s * (x + u[1:, kv][q % 4] + u[q, ..., kv] + w[b][1][q][kv] + w[h, :, -1][0][kv])

    checked(score_mod, [t, u, w])


def test_parts_of_tensors() -> None:
    """Torch takes them in its way."""
    t = table(6)
    checked(lambda s, b, h, q, kv: s * t[kv, None].squeeze(), [t], second=False, compiled=False)


def test_numbers_that_leave_torch() -> None:
    t = torch.randn(6)
    asked: list[Callable[..., Any]] = [
        lambda s, b, h, q, kv: s + numpy.arange(6.0)[kv],
        lambda s, b, h, q, kv: s + numpy.sin(kv),
        lambda s, b, h, q, kv: s + kv.tolist(),
        lambda s, b, h, q, kv: s + torch.as_tensor(numpy.asarray(kv)),
        lambda s, b, h, q, kv: s + t[kv.numpy()],
        lambda s, b, h, q, kv: s + [1.0, 2, 3, 4, 5, 6][kv],
        lambda s, b, h, q, kv: s + torch.from_dlpack(kv.__dlpack__()),
        lambda s, b, h, q, kv: s + kv.item(),
        lambda s, b, h, q, kv: s + float(kv),
        lambda s, b, h, q, kv: s if s > 0 else -s,
        lambda s, b, h, q, kv: OutOfTorch.apply(s),
    ]
    tensors = given()
    for score_mod in asked:
        with pytest.raises(ValueError, match=r"must not .*test_flex_recording.py, line \d+"):
            flex_attention(*tensors, score_mod)


class OutOfTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)


def test_tensors_of_every_kind() -> None:
    """What has no memory of the usual kind is left to torch."""
    numbers = torch.randn(6, dtype=torch.complex128, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + numbers.conj().imag[kv] + numbers.conj().imag[3] + torch._efficientzerotensor(())

    checked(score_mod, [numbers], second=False)
    tensors = given()
    plain = flex_attention(*tensors)
    for zero in (torch._efficientzerotensor((6,)), torch.zeros(6, dtype=torch.uint16)):
        torch.testing.assert_close(flex_attention(*tensors, lambda s, b, h, q, kv, t=zero: s + t[kv]), plain)
    two, sparse = TwoTensor(torch.zeros(6), torch.zeros(6)), torch.zeros(6).to_sparse()
    kernel_calls._warned.clear()
    with pytest.warns(UserWarning, match="a TwoTensor that has no memory of its own"):
        flex_attention(*tensors, lambda s, b, h, q, kv: s + two[kv])
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        flex_attention(*tensors, lambda s, b, h, q, kv: s + sparse[kv])


def test_gradients_that_are_zero() -> None:
    """Torch makes them without memory. It may look for NaN in gradients."""
    with torch.autograd.set_detect_anomaly(True):
        checked(lambda s, *at: torch.sgn(s) * s + torch.sgn(s) + s.sign(), [])


def test_tensors_that_change() -> None:
    """One that is changed between two reads, one that is read only afterwards, one of another's."""
    ours, one = torch.arange(6.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        t = torch.arange(6.0, dtype=torch.float64)
        t.mul_(0.1)
        x = t[kv]
        t.add_(1)
        return s + x * t[kv]

    checked(score_mod, [], second=False, compiled=False)
    for writes in (lambda s, *at: ours[0].copy_(s), lambda s, *at: one.copy_(s)):
        with pytest.raises(RuntimeError, match="vmap"):
            flex_attention(*given(), writes)
    assert torch.equal(ours, torch.arange(6.0, dtype=torch.float64))
    for random in (torch.rand_like, torch.bernoulli, F.dropout, lambda s: s * torch.rand(())):
        with pytest.raises(RuntimeError, match="randomness"):
            flex_attention(*given(), lambda s, *at, random=random: s + random(s.sigmoid()))


def test_fake_tensors() -> None:
    t = torch.randn(2, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.lerp(F.softplus(s) * t[h], s, torch.sgn(s)) * torch.tensor(2.0)

    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
        starts = torch.tensor([0, 3, 6], dtype=torch.int32)
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        for out in (
            flex_attention(query, key, value, score_mod),
            varlen_attention(*packed, starts, starts, 3, 3, score_mod=score_mod),
        ):
            found = torch.autograd.grad(out.sum(), [query, key, value, t])
            assert [each.shape for each in found] == [*[query.shape] * 3, t.shape]


def test_results_of_other_dtypes() -> None:
    """As torch's flex_attention: a bool is 0 or 1."""
    tensors = given()
    for score_mod in (lambda s, b, h, q, kv: q >= kv, lambda s, b, h, q, kv: q - kv, lambda *at: 2):
        right = one_by_one(*tensors, lambda *at, f=score_mod: torch.as_tensor(f(*at)))
        torch.testing.assert_close(flex_attention(*tensors, score_mod), right)


def test_recording_keeps_activation_checkpoints_out() -> None:
    """Their hooks would compute the layer again while the function is recorded."""
    count = 0

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return flex_attention(query, key, value, lambda s, *at: s.sigmoid() * s.exp())

    tensors = given()
    checkpoint(layer, *tensors, use_reentrant=False).sum().backward()
    assert count == 2
    traced = trace(lambda s, *at: s.sigmoid(), None, torch.float32, torch.device("cpu"), True)
    assert traced.failure is None
