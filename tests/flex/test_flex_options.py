"""flex_attention: edges, the package's own options, block masks, other derivatives, refusals."""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import pytest
import torch
from functions import (
    ALL,
    Functions,
    assert_derivatives,
    assert_same,
    assert_same_dropout,
    assert_same_on_threads,
    flex_attention,
    formula,
    gradients,
    mask_of,
    options_of,
    tensors,
    without_compiler,
)
from test_flex_functions import check, judge
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, noop_mask

from selfattn_ext import backends
from selfattn_ext.flex import kernel_calls
from selfattn_ext.flex.tracing import trace

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 131])
@pytest.mark.parametrize("name", ["relative_bias", "documents"])
def test_lengths(name: str, length: int) -> None:
    for keys in (1, 63, 64, 65, 129):
        check(name, (1, 2, length, keys), torch.float64)


@pytest.mark.parametrize("isa", backends.cpu_isas())
def test_instruction_sets(isa: str) -> None:
    with backends.use_cpu_isa(isa):
        for name in ("relative_bias", "conjunction"):
            check(name, (2, 2, 70, 131))
            check(name, (2, 2, 70, 131), torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["of_queries_and_keys", "conjunction"])
def test_groups_of_heads(name: str, kv_heads: int) -> None:
    check(name, (2, 4, 67, 71), kv_heads=kv_heads)


OPTIONS = options_of(2)


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_pairs_of_options(pair: tuple[str, str]) -> None:
    check("conjunction", (2, 2, 67, 71), block_size=32, **OPTIONS[pair[0]], **OPTIONS[pair[1]])


def test_gradients_of_options() -> None:
    """The mask, the slopes and the sinks have gradients, besides the tensors that functions learn."""
    sizes = (2, 2, 35, 41)
    functions, given = ALL["relative_bias"](sizes, torch.float32), tensors(sizes)
    shapes = {"attn_mask": (2, 1, 35, 41), "alibi_slopes": (2,), "sinks": (2,)}
    options: dict[str, Any] = {name: torch.rand(shape, requires_grad=True) for name, shape in shapes.items()}
    functions.learned += options.values()
    options["softcap"] = 2.0
    judge("options", flex_attention(*given, functions.score_mod, **options), given, functions, **options)


def test_dropout_has_the_pattern_of_plain_attention() -> None:
    given = tensors((2, 2, 40, 50))
    out, weights = assert_same_dropout(functools.partial(flex_attention, *given))
    torch.testing.assert_close(out, weights @ given[2])


def test_statistics() -> None:
    sizes = (1, 2, 70, 90)
    functions = ALL["conjunction"](sizes, torch.float64)
    given = tensors(sizes, torch.float64)
    mask = mask_of(functions, sizes, 16)
    request = AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(*given, functions.score_mod, mask, return_aux=request)
    _, weights, lse = flex_attention(*given, functions.score_mod, mask, return_lse=True, return_weights=True)
    right = formula(*given, functions)
    torch.testing.assert_close(weights, right.weights)
    torch.testing.assert_close(lse, right.lse)
    torch.testing.assert_close(aux.lse, right.lse)
    largest = right.lse + right.weights.amax(-1).log()
    torch.testing.assert_close(aux.max_scores, largest)
    leaves = [*given[:2], *functions.learned]
    for result, expected in ((weights, right.weights), (lse, right.lse)):
        grads = (gradients(each, leaves, retain_graph=True) for each in (result, expected))
        torch.testing.assert_close(*grads)
    functions = ALL["conjunction"](sizes, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        rounded = [tensor.detach().to(dtype) for tensor in given]
        aux = flex_attention(*rounded, functions.score_mod, mask, return_aux=request)[1]
        assert aux.lse.dtype == aux.max_scores.dtype == torch.float32
        exactly, peer = (
            formula(*(tensor.to(of) for tensor in rounded), functions)
            for of in (torch.float64, torch.float32)
        )
        largest, other = (result.lse + result.weights.amax(-1).log() for result in (exactly, peer))
        assert_accurate("max_scores", aux.max_scores, largest.detach(), other.detach())


def test_what_is_hidden_may_be_nan() -> None:
    """Keys, values and learned numbers that no visible score reads change nothing."""
    sizes = (1, 2, 64, 70)
    functions = ALL["causal"](sizes, torch.float32)
    table = torch.randn(70)
    table[64:] = torch.nan
    table.requires_grad_()
    functions.score_mod = lambda score, b, h, q, kv: score + table[kv]
    given = tensors(sizes, torch.float32)
    clean = flex_attention(*given, functions.score_mod, mask_of(functions, sizes, 16))
    before = gradients(clean, given, [table])
    with torch.no_grad():
        given[1][:, :, 64:] = torch.nan
        given[2][:, :, 64:] = torch.inf
    out = flex_attention(*given, functions.score_mod, mask_of(functions, sizes, 16))
    assert_same([out, *gradients(out, given, [table])], [clean, *before])


def test_rows_that_see_nothing() -> None:
    query, key, value = tensors((1, 1, 20, 20), torch.float32)
    out, lse = flex_attention(
        query, key, value, lambda score, b, h, q, kv: torch.where(q < 3, -torch.inf, score), return_lse=True
    )
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()


@pytest.mark.parametrize("name", ["relative_bias", "swin_table", "temperature", "full_bias"])
def test_any_number_of_threads_gives_the_same_bits(name: str, one_thread: None) -> None:
    sizes = (2, 2, 300, 290)
    functions, given = ALL[name](sizes, torch.float32), tensors(sizes)

    def compute() -> list[Tensor]:
        out = flex_attention(*given, functions.score_mod)
        return [out, *gradients(out, given, functions.learned)]

    assert_same_on_threads(compute)


def test_elements_that_heads_share_in_other_places() -> None:
    """One head's element table[h, kv] is another head's element table[kv, h]."""
    table = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    functions = Functions(lambda s, b, h, q, kv: s + table[h, kv] * table[kv, h], learned=[table])
    given = tensors((2, 8, 300, 8), torch.float64)
    assert trace(functions.score_mod, None, torch.float64, torch.device("cpu"), True).exclusive == 0
    judge("shared", flex_attention(*given, functions.score_mod), given, functions)


def test_second_derivatives_are_those_of_the_formula() -> None:
    table = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, learned: Tensor) -> Tensor:
        return flex_attention(
            query, key, value, lambda s, b, h, q, kv: s * s * 0.3 + torch.tanh(learned)[h, q - kv + 4]
        )

    given = [tensor.detach()[..., :3].requires_grad_() for tensor in tensors((1, 2, 4, 5), torch.float64)]
    assert_derivatives(attend, given, table)


class TestWithoutCompiledFunctions:
    def test_the_same_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_compiler(monkeypatch)
        monkeypatch.setattr("selfattn_ext.flex.formula._SCORES_AT_ONCE", 2 * 2 * 71 * 10)
        with pytest.warns(UserWarning, match="no compiler today.*takes longer"):
            check("conjunction", (2, 2, 67, 71), block_size=32, window_size=(30, 20))

    def test_functions_of_more_than_numbers(self) -> None:
        """The function computes with rows of a tensor, such as places in space."""
        places = torch.randn(30, 3, dtype=torch.float64, requires_grad=True)
        functions = Functions(
            lambda s, b, h, q, kv: s - ((places[q] - places[kv]) ** 2).sum(-1), learned=[places]
        )
        given = tensors((1, 2, 30, 30), torch.float64)
        with pytest.warns(UserWarning, match="sub.Tensor makes more than a number"):
            out = flex_attention(*given, functions.score_mod)
        judge("places", out, given, functions)


class TestRefusals:
    given: ClassVar = [torch.randn(1, 2, 10, 8) for _ in range(3)]

    def test_decisions_in_python(self) -> None:
        with pytest.raises(ValueError, match=r"torch.where.*test_flex_options.py, line \d+: .*if q > kv"):
            flex_attention(*self.given, lambda s, b, h, q, kv: s if q > kv else s * 2)

    def test_more_than_one_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_calls, "_warned", set())
        with (
            pytest.warns(UserWarning, match="takes longer") as warned,
            pytest.raises(ValueError, match="one number"),
        ):
            flex_attention(*self.given, lambda s, b, h, q, kv: s + torch.ones(3))
        assert warned[0].filename == __file__

    @pytest.mark.parametrize(
        ("score_mod", "message"),
        [
            (lambda *a: None, "must return a tensor, but it returned NoneType"),
            (lambda s, b, h, q, kv: s + torch.ones(10, device="meta")[q], "on the query's device, cpu"),
            (lambda s, b, h, q, kv: s + torch.ones(0)[q], "without elements"),
        ],
    )
    def test_results_and_captured_tensors(self, score_mod: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            flex_attention(*self.given, score_mod)

    def test_indices_beside_a_tensor(self) -> None:
        table = torch.randn(9)
        with pytest.raises(IndexError, match="outside"):
            flex_attention(*self.given, lambda s, b, h, q, kv: s + table[q])
        hidden = flex_attention(
            *self.given, lambda s, b, h, q, kv: torch.where(q < 9, s + table[q], -torch.inf)
        )
        assert (hidden[:, :, 9] == 0).all()
        negative = flex_attention(*self.given, lambda s, b, h, q, kv: s + table[(q % 9) - 9])
        assert torch.equal(negative, flex_attention(*self.given, lambda s, b, h, q, kv: s + table[q % 9]))

    @pytest.mark.parametrize(
        "options",
        [{"attn_mask": torch.ones(10, 10, dtype=torch.bool).tril()}, {"is_causal": True}],
        ids=["attn_mask", "is_causal"],
    )
    def test_indices_beside_a_tensor_that_an_option_hides(self, options: dict[str, Any]) -> None:
        """The table has a number for each visible distance, then one more, then one less."""

        def attend(table: Tensor) -> Tensor:
            return flex_attention(*self.given, lambda s, b, h, q, kv: s + table[kv - q + 9], **options)

        table = torch.randn(11)
        assert torch.equal(attend(table[:10]), attend(table))
        with pytest.raises(IndexError, match="outside"):
            attend(table[:9])

    def test_arguments(self) -> None:
        query, key, value = self.given
        with pytest.raises(ValueError, match="query must be a tensor of four dimensions"):
            flex_attention(query[0], key[0], value[0])
        with pytest.raises(TypeError, match="score_mod must be a function"):
            flex_attention(query, key, value, torch.ones(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="BlockMask"):
            flex_attention(query, key, value, None, torch.ones(10, 10))
        with pytest.raises(ValueError, match="enable_gqa"):
            flex_attention(query, key[:, :1], value[:, :1])
        mask = create_block_mask(noop_mask, None, 3, 10, 10, device="cpu")
        with pytest.raises(ValueError, match="H = 3"):
            flex_attention(query, key, value, None, mask)
        mask = create_block_mask(noop_mask, None, None, 10, 10, device="cpu")
        bad = BlockMask.from_kv_blocks(
            mask.kv_num_blocks, mask.kv_indices, mask_mod=lambda b, h, q, kv: q, seq_lengths=(10, 10)
        )
        with pytest.raises(ValueError, match="mask function must return a bool"):
            flex_attention(query, key, value, None, bad)
