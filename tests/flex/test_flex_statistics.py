"""Statistics of attention with functions, and their gradients, with those of what functions learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import STATISTICS, statistics_of
from functions import ALL, Functions, flex_attention, formula, mask_of, tensors, without_compiler
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import AuxOutput, AuxRequest, reference, varlen_attention
from selfattn_ext.flex import formula as flex_formula

SIZES = (1, 2, 70, 90)
#: Factors of the statistics in the loss whose gradients are compared.
FACTORS = {"entropy": 0.7, "mean_score": -0.4, "key_weights": 0.3}


def results_of(aux: AuxOutput, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Returns the statistics, and the gradients of a loss of them."""
    results = statistics_of(aux)
    total = sum((factor * results[name].double().square()).sum() for name, factor in FACTORS.items())
    found = torch.autograd.grad(total, leaves)
    return {name: result.detach() for name, result in results.items()} | {
        f"gradient {number}": gradient for number, gradient in enumerate(found)
    }


def by_formula(given: list[Tensor], functions: Functions, dtype: torch.dtype) -> dict[str, Tensor]:
    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> AuxOutput:
        return reference.score_statistics(query, key, mask, **options)

    query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in given)
    aux = formula(query, key, value, functions, compute=compute, sinks=torch.ones(2))
    return results_of(aux, [query, key, *functions.learned])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("name", ["conjunction", "relative_bias"])
def test_statistics(name: str, dtype: torch.dtype, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels; and by torch, some queries at a time, where nothing can be compiled."""
    functions = ALL[name](SIZES, torch.float64 if dtype == torch.float64 else torch.float32)
    given = tensors(SIZES, dtype)
    if in_parts:
        without_compiler(monkeypatch)
        monkeypatch.setattr(flex_formula, "_SCORES_AT_ONCE", 2 * 90 * 16)
    mask = mask_of(functions, SIZES, 16)
    if in_parts:
        with pytest.warns(UserWarning, match="does not compile"):
            aux = flex_attention(
                *given, functions.score_mod, mask, sinks=torch.ones(2), return_aux=STATISTICS
            )[1]
    else:
        aux = flex_attention(*given, functions.score_mod, mask, sinks=torch.ones(2), return_aux=STATISTICS)[1]
    found = results_of(aux, [*given[:2], *functions.learned])
    exact, peer = (by_formula(given, functions, judge) for judge in (torch.float64, dtype))
    for key, result in found.items():
        size = float(exact[key].abs().max())
        assert_accurate(key, result, exact[key], peer[key], max(size, 10.0), dtype)


def test_derivatives_of_higher_order() -> None:
    table = torch.randn(5, dtype=torch.float64, requires_grad=True)
    query, key = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def compute(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.tanh(score) + table[kv]

        aux = flex_attention(query, key, key, score_mod, return_aux=STATISTICS)[1]
        return aux.entropy, aux.mean_score, aux.key_weights

    assert torch.autograd.gradcheck(compute, (query, key, table), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(compute, (query, key, table), fast_mode=True)


def test_packed_sequences() -> None:
    starts = torch.tensor([0, 5, 5, 22])
    query, key = torch.randn(22, 2, 8), torch.randn(22, 2, 8)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * (1 + b) - (q - kv).abs()

    _, aux = varlen_attention(
        query, key, key, starts, starts, 17, 17, score_mod=score_mod, return_aux=STATISTICS
    )
    for b, (begin, end) in enumerate([(0, 5), (5, 5), (5, 22)]):
        rows = query[begin:end].transpose(0, 1).double(), key[begin:end].transpose(0, 1).double()
        at = torch.arange(end - begin)
        distance = (at[:, None] - at).abs()
        exact = reference.score_statistics(*rows, score_function=lambda s, b=b, d=distance: s * (1 + b) - d)
        for name, right in statistics_of(exact).items():
            found = getattr(aux, name)[:, begin:end].double()
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5, msg=name)


def test_graphs_have_two_of_them() -> None:
    """lse and max_scores are a part of the graph; the others are computed outside of it."""
    given = [tensor.detach() for tensor in tensors((1, 2, 9, 9), torch.float32)]

    def compute(request: AuxRequest) -> Any:
        return flex_attention(*given, lambda s, b, h, q, kv: s * 0.5, return_aux=request)[1]

    two = AuxRequest(lse=True, max_scores=True)
    compiled = torch.compile(lambda: compute(two), backend="eager", fullgraph=True)
    assert all(torch.equal(*pair) for pair in zip(compiled()[:2], compute(two)[:2], strict=True))
    found = torch.compile(lambda: compute(STATISTICS), backend="eager")()
    assert all(torch.equal(*pair) for pair in zip(found[1:], compute(STATISTICS)[1:], strict=True))
