"""Statistics of the softmax (return_aux): what they are at the edges, and what they leave as it was.

test_options_pairwise.py judges them and their gradients with every pair of options.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import STATISTICS, Case, check
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from selfattn_ext import AuxOutput, AuxRequest, reference, scaled_dot_product_attention

EVERYTHING = AuxRequest(lse=True, max_scores=True, entropy=True, mean_score=True, key_weights=True)
ROWS = AuxRequest(lse=True, max_scores=True, entropy=True, mean_score=True)


def statistics(query: Tensor, key: Tensor, request: Any = EVERYTHING, **options: Any) -> Any:
    """Returns the statistics alone."""
    value = options.pop("value", key)
    return scaled_dot_product_attention(query, key, value, return_aux=request, **options)[-1]


def rows_of_scores(scores: Tensor) -> tuple[Tensor, Tensor, float]:
    """Returns query, key and scale whose scores (L, S) are these."""
    return scores.view(1, 1, *scores.shape), torch.eye(scores.size(1), dtype=scores.dtype)[None, None], 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.0, 3.0, -1e8, 1e8])
@pytest.mark.parametrize("queries", [1, 20])
def test_entropy_of_equal_scores(kernel: str, dtype: torch.dtype, score: float, queries: int) -> None:
    """It is log n to 2 units in the last place, however large the scores are and the row is."""
    keys = 100_000 if kernel == "fused" else 5_000
    query = torch.full((1, 1, queries, 1), score, dtype=dtype)
    aux = statistics(query, torch.ones(1, 1, keys, 1, dtype=dtype), ROWS, scale=1.0)
    exact = torch.full_like(aux.entropy, math.log(keys))
    unit = torch.finfo(dtype).eps * 2 ** math.floor(math.log2(math.log(keys)))
    assert float((aux.entropy - exact).abs().max()) <= 2 * unit
    assert torch.equal(aux.max_scores, torch.full_like(exact, score))
    torch.testing.assert_close(aux.mean_score, torch.full_like(exact, score), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e30])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("keys", [17, 1100])
def test_entropy_of_a_single_weight_is_zero(
    kernel: str, dtype: torch.dtype, size: float, queries: int, keys: int
) -> None:
    """It is 0 and not a small negative number, wherever the key stands that has all of the weight."""
    key = torch.full((1, 1, keys, 2), -1.0, dtype=dtype)
    key[0, 0, keys // 2] = 1.0
    query = torch.full((1, 1, queries, 2), size, dtype=dtype)
    aux = statistics(query, key, scale=1.0)
    assert torch.equal(aux.entropy, torch.zeros_like(aux.entropy))
    expected = torch.zeros(1, 1, keys, dtype=aux.key_weights.dtype)
    expected[..., keys // 2] = queries
    assert torch.equal(aux.key_weights, expected)
    assert torch.equal(aux.mean_score, aux.max_scores)


@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize("keys", [0, 9, 40])
@pytest.mark.parametrize("sink", [None, -math.inf, 0.5, 40.0])
def test_rows_that_see_nothing(kernel: str, queries: int, keys: int, sink: float | None) -> None:
    """They have entropy 0 and mean 0, no largest score, and give no key a weight; so have those of a sink."""
    query = torch.randn(1, 2, queries, 8, requires_grad=True)
    key = torch.randn(1, 2, keys, 8, requires_grad=True)
    sinks = None if sink is None else torch.full((2,), sink, requires_grad=True)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen[::2] = False
    aux = statistics(query, key, attn_mask=seen, sinks=sinks)
    exact = reference.score_statistics(query.double(), key.double(), seen, sinks=sinks)
    for name, ours, theirs in zip(aux._fields, aux, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5, msg=name)
    assert bool((aux.max_scores[..., ::2] == -math.inf).all())
    if sink is None or sink == -math.inf:
        assert bool((aux.entropy[..., ::2] == 0).all() and (aux.mean_score[..., ::2] == 0).all())
    total = sum(part.sum() for part in (aux.entropy, aux.mean_score, aux.key_weights))
    leaves = [query, key] if sinks is None else [query, key, sinks]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    assert all(bool(gradient.isfinite().all()) for gradient in found if gradient is not None)


def test_what_a_sink_takes_part_in() -> None:
    """In the weights, and with its share in the entropy; not in the largest score, nor in the mean."""
    query, key, scale = rows_of_scores(torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64))
    aux = statistics(query, key, scale=scale, sinks=torch.tensor([3.0]))
    scores = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    weights = scores.softmax(0)
    torch.testing.assert_close(aux.lse.item(), scores.logsumexp(0).item())
    assert aux.max_scores.item() == 2.0
    torch.testing.assert_close(aux.mean_score.item(), (weights[:3] * scores[:3]).sum().item())
    torch.testing.assert_close(aux.entropy.item(), -(weights * weights.log()).sum().item())
    torch.testing.assert_close(aux.key_weights.flatten(), weights[:3])


@pytest.mark.parametrize("length", [(1, 64), (4, 1024), (5, 1025), (63, 65), (64, 63), (65, 130), (200, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_around_tiles(kernel: str, length: tuple[int, int], dtype: torch.dtype) -> None:
    """Chunks, strips and tiles end everywhere."""
    queries, keys = length
    case = Case(1, 4, 2, queries, keys, 40, 8, dtype, is_causal=True, query_offset=max(keys - queries, 0))
    check(Case(**{**case.__dict__, "statistics": True, "sinks": 1}))


def test_hidden_keys_have_no_influence(kernel: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 70, 8).unbind()
    query, key = query[:, :, :50], key.clone()
    plain = statistics(query, key, value=value, is_causal=True)
    key[:, :, 50:], value[:, :, 50:] = math.nan, math.inf
    for before, after in zip(plain, statistics(query, key, value=value, is_causal=True), strict=True):
        assert torch.equal(before[..., :50], after[..., :50])
        assert bool((after[..., 50:] == 0).all())


def test_gradients_of_hidden_keys_have_no_influence(kernel: str) -> None:
    """The gradient of a key's sum of weights may be NaN where no query sees the key."""
    query, key = torch.randn(2, 1, 2, 40, 8).unbind()
    query = query[:, :, :30].clone().requires_grad_()
    of_keys = torch.randn(1, 2, 40)
    found = []
    for hidden in (0.0, math.nan):
        of_keys[..., 30:] = hidden
        sums = statistics(query, key, AuxRequest(key_weights=True), is_causal=True).key_weights
        found.append(torch.autograd.grad(sums, query, of_keys)[0])
    assert torch.equal(*found)


def test_a_not_a_number_that_is_seen_reaches_its_row_alone(kernel: str) -> None:
    query, key = torch.randn(2, 1, 1, 40, 8).unbind()
    query[0, 0, 7] = math.nan
    aux = statistics(query, key, ROWS)
    for name in ("entropy", "mean_score", "lse"):
        is_nan = getattr(aux, name)[0, 0].isnan()
        assert is_nan.nonzero().flatten().tolist() == [7], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [2, 200])
def test_the_output_has_the_same_bits(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """Asking for statistics changes no bit of out, of the log-sum-exp, and of gradients through them."""
    query, key, value = (torch.randn(1, 2, 300, 64).to(dtype).requires_grad_() for _ in range(3))
    sinks = torch.randn(2, requires_grad=True)
    given = (query[:, :, :queries], key, value)
    out, lse = scaled_dot_product_attention(*given, sinks=sinks, return_lse=True)
    again, aux = scaled_dot_product_attention(*given, sinks=sinks, return_aux=EVERYTHING)
    assert torch.equal(out, again)
    assert torch.equal(lse, aux.lse)
    leaves = (query, key, value, sinks)
    before = torch.autograd.grad((out, lse), leaves, (out, lse))
    after = torch.autograd.grad((again, aux.lse), leaves, (out, lse))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.cpu_only(reason="one thread launches all kernels of a GPU")
@pytest.mark.parametrize("queries", [3, 150])
def test_threads_change_no_bit(kernel: str, queries: int) -> None:
    query, key, value = (torch.randn(2, 4, 600, 24).requires_grad_() for _ in range(3))
    sinks = torch.randn(4, requires_grad=True)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        given = (query[:, :, :queries], key, value)
        out, aux = scaled_dot_product_attention(*given, sinks=sinks, return_aux=EVERYTHING)
        total = out.sum() + aux.entropy.sum() + (aux.mean_score * 0.3).sum() + aux.key_weights.square().sum()
        found.append([*aux, *torch.autograd.grad(total, (query, key, value, sinks))])
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_the_mean_is_the_derivative_of_the_log_sum_exp(kernel: str) -> None:
    """Where scores are products alone, their mean is the derivative of the log-sum-exp along the query."""
    query, key = torch.randn(2, 1, 2, 33, 16, dtype=torch.float64).unbind()
    query.requires_grad_()
    aux = statistics(query, key, ROWS, is_causal=True)
    (gradient,) = torch.autograd.grad(aux.lse.sum(), query)
    torch.testing.assert_close((gradient * query).sum(-1), aux.mean_score)
    torch.testing.assert_close(aux.entropy, aux.lse - aux.mean_score)


@pytest.mark.parametrize("name", ["lse", "entropy", "mean_score", "key_weights"])
def test_derivatives(name: str) -> None:
    """First and second ones against finite differences, forward mode, and slices of vmap."""
    request = AuxRequest(**{name: True})
    options: dict[str, Any] = {"is_causal": True, "softcap": 2.0, "enable_gqa": True}
    query, key = torch.randn(1, 2, 4, 3), torch.randn(1, 1, 5, 3)
    mask, sinks = torch.randn(4, 5), torch.randn(2)
    points = [part.double().requires_grad_() for part in (query, key, mask, sinks)]

    def compute(query: Tensor, key: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        aux = statistics(query, key, request, attn_mask=mask, sinks=sinks, query_offset=1, **options)
        result: Tensor = getattr(aux, name)
        return result

    assert torch.autograd.gradcheck(compute, points, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(compute, points)
    several = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    rest = [point.detach() for point in points[1:]]
    mapped = torch.func.vmap(lambda query: compute(query, *rest))(several)
    torch.testing.assert_close(mapped, torch.stack([compute(query, *rest) for query in several]))


def test_the_largest_score_has_no_gradient() -> None:
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    aux = statistics(query, query, STATISTICS)
    assert aux.entropy.requires_grad
    assert not aux.max_scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_heads_that_share_keys(kernel: str, dtype: torch.dtype) -> None:
    query, key = torch.randn(2, 6, 9, 8).to(dtype), torch.randn(2, 2, 20, 8).to(dtype)
    of_query_heads = statistics(query, key, AuxRequest(key_weights=True), enable_gqa=True).key_weights
    of_kv_heads = statistics(query, key, AuxRequest(key_weights="kv_heads"), enable_gqa=True).key_weights
    assert of_query_heads.shape == (2, 6, 20)
    assert of_kv_heads.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(of_kv_heads, of_query_heads.unflatten(1, (2, 3)).sum(2))
    torch.testing.assert_close(of_kv_heads.sum(-1), torch.full_like(of_kv_heads[..., 0], 27.0))


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (3, 1, 2, 5, 8)])
def test_forms_of_users(shape: tuple[int, ...]) -> None:
    query = torch.randn(shape)
    key = torch.randn(*shape[:-2], 7, 8)
    for name, part in (
        statistics(query, key, AuxRequest(True, True, True, True, "kv_heads"))._asdict().items()
    ):
        assert part.shape == (*shape[:-2], 7 if name == "key_weights" else 5), name


def test_what_a_call_returns() -> None:
    """Weights and the log-sum-exp come before the statistics; a request of torch's gets torch's class."""
    x = torch.randn(1, 2, 5, 8)
    results = scaled_dot_product_attention(
        x, x, x, return_weights=True, return_lse=True, return_aux=AuxRequest(entropy=True)
    )
    assert [type(each) for each in results] == [Tensor, Tensor, Tensor, AuxOutput]
    assert [part is None for part in results[-1]] == [True, True, False, True, True]
    _, aux = scaled_dot_product_attention(x, x, x, return_aux=AuxRequest())
    assert aux == AuxOutput()
    _, aux = scaled_dot_product_attention(x, x, x, return_aux=torchs.AuxRequest(max_scores=True))
    assert type(aux) is torchs.AuxOutput
    assert aux.lse is None
    torch.testing.assert_close(aux.max_scores, (x @ x.mT / 8**0.5).amax(-1))


@pytest.mark.parametrize("request_", [True, "entropy", {"entropy": True}])
def test_something_else_is_refused(request_: Any) -> None:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match="return_aux must be an AuxRequest"):
        scaled_dot_product_attention(x, x, x, return_aux=request_)


def test_a_flag_that_is_none_is_refused() -> None:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match='key_weights must be True, False or "kv_heads"'):
        scaled_dot_product_attention(x, x, x, return_aux=AuxRequest(key_weights="heads"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="entropy must be True or False, but it is 1"):
        scaled_dot_product_attention(x, x, x, return_aux=AuxRequest(entropy=1))  # type: ignore[arg-type]


def test_compiled_calls() -> None:
    def compute(query: Tensor, key: Tensor, sinks: Tensor) -> tuple[Tensor, Any]:
        out, aux = scaled_dot_product_attention(
            query, key, key, sinks=sinks, is_causal=True, return_aux=EVERYTHING
        )
        return out.sum() + aux.entropy.sum() + aux.key_weights.square().sum() - aux.mean_score.sum(), aux

    points = [torch.randn(2, 3, 9, 8), torch.randn(2, 3, 12, 8), torch.randn(3)]
    leaves = [point.requires_grad_() for point in points]
    total, aux = compute(*leaves)
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    again, same = compiled(*leaves)
    assert all(torch.equal(*pair) for pair in zip(aux, same, strict=True))
    for pair in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(again, leaves), strict=True):
        assert torch.equal(*pair)
