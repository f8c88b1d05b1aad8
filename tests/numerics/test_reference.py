"""The formula that judges everything else, against torch's attention and published numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from selfattn_ext import masks, reference


def inputs(*shapes: tuple[int, ...], requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_torch(is_causal: bool, kv_heads: int) -> None:
    query, key, value = inputs((2, 4, 7, 5), (2, kv_heads, 7, 5), (2, kv_heads, 7, 3))
    result = reference.attention(query, key, value, is_causal=is_causal)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(result.out, expected)
    torch.testing.assert_close(result.weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))


def test_masks_equal_torch() -> None:
    query, key, value = inputs((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    seen = torch.rand(5, 6) < 0.6
    seen[:, 0] = True
    torch.testing.assert_close(
        reference.attention(query, key, value, seen).out,
        F.scaled_dot_product_attention(query, key, value, seen),
    )
    (bias,) = inputs((3, 5, 6))
    torch.testing.assert_close(
        reference.attention(query, key, value, bias).out,
        F.scaled_dot_product_attention(query, key, value, bias),
    )


def test_two_and_three_dimensions() -> None:
    query, key, value = inputs((3, 5, 4), (3, 6, 4), (3, 6, 2))
    full = reference.attention(query[None], key[None], value[None])
    for part, whole in zip(reference.attention(query, key, value), full, strict=True):
        assert torch.equal(part, whole[0])
    for part, whole in zip(reference.attention(query[0], key[0], value[0]), full, strict=True):
        torch.testing.assert_close(part, whole[0, 0])


def test_options_as_written_in_the_module() -> None:
    query, key, value = inputs((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3))
    slopes, sinks = torch.tensor([0.5, 0.25]).double(), torch.tensor([0.3, -0.2]).double()
    result = reference.attention(
        query,
        key,
        value,
        scale=0.7,
        softcap=1.3,
        alibi_slopes=slopes,
        sinks=sinks,
        window_size=(2, 1),
        query_offset=1,
    )
    for b in range(2):
        for h in range(2):
            for i in range(4):
                scores = {}
                for j in range(5):
                    if i + 1 - 2 <= j <= i + 1 + 1:
                        s = 0.7 * float(query[b, h, i] @ key[b, h, j])
                        scores[j] = 1.3 * math.tanh(s / 1.3) - float(slopes[h]) * abs(i + 1 - j)
                total = sum(map(math.exp, scores.values())) + math.exp(float(sinks[h]))
                assert float(result.lse[b, h, i]) == pytest.approx(math.log(total))
                for j in range(5):
                    weight = math.exp(scores[j]) / total if j in scores else 0.0
                    assert float(result.weights[b, h, i, j]) == pytest.approx(weight)


def test_derivatives_of_the_formula() -> None:
    tensors = inputs((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2), (2, 3, 4), (2,), (2,), requires_grad=True)

    def outputs(query, key, value, mask, slopes, sinks):
        return reference.attention(
            query,
            key,
            value,
            mask,
            softcap=2.0,
            alibi_slopes=slopes,
            sinks=sinks,
            window_size=(2, 1),
            dropout_p=0.3,
            dropout_seed=torch.tensor([7]),
        )

    assert torch.autograd.gradcheck(outputs, tensors, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


def test_hidden_nan_has_no_influence() -> None:
    query, key, value = inputs((1, 1, 4, 3), (1, 1, 5, 3), (1, 1, 5, 3))
    seen = torch.ones(4, 5, dtype=torch.bool)
    seen[:, 2] = False
    seen[3] = False
    clean = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected = reference.attention(*clean, seen)
    query[0, 0, 3] = key[0, 0, 2] = value[0, 0, 2] = torch.nan
    dirty = [tensor.requires_grad_() for tensor in (query, key, value)]
    result = reference.attention(*dirty, seen)
    for part, whole in zip(result, expected, strict=True):
        torch.testing.assert_close(part, whole)
    grads = torch.autograd.grad(result.out.square().sum(), dirty)
    for part, whole in zip(grads, torch.autograd.grad(expected.out.square().sum(), clean), strict=True):
        torch.testing.assert_close(part, whole)


def test_row_that_sees_nothing() -> None:
    query, key, value = inputs((1, 1, 2, 3), (1, 1, 4, 3), (1, 1, 4, 3), requires_grad=True)
    seen = torch.tensor([[True] * 4, [False] * 4])
    out, weights, lse = reference.attention(query, key, value, seen)
    assert not out[0, 0, 1].any()
    assert not weights[0, 0, 1].any()
    assert lse[0, 0, 1] == -torch.inf
    (grad,) = torch.autograd.grad(out.sum() + lse[0, 0, 0], query)
    assert not grad[0, 0, 1].any()
    assert grad.isfinite().all()


def test_philox_published_vectors() -> None:
    """Random123, the authors' library, publishes these known answers for philox4x32."""

    def words(counter: int, key: int, rounds: int) -> list[int]:
        c, k = (torch.tensor([value & 0xFFFFFFFF]) for value in (counter, key))
        return [int(word) for word in reference.philox4x32((c, c, c, c), (k, k), rounds)]

    assert words(0, 0, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert words(0, 0, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(-1, -1, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropout_pattern() -> None:
    seed = torch.tensor([-123456789])
    keep = reference.dropout_keep(seed, 0.25, (2, 3, 40, 101))
    assert keep.shape == (2, 3, 40, 101)
    # Batch elements, heads and rows have different patterns.
    for first, second in ((keep[0], keep[1]), (keep[:, 0], keep[:, 1]), (keep[:, :, 0], keep[:, :, 1])):
        assert not torch.equal(first, second)
    assert float(keep.double().mean()) == pytest.approx(0.75, abs=0.01)
    # The pattern of a pair depends neither on the size of the batch nor on the number of keys.
    assert torch.equal(reference.dropout_keep(seed, 0.25, (1, 2, 7, 50)), keep[:1, :2, :7, :50])
    assert not reference.dropout_keep(seed, 1.0, (1, 1, 8, 8)).any()
    assert reference.dropout_keep(seed, 0.0, (1, 1, 8, 8)).all()


def test_visible_rules() -> None:
    causal = masks.Causal(query_offset=1).visible(3, 4)
    assert causal.tolist() == [[True, True, False, False], [True, True, True, False], [True] * 4]
    window = masks.Window(left=1, right=0, query_offset=1).visible(3, 4)
    assert window.tolist() == [[j in (i, i + 1) for j in range(4)] for i in range(3)]
    assert masks.Window().visible(2, 2).all()
    assert masks.visible_pairs(3, 4) is None
    both = masks.visible_pairs(3, 4, is_causal=True, window_size=(1, 3), query_offset=1)
    assert torch.equal(both, window)


def test_alibi_slopes_of_the_paper() -> None:
    assert masks.alibi_head_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert masks.alibi_head_slopes(1) == (2.0**-8,)
    twelve = masks.alibi_head_slopes(12)
    assert twelve[:8] == masks.alibi_head_slopes(8)
    assert twelve[8:] == tuple(2.0**-n for n in (0.5, 1.5, 2.5, 3.5))
    with pytest.raises(ValueError, match="num_heads"):
        masks.alibi_head_slopes(0)


def test_rules_say_how_to_ask_for_them() -> None:
    query, key, value = inputs((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    for rule in (masks.Causal(1), masks.Window(2, 1, query_offset=1)):
        result = reference.attention(query, key, value, **rule.options()).out
        torch.testing.assert_close(result, reference.attention(query, key, value, rule.visible(5, 6)).out)
    rule = masks.Alibi.for_heads(2, query_offset=1)
    result = reference.attention(query, key, value, **rule.options()).out
    bias = rule.bias(5, 6, dtype=torch.float64)
    torch.testing.assert_close(result, reference.attention(query, key, value, bias).out)


def test_softmax_and_scores() -> None:
    (scores,) = inputs((2, 3, 4, 5))
    keep = torch.rand(4, 5) < 0.7
    keep[2] = False
    result = reference.masked_softmax(scores, keep, scale=0.5)
    expected = (scores * 0.5).masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(result, expected)
    query, key = inputs((2, 4, 3, 8), (2, 2, 5, 8))
    expected = query @ key.repeat_interleave(2, dim=1).mT / math.sqrt(8)
    torch.testing.assert_close(reference.attention_scores(query, key), expected)
