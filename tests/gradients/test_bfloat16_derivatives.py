"""Forward mode and second derivatives of bfloat16 inputs, which some kernels compute in pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import derivatives
import pytest
import torch
from cases import Case, cotangents_of, exact_inputs, normal
from comparisons import assert_same
from torch import Tensor
from torch.func import grad, jvp

from selfattn_ext import batch_invariant, scaled_dot_product_attention, varlen_attention

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]

BFLOAT16 = Case(batch=1, dtype=torch.bfloat16, lse=True)

#: Cases around the sizes of tiles (16 and 32 queries, 48 and 96 of a panel, 64 keys), with whole and ragged
#: head dims and scales that are not powers of two.
CASES = [
    replace(BFLOAT16, queries=15, keys=63, head_dim=32, value_dim=32),
    replace(BFLOAT16, queries=32, keys=64, head_dim=64, value_dim=48, mask="bool tiles", sinks=1),
    replace(BFLOAT16, queries=33, keys=65, head_dim=48, heads=4, is_causal=True, query_offset=5),
    replace(BFLOAT16, queries=31, keys=64, head_dim=20, value_dim=7, mask="float heads", softcap=1.5),
    replace(
        BFLOAT16, queries=97, keys=129, heads=4, window=(40, 9), layout="transposed", grad_layout="offset"
    ),
    replace(BFLOAT16, batch=2, queries=17, keys=128, head_dim=24, mask="float32", dropout_p=0.3),
    replace(BFLOAT16, queries=49, keys=70, mask="float keys", dropout_p=0.3, softcap=1.2, layout="columns"),
    replace(BFLOAT16, queries=5, keys=200, head_dim=80, heads=4, kv_heads=1, mask="bool", alibi=1),
    replace(BFLOAT16, queries=4, keys=16, alibi=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_options(case: Case, isa: str) -> None:
    derivatives.check(case)


@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("size", [1.0, 16.0])
def test_what_all_keys_have_in_common(spread: int, size: float, isa: str) -> None:
    """A large number that the tangents of all scores of a row share changes only the log-sum-exp; scores
    may be large themselves. If tangents, weights or their gradients were rounded to a piece, the rounding
    error times the large number would remain.
    """
    case = replace(BFLOAT16, queries=33, keys=200, head_dim=32, value_dim=32)
    tensors = case.inputs()
    with torch.no_grad():
        tensors["query"] *= size
        tensors["key"] *= size
    tangents = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    tangents["key"] += 96 + 16 * normal(1, 1, 1, 32).round()
    tangents["key"] += normal(*tensors["key"].shape, seed=1).mul(spread).round()
    cotangents = cotangents_of({"out": tensors["query"], "lse": torch.zeros(1, 2, 33)}, case.seed)

    def found(function: Function, tensors: Tensors, tangents: Tensors) -> Tensors:
        moving = derivatives.moving(function, tensors, tangents)
        given = {name: cotangent.to(moving[name]) for name, cotangent in cotangents.items()}
        return moving | derivatives.twice(function, tensors, given, tangents)

    ours = found(case.run, tensors, tangents)
    exact = found(case.formula, *(exact_inputs(given) for given in (tensors, tangents)))
    query, *keys = (given.detach().double() for given in (tensors["query"], tensors["key"], tangents["key"]))
    scores, of_scores = (query @ key.mT / 32**0.5 for key in keys)
    # The error of weights is that of large scores, and it multiplies the differences between keys.
    of_weights = scores.abs().max() * (of_scores.amax(-1) - of_scores.amin(-1)).max()
    for name, result in ours.items():
        error = (result.double() - exact[name]).abs().max()
        bound = torch.finfo(result.dtype).eps / 2 * exact[name].abs().max()
        bound += 1e-6 * of_scores.abs().max() + 2.0**-24 * of_weights
        assert error <= bound, f"{name}: {error:.3g}, allowed {bound:.3g}"


def moving_and_second(attend: Callable[..., Tensor], points: Sequence[Tensor]) -> list[Tensor]:
    """Computes a result, its tangent, the gradients by query, key and value, and the gradients of these.

    The second half of the points is a direction.
    """
    inputs, tangents = tuple(points[:3]), tuple(points[3:])
    loss = grad(lambda *inputs: attend(*inputs).float().sin().sum(), (0, 1, 2))
    (grads, of_grads), (out, of_out) = jvp(loss, inputs, tangents), jvp(attend, inputs, tangents)
    return [out, of_out, *grads, *of_grads]


def points_of(
    queries: Sequence[int], keys: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Draws query, key, value and a direction, of these shapes without the last dimension."""
    return [normal(*(queries if seed % 3 == 0 else keys), 32, dtype=dtype, seed=seed) for seed in range(6)]


#: float64 is computed without pairs.
of_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)


@of_dtypes
@pytest.mark.usefixtures("one_thread")
def test_the_same_bits_on_any_number_of_threads(dtype: torch.dtype, isa: str) -> None:
    def attend(*inputs: Tensor) -> Tensor:
        return scaled_dot_product_attention(*inputs, is_causal=True)

    points = points_of((1, 2, 130), (1, 2, 300), dtype)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(moving_and_second(attend, points))
    assert_same(*results)


@of_dtypes
def test_a_hidden_nan_stays_hidden(dtype: torch.dtype, isa: str) -> None:
    seen = torch.ones(33, 70, dtype=torch.bool)
    seen[:, 2] = seen[3] = seen[:, 69] = False

    def attend(*inputs: Tensor) -> Tensor:
        return scaled_dot_product_attention(*inputs, seen)

    points = points_of((1, 2, 33), (1, 2, 70), dtype)
    clean = moving_and_second(attend, points)
    for index in (1, 2, 4, 5):
        points[index][:, :, 2], points[index][:, :, 69] = torch.nan, torch.inf
    assert_same(moving_and_second(attend, points), clean)
    assert not any(part[:, :, 3].any() for part in clean[:2])


def test_sequences_are_as_if_alone(isa: str) -> None:
    """The sequences have lengths for which different kernels are best, and length 0."""
    lengths = torch.tensor([(40, 70), (1, 9), (0, 3), (17, 17), (4, 64)])
    starts = torch.cat([torch.zeros(1, 2, dtype=torch.int64), lengths.cumsum(0)]).int()
    points = points_of((62, 2), (163, 2))

    def attend(*inputs: Tensor, starts: Tensor = starts) -> Tensor:
        return varlen_attention(*inputs, *starts.mT.contiguous(), 40, 70, is_causal=True)

    together = moving_and_second(attend, points)
    for begin, end in itertools.pairwise(starts):

        def of_sequence(tensors: list[Tensor], begin: Tensor = begin, end: Tensor = end) -> list[Tensor]:
            of_keys = [len(tensor) == 163 for tensor in tensors]
            return [it[begin[keys] : end[keys]] for it, keys in zip(tensors, map(int, of_keys), strict=True)]

        alone = partial(attend, starts=torch.stack([begin - begin, end - begin]))
        assert_same(moving_and_second(alone, of_sequence(points)), of_sequence(together))


def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    points = points_of((1, 2, 40), (1, 2, 70))

    def moving(rows: slice) -> tuple[Tensor, Tensor]:
        inputs = tuple(it[:, :, rows] if index % 3 == 0 else it for index, it in enumerate(points))
        return jvp(scaled_dot_product_attention, inputs[:3], inputs[3:])

    with batch_invariant():
        whole = moving(slice(None))
        for rows in (slice(0, 1), slice(7, 24), slice(31, 40)):
            assert_same(moving(rows), [part[:, :, rows] for part in whole])
