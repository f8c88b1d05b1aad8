"""MultiheadAttention against torch.nn.MultiheadAttention with the same parameters."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from option_pairs import covering
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext.nn import MultiheadAttention

EMBED, HEADS, LENGTH, SOURCE, BATCH = 12, 4, 5, 7, 3

OPTIONS: dict[str, list[Any]] = {
    "layout": ["batch_first", "sequence_first", "unbatched"],
    "inputs": ["self", "shared", "separate", "kdim_vdim"],
    "bias": [True, False],
    "add_bias_kv": [False, True],
    "add_zero_attn": [False, True],
    "attn_mask": ["none", "bool", "float", "bool_per_head", "float_per_head", "causal_bool", "causal_float"],
    "key_padding_mask": ["none", "bool", "float"],
    "weights": ["none", "average", "per_head"],
    "mode": ["train", "eval", "eval_no_grad"],
    "dtype": [torch.float64, torch.float32],
}


def name_of(case: dict[str, Any]) -> str:
    return "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in case.items())


def make_pair(**options: Any) -> tuple[MultiheadAttention, torch.nn.MultiheadAttention]:
    options = {"embed_dim": EMBED, "num_heads": HEADS, **options}
    ours, theirs = MultiheadAttention(**options), torch.nn.MultiheadAttention(**options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def make_masks(case: dict[str, Any], source: int) -> tuple[Tensor | None, Tensor | None]:
    """Draws masks with a visible key in each row, as torch's own result is NaN otherwise."""
    batch = 1 if case["layout"] == "unbatched" else BATCH
    dtype = case["dtype"]
    attn_mask: Tensor | None = None
    kind = case["attn_mask"]
    if kind != "none":
        shape = (batch * HEADS, LENGTH, source) if kind.endswith("per_head") else (LENGTH, source)
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        added = torch.randn(shape, dtype=dtype)
        if kind.startswith("causal"):
            hidden, added = torch.ones(shape, dtype=torch.bool).triu(1), torch.zeros(shape, dtype=dtype)
        attn_mask = added.masked_fill(hidden, -math.inf) if "float" in kind else hidden

    padding: Tensor | None = None
    if case["key_padding_mask"] != "none":
        padding = torch.arange(source) >= torch.randint(2, source + 1, (batch, 1))
        if case["key_padding_mask"] == "float":
            padding = torch.randn(batch, source, dtype=dtype).masked_fill(padding, -math.inf)
        if case["layout"] == "unbatched":
            padding = padding[0]
    return attn_mask, padding


def make_inputs(case: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Draws the different tensors among query, key and value; returns them and S."""
    widths = {"self": [EMBED], "shared": [EMBED] * 2, "separate": [EMBED] * 3, "kdim_vdim": [EMBED, 5, 9]}
    source = LENGTH if case["inputs"] == "self" else SOURCE
    tensors = []
    for i, width in enumerate(widths[case["inputs"]]):
        length = LENGTH if i == 0 else source
        lead = {"batch_first": (BATCH, length), "sequence_first": (length, BATCH), "unbatched": (length,)}
        tensors.append(torch.randn(*lead[case["layout"]], width, dtype=case["dtype"]))
    return tensors, source


def widen(mask: Tensor | None) -> Tensor | None:
    return mask.double() if mask is not None and mask.is_floating_point() else mask


def run(
    module: torch.nn.Module, tensors: list[Tensor], masks: tuple[Any, Any], case: dict[str, Any]
) -> dict[str, Any]:
    """Computes output, weights and, if the mode has them, gradients of inputs, parameters and float mask."""
    has_grad = case["mode"] != "eval_no_grad"
    tensors = [tensor.clone().requires_grad_(has_grad) for tensor in tensors]
    attn_mask, padding = masks
    if has_grad and attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.clone().requires_grad_()
    query, key, value = (tensors + [tensors[-1]] * 2)[:3]
    module.train(case["mode"] == "train")
    with torch.set_grad_enabled(has_grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        out, weights = module(
            query, key, value, padding, case["weights"] != "none", attn_mask, case["weights"] == "average"
        )
    result: dict[str, Any] = {"out": out, "weights": weights}
    if has_grad:
        loss = sum(
            (part * torch.linspace(-1, last, part.numel(), dtype=out.dtype).view(part.shape)).sum()
            for part, last in ((out, 1), (weights, 2))
            if part is not None
        )
        leaves = {f"input {i}": tensor for i, tensor in enumerate(tensors)} | dict(module.named_parameters())
        if attn_mask is not None and attn_mask.requires_grad:
            leaves["attn_mask"] = attn_mask
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        result |= {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return result


@pytest.mark.parametrize("case", covering(OPTIONS), ids=name_of)
def test_agrees_with_torch(case: dict[str, Any]) -> None:
    kdim, vdim = (5, 9) if case["inputs"] == "kdim_vdim" else (None, None)
    ours, theirs = make_pair(
        bias=case["bias"],
        add_bias_kv=case["add_bias_kv"],
        add_zero_attn=case["add_zero_attn"],
        kdim=kdim,
        vdim=vdim,
        batch_first=case["layout"] == "batch_first",
        dtype=case["dtype"],
    )
    tensors, source = make_inputs(case)
    masks = make_masks(case, source)
    actual, peer = run(ours, tensors, masks, case), run(theirs, tensors, masks, case)
    assert actual.keys() == peer.keys()
    exact = run(theirs.double(), [t.double() for t in tensors], [widen(mask) for mask in masks], case)
    assert (actual["weights"] is None) == (exact["weights"] is None)
    for name in exact:
        if exact[name] is not None:
            assert_accurate(name, actual[name].detach(), exact[name].detach(), peer[name].detach())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("give_mask", [False, True])
def test_is_causal(weights: bool, padding: bool, extra: dict[str, bool], give_mask: bool) -> None:
    """With the hint the result is that of the causal mask, with and without this mask."""
    ours, theirs = make_pair(dtype=torch.float64, **extra)
    x = torch.randn(LENGTH, BATCH, EMBED, dtype=torch.float64)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    hidden = torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]]) if padding else None
    expected = theirs(x, x, x, hidden, weights, mask)
    actual = ours(x, x, x, hidden, weights, mask if give_mask else None, is_causal=True)
    torch.testing.assert_close(actual, expected)
    if give_mask and not extra:
        torch.testing.assert_close(actual, theirs(x, x, x, hidden, weights, mask, is_causal=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 5, "vdim": 9}, {"kdim": 5, "add_bias_kv": True}],
    ids=str,
)
def test_parameters_are_those_of_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    ours = MultiheadAttention(EMBED, HEADS, **options)
    torch.manual_seed(2)
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.MultiheadAttention)


def test_dropout_weights_are_those_that_were_used() -> None:
    ours = MultiheadAttention(EMBED, HEADS, dropout=0.25, dtype=torch.float64, batch_first=True)
    x = torch.randn(2, 40, EMBED, dtype=torch.float64)
    out, dropped = ours(x, x, x, average_attn_weights=False)
    kept = ours.eval()(x, x, x, average_attn_weights=False)[1]
    is_dropped = dropped == 0
    assert 0.2 < is_dropped.double().mean().item() < 0.3
    torch.testing.assert_close(dropped, torch.where(is_dropped, 0.0, kept / 0.75))
    value = torch.nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias)[..., 2 * EMBED :]
    value = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    torch.testing.assert_close(out, ours.out_proj((dropped @ value).transpose(1, 2).flatten(2)))


def test_dropout_follows_the_seed() -> None:
    ours = MultiheadAttention(EMBED, HEADS, dropout=0.5)
    x = torch.randn(6, 2, EMBED)

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(x, x, x, need_weights=False)[0]

    assert torch.equal(once(0), once(0))
    assert not torch.equal(once(0), once(1))


@pytest.mark.parametrize("need_weights", [False, True])
def test_wholly_hidden_query_gets_zeros(need_weights: bool) -> None:
    ours, _ = make_pair()
    x = torch.randn(LENGTH, 2, EMBED, requires_grad=True)
    hidden = torch.tensor([[True] * LENGTH, [False] * LENGTH])
    out, weights = ours(x, x, x, hidden, need_weights)
    torch.testing.assert_close(out[:, 0], ours.out_proj.bias.expand(LENGTH, EMBED))
    if weights is not None:
        assert torch.equal(weights[0], torch.zeros(LENGTH, LENGTH))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.equal(x.grad[:, 0], torch.zeros(LENGTH, EMBED))


def test_hidden_keys_may_hold_anything() -> None:
    ours, _ = make_pair()
    x = torch.randn(LENGTH, 1, EMBED)
    hidden = torch.tensor([[False, False, False, True, True]])
    clean = ours(x[:2], x, x, hidden)
    spoiled = x.clone()
    spoiled[3:] = math.nan
    torch.testing.assert_close(ours(x[:2], spoiled, spoiled, hidden), clean, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("length", [0, 1])
def test_empty_and_single_keys(length: int) -> None:
    ours = MultiheadAttention(EMBED, HEADS)
    query, key = torch.randn(3, 2, EMBED), torch.randn(length, 2, EMBED)
    out, weights = ours(query, key, key)
    assert weights is not None
    assert weights.shape == (2, 3, length)
    if length == 0:
        torch.testing.assert_close(out, ours.out_proj.bias.expand(3, 2, EMBED))
    assert ours(query[:0], key, key)[0].shape == (0, 2, EMBED)


@pytest.mark.cpu_only("torch takes nested tensors on its fast path alone, which set_default_device shuts")
def test_nested_inputs() -> None:
    ours, theirs = make_pair(batch_first=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        x = torch.nested.nested_tensor([torch.randn(3, EMBED), torch.randn(5, EMBED)])
    with torch.no_grad():
        actual, expected = (m.eval()(x, x, x, need_weights=False)[0].unbind() for m in (ours, theirs))
    torch.testing.assert_close(actual, expected)
    grouped = MultiheadAttention(EMBED, HEADS, num_kv_heads=2, batch_first=True).eval()
    with pytest.raises(ValueError, match="nested"):
        grouped(x, x, x)
