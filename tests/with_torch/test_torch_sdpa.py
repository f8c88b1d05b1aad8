"""torch.nn.attention.activate_flash_attention_impl("selfattn_ext"), and its reversal."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ran
import torch
import torch.nn.functional as F
import warm
from cases import DTYPES, NAMES, normal
from test_sdpa_mode import results_of, run
from tolerances import assert_accurate
from torch import Tensor
from torch.nn import attention

import selfattn_ext
from selfattn_ext import ops
from selfattn_ext.integrations import aten_multihead, torch_sdpa


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def qkv() -> list[Tensor]:
    return [normal(2, 4, 9, 16, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "float mask", "grouped"])
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Both passes run on our kernels, or one of them on torch's."""
    exact, peer = run(name, torch.float64, dtype), run(name, dtype, dtype)
    for ours in ((ran.activated, ran.activated), (ran.activated, nullcontext), (nullcontext, ran.activated)):
        for what, result in run(name, dtype, dtype, *ours).items():
            assert_accurate(what, result, exact[what], peer[what], 4.0)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -10000.0])
@pytest.mark.parametrize("switch", [ran.activated, selfattn_ext.as_sdpa])
def test_rows_hidden_by_low_numbers(switch: Any, low: float) -> None:
    """Masks of other libraries hide by finite numbers; a row of only these weighs its keys equally."""
    tensors = [tensor.requires_grad_() for tensor in qkv()]
    mask = torch.zeros(9, 9)
    mask[3], mask[:, 7] = low, low

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        query, key, value = (tensor.to(dtype) for tensor in tensors)
        scores = (0.25 * (query @ key.mT).float() + mask).to(dtype)  # rounded to float32
        return torch.autograd.grad((F.softmax(scores, -1) @ value).square().sum(), tensors)

    with switch():
        ours = torch.autograd.grad(F.scaled_dot_product_attention(*tensors, mask).square().sum(), tensors)
    exact, peers = gradients(torch.float64), gradients(torch.float32)
    for name, result, *judges in zip(("query", "key", "value"), ours, exact, peers, strict=True):
        assert_accurate(name, result, *judges, 4.0)


def test_mask_and_causal_rule_together() -> None:
    """torch 2.13 sends such calls to the operator, but 2.14 refuses them before."""
    query, key, value = qkv()
    mask = normal(9, 9)
    both = mask.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    expected = operator(query, key, value, attn_mask=both)
    with ran.activated():
        results = operator(query, key, value, 0.0, True, attn_mask=mask)
    torch.testing.assert_close(results, expected)


def training_step() -> None:
    F.scaled_dot_product_attention(*(tensor.requires_grad_() for tensor in qkv())).sum().backward()


def test_our_kernels_run_until_restored() -> None:
    assert ran.ours(training_step) == (0, 0)
    torchs = run("causal", torch.float32, torch.float32)
    for _ in range(2):
        attention.activate_flash_attention_impl("selfattn_ext")
        attention.activate_flash_attention_impl("selfattn_ext")
        assert attention.current_flash_attention_impl() == "selfattn_ext"
        assert ran.ours(training_step) == (1, 1)
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        assert ran.ours(training_step) == (0, 0)
        after = run("causal", torch.float32, torch.float32)
        assert all(torch.equal(after[name], torchs[name]) for name in torchs)


def test_an_activation_that_fails_leaves_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_sdpa.aten_multihead.OPERATORS, "no_such_operator", None)
    with pytest.raises(RuntimeError):
        attention.activate_flash_attention_impl("selfattn_ext")
    assert ran.ours(training_step) == (0, 0)
    assert attention.current_flash_attention_impl() is None


def test_removing_twice_does_nothing() -> None:
    first = torch_sdpa.activate()
    assert ran.ours(training_step) == (1, 1)
    first.remove()
    assert ran.ours(training_step) == (0, 0)
    with ran.activated():
        first.remove()
        assert ran.ours(training_step) == (1, 1)


def test_import_registers_the_name_and_activating_warns_of_nothing() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import selfattn_ext; "
        "from torch.nn import attention; "
        "assert 'selfattn_ext' in attention.list_flash_attention_impls(); "
        "assert attention.current_flash_attention_impl() is None; "
        "print(*(m for m in set(sys.modules) - before if m.split('.')[0] == 'torch')); "
        "attention.activate_flash_attention_impl('selfattn_ext'); q = torch.ones(1, 1, 4, 8); "
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)"
    )
    done = warm.python(code, Path.cwd(), os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert not {"torch._dynamo", "torch._inductor"} & set(done.stdout.split())


def test_it_holds_for_every_thread() -> None:
    counted: list[tuple[int, int]] = []
    with ran.activated():
        thread = threading.Thread(target=lambda: counted.append(ran.ours(training_step)))
        thread.start()
        thread.join()
    assert counted == [(1, 1)]


def test_calls_for_the_formula_stay_torchs() -> None:
    query, key, value = qkv()
    mask = normal(9, 9).requires_grad_()
    with ran.activated():
        for call in (
            lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.5),
            lambda: F.scaled_dot_product_attention(query, key, value, mask),
            lambda: F.scaled_dot_product_attention(query, key, value[..., :3]),
        ):
            assert ran.ours(call) == (0, 0)


def test_what_the_kernels_refuse_is_torchs() -> None:
    """torch's kernel computes calls that ours refuse, such as a negative dropout_p or a NaN scale."""
    query, key, value = qkv()
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for options in ({"dropout_p": -0.5}, {"scale": float("nan")}):
        results = []
        for ours in (False, True):
            with ran.activated(ours):
                results.append(results_of(lambda options=options: operator(query, key, value, **options)[0]))
        if isinstance(results[0], Tensor):
            assert torch.equal(*results) or all(result.isnan().any() for result in results)
        else:
            assert results[0] == results[1]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_shapes_and_strides_are_those_that_compiled_code_expects(order: tuple[int, ...]) -> None:
    inverse = tuple(order.index(dim) for dim in range(4))
    query = normal(2, 4, 9, 16).permute(order).contiguous().permute(inverse)
    key, value = normal(2, 2, 7, 16), normal(2, 2, 7, 16).transpose(1, 2).contiguous().transpose(1, 2)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with ran.activated():
            inputs = [tensor.to(dtype) for tensor in (query, key, value)]
            results = forward(*inputs)
            grads = backward(results[0], *inputs, *results, 0.0, False)
        meta = [tensor.to("meta") for tensor in inputs]
        promised = forward(*meta)
        promised_grads = backward(promised[0], *meta, *promised, 0.0, False)
        for result, wanted in zip((*results, *grads), (*promised, *promised_grads), strict=True):
            assert result.shape == wanted.shape
            assert result.stride() == wanted.stride()
            assert result.dtype == wanted.dtype


def encoder(**options: Any) -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, **options)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


SWITCHES = [pytest.param(ran.activated, id="activated"), pytest.param(selfattn_ext.as_sdpa, id="as_sdpa")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder(switch: Any, padded: bool) -> None:
    model, tokens = encoder(), normal(2, 5, 16)
    padding = PADDING if padded else None

    def train() -> Tensor:
        model.train()
        model.zero_grad()
        out = model(tokens, src_key_padding_mask=padding)
        out[~PADDING].sum().backward()
        return out.detach()

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(tokens, src_key_padding_mask=padding)

    expected, grads = train(), [parameter.grad for parameter in model.parameters()]
    with switch():
        torch.testing.assert_close(train(), expected)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert ran.ours(train) == (2, 2)
    expected = evaluate()
    with switch():
        torch.testing.assert_close(evaluate(), expected)
        assert ran.ours(evaluate)[0] == (4 if padded else 2)  # nested tensors: one by one
    assert ran.ours(evaluate) == (0, 0)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "square", "both", "per head"])
def test_multihead_attention_in_evaluation(switch: Any, need_weights: bool, masks: str) -> None:
    """torch's fast path contains its own attention."""
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    tokens = normal(2, 5, 16)
    square = torch.ones(5, 5, dtype=torch.bool).triu(1)
    options: dict[str, Any] = {"need_weights": need_weights}
    if masks in ("padding", "both"):
        options["key_padding_mask"] = PADDING
    if masks in ("square", "both"):
        options["attn_mask"] = square
    if masks == "per head":
        options["attn_mask"] = square.expand(4, 5, 5)

    def call() -> Any:
        with torch.no_grad():
            return model(tokens, tokens, tokens, **options)

    expected = call()
    with switch():
        results = call()
        assert ran.ours(call)[0] >= 1
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize(("shape", "mask_type"), [((5, 5), 0), ((2, 5), 1), ((2, 2, 5, 5), 2)])
def test_masks_of_the_fast_path_are_not_refused(shape: tuple[int, ...], mask_type: int) -> None:
    """A refusal would go unnoticed, as torch would then compute the result."""
    tokens, weights = normal(2, 5, 16), normal(48, 16, seed=1)
    mask = normal(*shape, seed=2) > 0.5
    arguments = (tokens, tokens, tokens, 16, 2, weights, weights[:, 0], weights[:16], weights[0], mask)
    results = aten_multihead.multi_head_attention(*arguments, mask_type=mask_type)
    expected = torch.ops.aten._native_multi_head_attention(*arguments, mask_type=mask_type)
    torch.testing.assert_close(results, tuple(expected))


def test_compiled_code_follows_the_switch() -> None:
    compiled = torch.compile(
        lambda query: F.scaled_dot_product_attention(query, 2 * query, query), backend="aot_eager"
    )

    def step() -> None:
        compiled(normal(2, 4, 9, 16).requires_grad_()).sum().backward()

    step()
    assert ran.ours(step) == (0, 0)
    with ran.activated():
        assert ran.ours(step) == (1, 1)
    assert ran.ours(step) == (0, 0)


def test_checkpointing_and_autocast() -> None:
    model, tokens = encoder(), normal(2, 5, 16)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=False)
        out.sum().backward()

    with ran.activated():
        assert ran.ours(step) == (4, 2)


def test_a_forced_kernel_is_taken() -> None:
    with ran.activated(), selfattn_ext.backends.use("loops"):
        out = F.scaled_dot_product_attention(*qkv())
    with selfattn_ext.backends.use("loops"):
        assert torch.equal(out, ops.attention_forward(*qkv(), 0.25, kernel_name="loops")[0])
