"""MultiheadAttention inside torch's transformer layers, copied, subclassed, in 16 bits."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import gpu
import pytest
import torch
from ran import operators
from test_multihead_attention import BATCH, EMBED, HEADS, LENGTH, SOURCE, make_pair
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext.nn import MultiheadAttention

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


def make_layers(**options: Any) -> tuple[torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoderLayer]:
    """Returns torch's encoder layer with our attention in it, and the unchanged layer."""
    theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 24, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    ours.self_attn = MultiheadAttention(EMBED, HEADS, batch_first=True, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_encoder_layer_trains_alike() -> None:
    ours, theirs = make_layers()
    x = torch.randn(BATCH, LENGTH, EMBED)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
    padding = torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]])
    for options in ({}, {"src_mask": mask, "is_causal": True}, {"src_key_padding_mask": padding}):
        gradients = []
        for layer in (ours, theirs):
            out = layer(x, **options)
            gradients.append((out, torch.autograd.grad(out.square().sum(), list(layer.parameters()))))
        torch.testing.assert_close(gradients[0], gradients[1], **FLOAT32)


@pytest.mark.cpu_only("torch.set_default_device shuts torch's fast path")
def test_encoder_layer_fast_path() -> None:
    """In eval mode torch computes the plain layer from its parameters, but no layer with our options."""
    x = torch.randn(BATCH, LENGTH, EMBED)
    ours, theirs = make_layers()

    def takes_fast_path() -> bool:
        with torch.no_grad():
            return "aten::_transformer_encoder_layer_fwd" in operators(lambda: ours.eval()(x))

    assert takes_fast_path()
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **FLOAT32)
    for heads, options in ((2, {"rotary": True}), (4, {"window_size": (1, 0)}), (4, {"num_kv_heads": 2})):
        ours.self_attn = MultiheadAttention(EMBED, heads, batch_first=True, **options)
        assert not takes_fast_path()
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(x), ours.train()(x), **FLOAT32)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_encoder_and_decoder_stacks(mode: str) -> None:
    theirs = torch.nn.Transformer(EMBED, HEADS, 2, 2, 24, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    for module in list(ours.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.MultiheadAttention):
                setattr(module, name, MultiheadAttention(EMBED, HEADS, batch_first=True))
    ours.load_state_dict(theirs.state_dict())
    source, target = torch.randn(BATCH, SOURCE, EMBED), torch.randn(BATCH, LENGTH, EMBED)
    options = {
        "tgt_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.arange(SOURCE) >= torch.tensor([[7], [4], [5]]),
        "memory_key_padding_mask": torch.arange(SOURCE) >= torch.tensor([[7], [4], [5]]),
    }
    with torch.set_grad_enabled(mode == "train"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        actual, expected = (
            model.train(mode == "train")(source, target, **options) for model in (ours, theirs)
        )
    torch.testing.assert_close(actual, expected, **FLOAT32)


class Named(MultiheadAttention):
    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = name


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_and_subclasses(copy_of: Callable[[Any], Any]) -> None:
    module = Named("mine", 16, HEADS, num_kv_heads=2, rotary=True, window_size=(3, 0), add_bias_kv=False)
    x = torch.randn(6, 2, 16)
    expected = module(x, x, x)
    twin = copy_of(module)
    assert twin.name == "mine"
    assert repr(twin) == repr(module)
    torch.testing.assert_close(twin(x, x, x), expected, rtol=0, atol=0)
    assert all(a is not b for a, b in zip(twin.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit(dtype: torch.dtype) -> None:
    ours, theirs = make_pair(dtype=dtype)
    x = torch.randn(10, 2, EMBED, dtype=dtype)
    actual, peer = ours(x, x, x), theirs(x, x, x)
    exact = theirs.double()(*[x.double()] * 3)
    for name, *results in zip(["out", "weights"], actual, exact, peer, strict=True):
        assert results[0].dtype == dtype
        assert_accurate(name, *(result.detach() for result in results))


def test_autocast() -> None:
    ours, theirs = make_pair(batch_first=True, add_bias_kv=True)
    x = torch.randn(2, 6, EMBED)
    padding = torch.zeros(2, 6).masked_fill(torch.arange(6) > 3, -math.inf)
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        actual, peer = (m(x, x, x, padding, need_weights=False)[0].detach() for m in (ours, theirs))
    exact = theirs.double()(*[x.double()] * 3, padding.double(), need_weights=False)[0].detach()
    assert actual.dtype == peer.dtype == torch.bfloat16
    assert_accurate("out", actual, exact, peer)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": True, "window_size": (2, 0)}], ids=str)
def test_compiles_without_a_graph_break(options: dict[str, Any]) -> None:
    module = MultiheadAttention(16, HEADS, **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(LENGTH, BATCH, 16)
    hidden = torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]])
    actual, expected = (m(x, x, x, hidden) for m in (compiled, module))
    torch.testing.assert_close(actual, expected)
    losses = (actual[0].square().sum(), expected[0].square().sum())
    torch.testing.assert_close(*(torch.autograd.grad(loss, module.parameters()) for loss in losses))


def test_functional_transforms() -> None:
    """vmap computes an ensemble, and vmap of grad computes the gradients of each sample."""
    modules = [MultiheadAttention(16, HEADS, batch_first=True) for _ in range(3)]
    x = torch.randn(BATCH, LENGTH, 16)

    def apply(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(modules[0], parameters, (x, x, x))[0]

    parameters, _ = torch.func.stack_module_state(modules)
    together = torch.func.vmap(apply, (0, None))(parameters, x)
    torch.testing.assert_close(together, torch.stack([module(x, x, x)[0] for module in modules]))

    single = dict(modules[0].named_parameters())
    loss = torch.func.grad(lambda parameters, x: apply(parameters, x[None]).square().sum())
    gradients = torch.func.vmap(loss, (None, 0))(single, x)
    for i in range(BATCH):
        out = modules[0](*[x[i : i + 1]] * 3)[0]
        expected = torch.autograd.grad(out.square().sum(), list(single.values()))
        torch.testing.assert_close([gradient[i] for gradient in gradients.values()], list(expected))
