"""as_sdpa(): every call of F.scaled_dot_product_attention that this package may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import ran
import torch
import torch.nn.functional as F
from cases import DTYPES, NAMES, dropout_seed, normal
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.bias import causal_lower_right

from selfattn_ext import as_sdpa, reference

sdpa = F.scaled_dot_product_attention


def inputs(dtype: torch.dtype = torch.float32, *, grad: bool = False, keys: int = 7) -> tuple[Tensor, ...]:
    shapes = ((2, 4, 5, 8), (2, 4, keys, 8), (2, 4, keys, 8))
    return tuple(
        normal(*shape, dtype=dtype, seed=seed).requires_grad_(grad) for seed, shape in enumerate(shapes)
    )


#: name -> (change of query, key and value; options). torch computes most of these by its formula.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (lambda q, k, v: (q, k, v), {}),
    "causal": (lambda q, k, v: (q, k, v), {"is_causal": True, "scale": 0.3}),
    "Ev": (lambda q, k, v: (q, k, v[..., :3]), {}),
    "3-D": (lambda q, k, v: (q[0], k[0], v[0]), {}),
    "2-D": (lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]), {"is_causal": True}),
    "5-D": (lambda q, k, v: (q[None], k[None], v[None]), {}),
    "ranks": (lambda q, k, v: (q, k[0], v[0, 0]), {}),
    "one kv head": (lambda q, k, v: (q, k[:, :1], v[:, :1]), {}),
    "one query head": (lambda q, k, v: (q[:, :1], k, v), {}),
    "batches": (lambda q, k, v: (q[:1], k, v[:1]), {}),
    "grouped": (lambda q, k, v: (q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
    "grouped 3-D": (lambda q, k, v: (q[0], k[0, :2], v[0, :2]), {"enable_gqa": True}),
    "columns": (lambda q, k, v: (q, k.mT.contiguous().mT, v), {}),
    "bool mask": (
        lambda q, k, v: (q, k, v),
        {"attn_mask": (normal(2, 1, 5, 7) > 0).index_fill(2, torch.tensor(2), False)},
    ),
    "float mask": (
        lambda q, k, v: (q, k, v),
        {"attn_mask": normal(5, 7).index_fill(0, torch.tensor(2), -torch.inf)},
    ),
    "learned mask": (lambda q, k, v: (q, k, v), {"attn_mask": normal(4, 1, 7)}),
}


def run(
    name: str, dtype: torch.dtype, given: torch.dtype, forward: Any = nullcontext, backward: Any = nullcontext
) -> dict[str, Tensor]:
    """Computes output and gradients, each in a block, for numbers that ``given`` can represent."""
    change, options = CALLS[name]
    tensors = dict(zip(("query", "key", "value"), inputs(given), strict=True))
    others = dict(options)
    if name == "float mask":
        others["attn_mask"] = others["attn_mask"].to(given).to(dtype)
    if name == "learned mask":
        tensors["attn_mask"] = others["attn_mask"].to(given)
    tensors = {word: tensor.to(dtype).requires_grad_() for word, tensor in tensors.items()}
    if "attn_mask" in tensors:
        others["attn_mask"] = tensors["attn_mask"]
    with forward():
        out = sdpa(*change(tensors["query"], tensors["key"], tensors["value"]), **others)
    with backward():
        cotangent = normal(*out.shape, dtype=given, seed=9).to(dtype)
        grads = torch.autograd.grad(out, list(tensors.values()), cotangent)
    return {"out": out.detach(), **dict(zip(tensors, grads, strict=True))}


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    exact, peer = run(name, torch.float64, dtype), run(name, dtype, dtype)
    for what, result in run(name, dtype, dtype, as_sdpa, as_sdpa).items():
        assert_accurate(what, result, exact[what], peer[what], 4.0)
    assert min(ran.ours(lambda: run(name, torch.float32, dtype, as_sdpa, as_sdpa))) >= 1


def test_mask_and_causal_rule_together() -> None:
    """Both hold; torch raises or, in some versions, applies both, too."""
    query, key, value = inputs()
    mask = normal(2, 1, 5, 7)
    both = mask.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(1), -torch.inf)
    with as_sdpa():
        out = sdpa(query, key, value, mask, is_causal=True)
    torch.testing.assert_close(out, sdpa(query, key, value, both))


def test_dropout() -> None:
    query, key, value = inputs()
    exact = [tensor.double() for tensor in (query, key, value)]
    seed = dropout_seed(3)
    expected = reference.attention(*exact, dropout_p=0.4, dropout_seed=seed).out
    torch.manual_seed(3)
    with as_sdpa():
        out = sdpa(query, key, value, dropout_p=0.4)
        everything = sdpa(query, key, value, dropout_p=1.0)
    assert_accurate("out", out, expected)
    assert torch.equal(everything, torch.zeros_like(out))


def test_every_query_that_sees_no_key_gets_zeros_on_both_sides() -> None:
    query, key, value = inputs()
    for mask in (torch.zeros(5, 7, dtype=torch.bool), torch.full((5, 7), -torch.inf)):
        for block in (nullcontext, as_sdpa):
            with block():
                assert torch.equal(sdpa(query, key, value, mask), torch.zeros_like(query))


def test_blocks_end() -> None:
    def step() -> None:
        sdpa(*inputs(grad=True), dropout_p=0.1).sum().backward()

    assert ran.ours(step) == (0, 0)
    block = as_sdpa()
    with block:
        assert ran.ours(step) == (1, 1)
        with block, as_sdpa():
            assert ran.ours(step) == (1, 1)
        assert ran.ours(step) == (1, 1)
    assert ran.ours(step) == (0, 0)
    with pytest.raises(KeyError), block:
        raise KeyError
    assert ran.ours(step) == (0, 0)
    assert ran.ours(as_sdpa()(step)) == (1, 1)
    assert as_sdpa()(step).__name__ == "step"
    assert ran.ours(step) == (0, 0)


def test_both_switches_together() -> None:
    def step() -> None:
        sdpa(*inputs(grad=True), dropout_p=0.1).sum().backward()
        sdpa(*inputs(grad=True)).sum().backward()

    with ran.activated():
        with as_sdpa():
            assert ran.ours(step) == (2, 2)
        assert ran.ours(step) == (1, 1)
    assert ran.ours(step) == (0, 0)


def test_a_block_is_of_its_thread() -> None:
    query, key, value = inputs()
    counted: dict[str, tuple[int, int]] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with as_sdpa():
            inside.set()
            done.wait(60)
            counted["in a block"] = ran.ours(lambda: sdpa(query, key, value))

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    counted["beside it"] = ran.ours(lambda: sdpa(query, key, value))
    done.set()
    thread.join()
    assert counted == {"in a block": (1, 0), "beside it": (0, 0)}


def results_of(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


#: name -> a call that is left to torch: mistakes, and calls that this package does not compute.
LEFT_TO_TORCH: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "head dims": lambda q, k, v: sdpa(q, k[..., :3], v),
    "heads": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2]),
    "no group": lambda q, k, v: sdpa(q, k[:, :3], v[:, :3], enable_gqa=True),
    "group of 2-D": lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True),
    "batch": lambda q, k, v: sdpa(q, k.repeat(2, 1, 1, 1), v),
    "dtypes": lambda q, k, v: sdpa(q.half(), k, v),
    "integers": lambda q, k, v: sdpa(q.int(), k.int(), v.int()),
    "complex": lambda q, k, v: sdpa(q.cfloat(), k.cfloat(), v.cfloat()),
    "1-D": lambda q, k, v: sdpa(q[0, 0, 0], k, v),
    "mask of int": lambda q, k, v: sdpa(q, k, v, torch.ones(5, 7, dtype=torch.int32)),
    "mask of float16": lambda q, k, v: sdpa(q, k, v, torch.ones(5, 7, dtype=torch.float16)),
    "mask of 1-D": lambda q, k, v: sdpa(q, k, v, torch.ones(7)),
    "mask too large": lambda q, k, v: sdpa(q, k, v, torch.ones(5, 8)),
    "mask of more dimensions": lambda q, k, v: sdpa(q, k, v, torch.ones(2, 2, 1, 5, 7)),
    "dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=1.5),
    "less dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=-0.5),
    "no tensor": lambda q, k, v: sdpa(None, k, v),
    "meta": lambda q, k, v: sdpa(*(tensor.to("meta") for tensor in (q, k, v))).shape,
    "no head dim": lambda q, k, v: sdpa(q[..., :0], k[..., :0], v),
    "scale": lambda q, k, v: sdpa(q, k, v, scale=float("inf")).isnan().all(),
    "nested": lambda q, k, v: sdpa(*(torch.nested.nested_tensor([t[0], t[1]]) for t in (q, k, v))).unbind()[
        1
    ],
    "sparse": lambda q, k, v: sdpa(q.to_sparse(), k, v),
    "a backend": lambda q, k, v: with_math(q, k, v),
}


def with_math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return sdpa(query, key, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_left_to_torch(name: str) -> None:
    call = LEFT_TO_TORCH[name]
    expected = results_of(lambda: call(*inputs()))
    with as_sdpa():
        result = results_of(lambda: call(*inputs()))
    if isinstance(expected, Tensor):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert result == expected


def test_a_subclass_with_a_dispatch_of_its_own_is_torchs() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    query, key, value = (TwoTensor(tensor, tensor.clone()) for tensor in inputs())
    with as_sdpa():
        result = sdpa(query, key, value, dropout_p=0.0)
        assert sum(ran.ours(lambda: sdpa(query, key, value))) == 0
    assert type(result) is TwoTensor
    assert torch.equal(result.a, sdpa(*inputs()))


def test_autocast() -> None:
    query, key, value = inputs(grad=True)
    mask = normal(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        expected = sdpa(query, key, value.bfloat16(), mask)
        with as_sdpa():
            out = sdpa(query, key, value.bfloat16(), mask)
            assert ran.ours(lambda: sdpa(query, key, value.bfloat16(), mask)) == (1, 0)
    assert out.dtype == expected.dtype == torch.bfloat16
    exact = sdpa(*(tensor.bfloat16().double() for tensor in (query, key, value)), mask.double())
    assert_accurate("out", out.detach(), exact.detach(), expected.detach())


def test_no_grad_and_inference_mode() -> None:
    tensors = inputs(grad=True)
    with as_sdpa():
        with torch.no_grad():
            assert not sdpa(*tensors).requires_grad
        with torch.inference_mode():
            assert sdpa(*tensors).is_inference()


def test_hidden_keys_may_hold_anything() -> None:
    query, key, value = inputs()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 2] = False
    key[:, :, 2], value[:, :, 2] = torch.nan, torch.inf
    assert sdpa(query, key, value, mask).isnan().any()
    with as_sdpa():
        assert not sdpa(query, key, value, mask).isnan().any()


def test_causal_bias() -> None:
    query, key, value = inputs()
    with as_sdpa():
        out = sdpa(query, key, value, causal_lower_right(5, 7))
        assert sum(ran.ours(lambda: sdpa(query, key, value, causal_lower_right(5, 7)))) == 1
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    torch.testing.assert_close(out, sdpa(query, key, value, mask))


def test_derivatives_that_torchs_fused_kernel_lacks() -> None:
    """torch refuses forward mode and second derivatives, or computes them by its formula."""
    query, key, value, tangent = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(4))

    def loss(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).sin().sum()

    def derivatives() -> tuple[torch.Tensor, ...]:
        gradient = torch.func.grad(loss)
        return *torch.func.jvp(loss, (query,), (tangent,)), *torch.func.jvp(gradient, (query,), (tangent,))

    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        expected = derivatives()
    with as_sdpa():
        torch.testing.assert_close(derivatives(), expected)


TRAINED_BY_THE_FORMULA: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.1),
    "3-D": lambda q, k, v: sdpa(q[0], k[0], v[0]),
    "a mask with a gradient": lambda q, k, v: sdpa(q, k, v, torch.zeros(5, 7, requires_grad=True)),
}


@pytest.mark.parametrize("name", TRAINED_BY_THE_FORMULA)
def test_outputs_that_are_changed_in_place(name: str) -> None:
    """torch's formula does not save its output; the error says that this package does, and advises a copy."""
    call = TRAINED_BY_THE_FORMULA[name]
    query, key, value = inputs(grad=True)
    with attention.sdpa_kernel(attention.SDPBackend.MATH):  # torch 2.14 chooses another one for 3-D
        call(query, key, value).mul_(2.0).sum().backward()
    with as_sdpa():
        with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*change a copy"):
            call(query, key, value).mul_(2.0).sum().backward()
        call(query, key, value).clone().mul_(2.0).sum().backward()
