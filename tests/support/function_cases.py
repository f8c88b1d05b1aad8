"""Calls of the operators with functions of scores and maps of blocks, as data.

A call makes its inputs, and runs them through the operators and, with the same function in torch, through
the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import normal, remembered
from compiled_functions import load
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import backends, ops, reference

SCALE = 0.3

Options = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A structure of score_functions.cpp, and the same in torch."""

    #: (scores, tensors, numbers, (batch, head, query, key) of the scores) -> scores
    value: Callable[[Tensor, list[Tensor], list[float], list[Tensor]], Tensor]
    #: (B, H, L, S) -> shapes of its tensors
    shapes: Callable[[int, int, int, int], list[tuple[int, ...]]] = lambda b, h, q, k: []
    #: (L, S) -> its numbers
    numbers: Callable[[int, int], list[float]] = lambda q, k: []
    #: (numbers, places) -> which pairs it hides
    hides: Callable[[list[float], list[Tensor]], Tensor] | None = None
    #: The dimensions that `exclusive` may name.
    exclusive: int = 0


def wild(scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.where(query % 5 == 1, -torch.inf, scores)
    scores = torch.where((query % 5 == 2) & (key == 3), torch.nan, scores)
    return torch.where((query % 5 == 3) & (key == 4), torch.inf, scores)


FUNCTIONS = {
    "Bias": Function(
        lambda s, t, n, at: s + t[0].T[at[1], at[3] - at[2] + int(n[0])],
        shapes=lambda b, h, q, k: [(q + k, h)],
        numbers=lambda q, k: [float(q)],
        exclusive=2,
    ),
    "Factor": Function(
        lambda s, t, n, at: s * t[0].T[at[1], at[2]],
        shapes=lambda b, h, q, k: [(q, h)],
        hides=lambda n, at: (3 * at[2] + 2 * at[3] + at[0] + at[1]) % 7 == 0,
        exclusive=6,
    ),
    "Square": Function(
        lambda s, t, n, at: s + s * s * t[0][at[3]] + t[1][at[0]] * (at[3] % 3),
        shapes=lambda b, h, q, k: [(k,), (b,)],
    ),
    "Causal": Function(
        lambda s, t, n, at: s,
        numbers=lambda q, k: [float(k - q)],
        hides=lambda n, at: at[3] > at[2] + int(n[0]),
    ),
    "Cap": Function(lambda s, t, n, at: n[0] * torch.tanh(s / n[0]), numbers=lambda q, k: [0.7]),
    "Wild": Function(lambda s, t, n, at: wild(s, at[2], at[3])),
}


@dataclass(frozen=True)
class Call:
    """A call of the operators with a function, a map of blocks, or both."""

    function: str | None
    lengths: tuple[int, int]
    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dims: tuple[int, int] = (16, 24)
    block_size: tuple[int, int] | None = None
    #: Whether the map's batch and heads have size 1.
    map_shared: tuple[bool, bool] = (False, False)
    options: Options = field(default_factory=dict, repr=False)
    seed: int = 0

    def tensors(self) -> list[Tensor]:
        (queries, keys), (dim, value_dim) = self.lengths, self.dims
        shapes = (
            (self.heads, queries, dim),
            (self.kv_heads, keys, dim),
            (self.kv_heads, keys, value_dim),
        )
        return [
            normal(self.batch, *shape, dtype=self.dtype, seed=self.seed + i) for i, shape in enumerate(shapes)
        ]

    def captured(self) -> list[Tensor]:
        if self.function is None:
            return []
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        shapes = FUNCTIONS[self.function].shapes(self.batch, self.heads, *self.lengths)
        # Each is every second element of a longer tensor, as functions must respect strides.
        return [
            normal(*shape[:-1], 2 * shape[-1], dtype=dtype, seed=50 + self.seed + i)[..., ::2]
            for i, shape in enumerate(shapes)
        ]

    def numbers(self) -> list[float]:
        return [] if self.function is None else FUNCTIONS[self.function].numbers(*self.lengths)

    def block_map(self) -> Tensor | None:
        if self.block_size is None:
            return None
        blocks = [-(-n // size) for n, size in zip(self.lengths, self.block_size, strict=True)]
        shape = [
            1 if shared else n for shared, n in zip(self.map_shared, (self.batch, self.heads), strict=True)
        ]
        generator = torch.Generator().manual_seed(self.seed)
        states = torch.randint(0, 3, (*shape, *blocks), generator=generator)
        states[..., 0] = states[..., 0].clamp(min=1)  # most rows see something
        return states.to(torch.uint8)

    def arguments(self) -> Options:
        """Returns the operators' keyword arguments."""
        arguments: Options = {"kernel_name": backends.forced_kernel(), **self.options}
        if self.function is not None:
            arguments |= {
                "score_function": load(self.function, self.dtype),
                "captured": self.captured(),
                "captured_numbers": self.numbers(),
            }
        if self.block_size is not None:
            arguments |= {"block_map": self.block_map(), "block_size": self.block_size}
        return arguments

    def score_function(self, captured: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Returns the function and the map in torch."""

        def value(scores: Tensor) -> Tensor:
            numbers = self.numbers()
            at = list(torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij"))
            function = None if self.function is None else FUNCTIONS[self.function]
            hidden = torch.zeros(scores.shape, dtype=torch.bool)
            if function is not None:
                scores = function.value(scores, [t.to(scores.dtype) for t in captured], numbers, at)
                if function.hides is not None:
                    hidden = function.hides(numbers, at)
            states = self.block_map()
            if states is not None:
                assert self.block_size is not None
                for d, (size, n) in enumerate(zip(self.block_size, scores.shape[2:], strict=True), start=2):
                    states = states.repeat_interleave(size, dim=d).narrow(d, 0, n)
                hidden = torch.where(states == 1, hidden, states == 0)
            return torch.where(hidden, -torch.inf, scores)

        return value


@dataclass(frozen=True)
class Results:
    out: Tensor
    weights: Tensor
    gradients: dict[str, Tensor]
    #: The size of the terms whose sum a gradient is.
    terms: dict[str, float] = field(default_factory=dict)


def run(call: Call, exclusive: int | None = None) -> Results:
    """Computes a call with the operators."""
    tensors, arguments = call.tensors(), call.arguments()
    out, row_max, row_sum, residual = ops.attention_forward(*tensors, SCALE, need_residual=True, **arguments)
    weights = ops.attention_weights(*tensors[:2], row_max, row_sum, SCALE, **arguments)
    grad_out, grad_weights = cotangents(call)
    passed = (grad_out, *tensors, out, row_max, row_sum, SCALE)
    more = {
        "out_residual": residual if residual.numel() else None,
        "grad_row": (weights.double() * grad_weights.double()).sum(-1).to(row_max.dtype),
        "grad_weights": grad_weights,
    }
    masked = "attn_mask" in arguments
    grads = ops.attention_backward(*passed, need_mask_grad=masked, **more, **arguments)
    gradients = dict(zip(("query", "key", "value"), grads, strict=False))
    if masked:
        gradients["mask"] = grads[3]
    if "alibi_slopes" in arguments:
        gradients["slopes"] = grads[4]
    captured = arguments.get("captured") or []
    if captured:
        assert call.function is not None
        sums = ops.attention_captured_gradients(
            *passed,
            captured_sizes=[tensor.numel() for tensor in captured],
            exclusive=FUNCTIONS[call.function].exclusive if exclusive is None else exclusive,
            **more,
            **arguments,
        )
        for i, part in enumerate(sums.split([tensor.numel() for tensor in captured])):
            gradients[f"captured {i}"] = part.reshape(captured[i].shape)
    return Results(out, weights, gradients)


def cotangents(call: Call) -> tuple[Tensor, Tensor]:
    shape = (call.batch, call.heads, call.lengths[0])
    return (
        normal(*shape, call.dims[1], dtype=call.dtype, seed=90),
        normal(*shape, call.lengths[1], dtype=call.dtype, seed=91),
    )


def formula(call: Call, dtype: torch.dtype | None) -> Results:
    """Computes a call by the formula, in float64 or in the call's dtype."""

    def leaf(tensor: Tensor) -> Tensor:
        return (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_()

    options = {name: value for name, value in call.options.items() if name != "batch_invariant"}
    inputs = dict(zip(("query", "key", "value"), map(leaf, call.tensors()), strict=True))
    captured = [leaf(tensor) for tensor in call.captured()]
    leaves = inputs | {f"captured {i}": tensor for i, tensor in enumerate(captured)}
    for option, short in (("attn_mask", "mask"), ("alibi_slopes", "slopes")):
        if option in options:
            leaves[short] = options[option] = leaf(options[option])
    if "sinks" in options:
        options["sinks"] = leaf(options["sinks"]).detach()
    options["window_size"] = (options.pop("window_left", -1), options.pop("window_right", -1))
    function, seen = call.score_function(captured), {}

    def observed(scores: Tensor) -> Tensor:
        seen["before"], seen["after"] = scores, function(scores)
        return seen["after"]

    result = reference.attention(*inputs.values(), scale=SCALE, score_function=observed, **options)
    results = [result.out, result.weights]
    grads = torch.autograd.grad(
        results,
        [*leaves.values(), seen["after"]],
        [cotangent.to(part.dtype) for cotangent, part in zip(cotangents(call), results, strict=True)],
    )
    gradients = dict(zip(leaves, grads, strict=False))
    before = seen["before"].detach().requires_grad_()
    steepest = max(
        1.0, float(torch.autograd.grad(function(before).clamp(min=-1e9).sum(), before)[0].abs().max())
    )
    # Rounding errors of a score's gradient, weight * (dP - delta), are proportional to dP, and the function
    # multiplies them.
    grad_out, grad_weights = (cotangent.double() for cotangent in cotangents(call))
    values = call.tensors()[2].double().repeat_interleave(call.heads // call.kv_heads, dim=1)
    largest = float((grad_out @ values.mT + grad_weights).abs().max()) / (1 - options.get("dropout_p", 0.0))
    terms = dict.fromkeys(("query", "key", "value"), largest * steepest)
    errors = torch.maximum(grads[-1].abs(), result.weights.detach() * largest)
    if captured:
        # These functions are made of terms that are positive for positive scores, times captured numbers.
        sums = torch.autograd.grad(function(before.detach().abs()), captured, errors)
        terms |= {f"captured {i}": float(part.max()) for i, part in enumerate(sums)}
    if "slopes" in gradients:
        far = torch.arange(call.lengths[0])[:, None] - torch.arange(call.lengths[1])
        terms["slopes"] = steepest * float((errors * far.abs()).sum((0, 2, 3)).max())
    if "mask" in gradients:
        terms["mask"] = largest
    return Results(result.out.detach(), result.weights.detach(), gradients, terms)


@remembered
def exact_and_peer(fields: dict[str, Any]) -> tuple[Results, Results]:
    """Computes the formula of a call in float64 and in its dtype."""
    exact = formula(Call(**fields), torch.float64)
    return exact, exact if fields["dtype"] == torch.float64 else formula(Call(**fields), None)


def check(call: Call) -> None:
    result = run(call)
    exact, peer = exact_and_peer({name: getattr(call, name) for name in call.__dataclass_fields__})
    assert_accurate(f"out of {call}", result.out, exact.out, peer.out)
    assert_accurate(f"weights of {call}", result.weights, exact.weights, peer.weights)
    assert result.gradients.keys() == exact.gradients.keys()
    for which, gradient in result.gradients.items():
        judges = exact.gradients[which], peer.gradients[which], exact.terms[which]
        assert_accurate(f"grad of {which} of {call}", gradient, *judges, call.dtype)


def same(first: Results, second: Results) -> bool:
    """Tells whether two results have the same bits, where NaN equals NaN."""
    pairs = [(first.out, second.out), (first.weights, second.weights)]
    pairs += [(gradient, second.gradients[name]) for name, gradient in first.gradients.items()]
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )
