"""Comparisons of calls of attention: with the formula, and bit by bit with other calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cases import remembered
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import reference, scaled_dot_product_attention

Results = dict[str, Tensor]

#: The names of so many results of attention, and of gradients by its inputs.
NAMES = {1: ("out",), 2: ("out", "lse"), 3: ("out", "weights", "lse")}
GRADIENTS = ("grad of query", "grad of key", "grad of value")


def junk_of(dtype: torch.dtype) -> tuple[float, ...]:
    """Returns numbers that are no sum of bfloat16 pieces."""
    inf, nan = torch.inf, torch.nan
    return (nan, inf, -inf) if dtype == torch.float16 else (nan, inf, -inf, 3e38, 2.0**61, 2.0**-81, 1e-40)


def assert_same(found: Any, expected: Any, what: object = "") -> None:
    """Asserts equal bits, signs of zeros included, except that every NaN equals every other.

    It compares tensors, and sequences and dictionaries of them.
    """
    if isinstance(expected, Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
        equal = (found == expected) & (found.signbit() == expected.signbit())
        same = equal | found.isnan() & expected.isnan()
        assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} differ"
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), what
        for name, one in expected.items():
            assert_same(found[name], one, f"{name}, {what}")
    else:
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"result {place}, {what}")


def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Computes attention with its log-sum-exp, with grouped heads if there are fewer of keys."""
    results: tuple[Tensor, ...] = scaled_dot_product_attention(
        *tensors, **{"enable_gqa": True, "return_lse": True, **options}
    )
    return results


def results_of(
    attention: Callable[..., Any], tensors: Sequence[Tensor], incoming: Tensor | None = None, **options: Any
) -> Results:
    """Returns the results of attention by name, and the gradients of its output if one comes in."""
    leaves = [tensor.detach().requires_grad_(incoming is not None) for tensor in tensors]
    results = attention(*leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    grads: dict[str, Tensor] = {}
    if incoming is not None:
        of_leaves = torch.autograd.grad(results[0], leaves, incoming.to(results[0].dtype))
        grads = dict(zip(GRADIENTS, of_leaves, strict=False))  # scores have no value
    named = dict(zip(NAMES[len(results)], results, strict=True))
    return {name: result.detach() for name, result in named.items()} | grads


def by_formula(
    tensors: Sequence[Tensor], incoming: Tensor | None, options: Mapping[str, Any] | None = None
) -> Results:
    return results_of(reference.attention, tensors, incoming, **(options or {}))


@remembered
def exact_and_peer(
    tensors: Sequence[Tensor], options: Mapping[str, Any] | None = None, incoming: Tensor | None = None
) -> tuple[Results, Results]:
    """Computes the formula of query, key and value in float64, and in their dtype."""
    peer = by_formula(tensors, incoming, options)
    return by_formula([tensor.double() for tensor in tensors], incoming, options), peer


def assert_results(
    found: Results,
    judges: tuple[Results, Results],
    what: object = "",
    *,
    unit: Callable[[str, Tensor], Any] = lambda name, exact: 1.0,
    terms: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Asserts that results are accurate, in units that may depend on the name and on the exact result.

    ``terms`` are the sizes of the terms whose sums they are, in these units.
    """
    for name, result in found.items():
        exact, peer = (judge[name] for judge in judges)
        of = unit(name, exact)
        three = (number.double() / of for number in (result, exact, peer))
        assert_accurate(f"{name}, {what}", *three, (terms or {}).get(name, 1.0), dtype or result.dtype)


def check_call(
    tensors: Sequence[Tensor],
    incoming: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    **judging: Any,
) -> Results:
    """Asserts that results are accurate, and gradients if the output has one; returns them."""
    found = results_of(attend, tensors, incoming, **(options or {}))
    of_formula = {name: it for name, it in (options or {}).items() if not name.startswith("return")}
    judges = exact_and_peer(tensors, of_formula, incoming)
    assert_results(found, judges, f"with {list(options or ())}", **judging)
    return found
