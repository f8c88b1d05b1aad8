"""Training of transformers models on our kernels, torch.compile, registration, and arguments."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers_models import (
    DECODERS,
    FORMULA,
    NAME,
    VERSION,
    Trio,
    as_implementation,
    built,
    gradients,
    kernel_calls,
    padding,
    tokens,
)

from selfattn_ext.integrations import transformers as integration
from selfattn_ext.integrations.positional_mask import PositionalMask

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_transformers.py"


def training_step(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    ids = tokens()
    mask = padding(ids, "right")
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    return {"loss": loss.detach(), **gradients(model, loss)}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def dropping() -> nn.Module:
    """Returns a model in training that drops attention weights and nothing else."""
    config = DECODERS["llama gqa"]()
    config.attention_dropout = 0.5
    return built(config).train()


def test_dropout_is_applied_and_follows_the_seed(dropping: nn.Module) -> None:
    first = training_step(dropping)
    assert same(first, training_step(dropping))
    assert not same(first, training_step(dropping, seed=1))
    evaluated = training_step(dropping.eval())
    assert not same(first, evaluated)
    assert same(evaluated, training_step(dropping, seed=1))


def test_dropout_leaves_the_mean(dropping: nn.Module) -> None:
    layer = dropping.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    value = torch.ones(1, 2, 5, 8)
    out, weights = integration.attention_forward(
        layer, query, key, value, None, dropout=0.5, is_causal=True, output_attentions=True
    )
    kept = weights > 0
    assert 0.2 < float(kept.float().mean() / torch.ones(5, 5).tril().mean()) < 0.8
    torch.testing.assert_close(out[..., 0].transpose(1, 2), weights.sum(-1))
    draws = 2000
    many = [
        integration.attention_forward(layer, query, key, value, None, dropout=0.5)[0] for _ in range(draws)
    ]
    # With p = 1/2, a draw's variance is the sum of the squared weights, which is at most 1.
    torch.testing.assert_close(torch.stack(many).mean(0), torch.ones(1, 5, 4, 8), atol=5 / draws**0.5, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(dropping: nn.Module, reentrant: bool) -> None:
    plain = training_step(dropping)
    dropping.gradient_checkpointing_enable({"use_reentrant": reentrant})
    dropping.enable_input_require_grads()
    with kernel_calls() as calls:
        again = training_step(dropping)
    assert len(calls) == 2 * 3  # per layer: forward, recomputed forward, backward
    assert same(plain, again)


def test_a_training_run() -> None:
    """Ten steps change the weights as they do with eager attention."""

    def run(model: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model.train()
        return {f"loss {step}": advance(model, optimizer) for step in range(10)}

    def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = training_step(model)["loss"]
        optimizer.step()
        return loss

    losses = list(Trio(built(DECODERS["gemma2"]())).check(run).values())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("side", ["none", "left"])
def test_compiled_as_one_graph(side: str) -> None:
    torch._dynamo.reset()
    model = built(DECODERS["mistral"]())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens()
    given = {} if side == "none" else {"attention_mask": padding(ids, side)}
    expected = model(ids, use_cache=False, **given).logits
    result = compiled(ids, use_cache=False, **given).logits
    assert torch.equal(result, expected)
    weights = torch.randn_like(result)
    ours, theirs = gradients(model, (result * weights).sum()), gradients(model, (expected * weights).sum())
    assert same(ours, theirs)


def test_compiled_layer_by_layer() -> None:
    """The mask is made outside and is an argument of each graph, which serves all lengths and paddings."""
    torch._dynamo.reset()
    model = built(DECODERS["mistral"]())
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(inputs))
        return graph

    expected = {}
    for length in range(9, 14):
        ids = tokens(length=length)
        mask = padding(ids, "left")
        expected[length] = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    for length in range(9, 14):
        ids = tokens(length=length)
        mask = padding(ids, "left")
        with torch.no_grad():
            result = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(result, expected[length])
    assert len(graphs) <= 3


@pytest.mark.parametrize("cache", [[], ["--static"]])
def test_example(cache: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    with kernel_calls() as calls:
        main(["--tokens", "4", "--layers", "2", "--dim", "64", "--compare", "eager", *cache])
    assert len(calls) == 2 * 4
    printed = capsys.readouterr().out
    assert printed.endswith("the tokens are the same\n")
    # The example prints only printable characters, without escapes.
    assert re.search(r"^  'Attention is' -> (['\"])[ -~]{4,7}\1$", printed, re.MULTILINE)
    assert "\\x" not in printed


@pytest.mark.parametrize("name", ["", "my sdpa", "flash_ours", "eager", "paged|ours", "a/b", 3])
def test_names_that_mean_something_else(name: str) -> None:
    with pytest.raises(ValueError, match="name must be a string without any of 'eager', 'sdpa'"):
        integration.register(name)


def test_registering() -> None:
    integration.register()
    integration.register()
    with pytest.raises(ValueError, match=r"name 'formula' is taken by transformers_models\.formula"):
        integration.register(FORMULA)
    integration.register("mine")
    model = transformers.AutoModelForCausalLM.from_config(DECODERS["llama gqa"](), attn_implementation="mine")
    with kernel_calls() as calls:
        model(tokens())
    assert len(calls) == 2
    as_implementation(model, "eager")
    with kernel_calls() as calls:
        model(tokens())
    assert not calls


def test_from_pretrained(tmp_path: object) -> None:
    model = built(DECODERS["llama gqa"]())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert again.config._attn_implementation == NAME
    with kernel_calls() as calls, torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert len(calls) == 4


def test_importing_the_package_does_not_import_transformers() -> None:
    code = (
        "import sys, selfattn_ext, selfattn_ext.integrations.transformers\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: selfattn_ext.integrations.transformers.register()\n"
        "except ImportError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("transformers 4.57 or newer is needed")
    assert "pip install --upgrade 'selfattn_ext[transformers]'" in result.stdout


def test_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers sometimes replaces its module in sys.modules.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.53.1")
    with pytest.raises(ImportError, match=r"4\.57 or newer is needed, this is 4\.53\.1: pip install"):
        integration.register()


def layer() -> nn.Module:
    return nn.Identity()


def heads(count: int, length: int, dim: int = 8) -> Tensor:
    return torch.randn(2, count, length, dim, dtype=torch.float64)


def test_head_mask() -> None:
    q, k, v = heads(4, 5), heads(4, 5), heads(4, 5)
    factors = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    plain, plain_weights = integration.attention_forward(layer(), q, k, v, None, output_attentions=True)
    for shape in ((4,), (1, 4, 1, 1)):
        out, weights = integration.attention_forward(
            layer(), q, k, v, None, head_mask=factors.reshape(shape), output_attentions=True
        )
        torch.testing.assert_close(out, plain * factors[:, None])
        torch.testing.assert_close(weights, plain_weights * factors[:, None, None])
    with pytest.raises(ValueError, match=r"head_mask must have one number per head, 4, and is of shape"):
        integration.attention_forward(layer(), q, k, v, None, head_mask=torch.ones(2, 4, 5, 5))


def test_a_sink_for_every_query() -> None:
    q, k, v = heads(4, 5), heads(2, 7), heads(2, 7, 6)
    sinks = torch.randn(2, 4, 5, 1, dtype=torch.float64, requires_grad=True)
    mask = PositionalMask((2, 5, 7), (-1, 0), 2, None, "cpu")
    out, weights = integration.attention_forward(layer(), q, k, v, mask, sinks=sinks, output_attentions=True)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 8**-0.5
    scores = scores.masked_fill(~mask.dense(), -torch.inf)
    expected = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    torch.testing.assert_close(weights, expected)
    exact = (expected @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, exact)
    given = torch.randn_like(out)
    torch.testing.assert_close(
        *(torch.autograd.grad(result, sinks, given, retain_graph=True)[0] for result in (out, exact))
    )


def test_chosen_keys() -> None:
    q, k, v = heads(4, 5), heads(2, 7), heads(2, 7, 6)
    indices = torch.stack([torch.randperm(7)[:3] for _ in range(10)]).reshape(2, 5, 3)
    mask = PositionalMask((2, 5, 7), (-1, 0), 2, None, "cpu")
    out, weights = integration.attention_forward(
        layer(), q, k, v, mask, indices=indices, output_attentions=True
    )
    chosen = torch.zeros(2, 5, 7).scatter(-1, indices, 1).bool()[:, None]
    assert torch.equal(weights > 0, (chosen & mask.dense()).expand_as(weights))
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))
    # Padding in the list of indices, and repeated indices, change nothing.
    longer = torch.cat([indices, torch.full((2, 5, 1), -1), indices[..., :1]], -1).int()
    again, _ = integration.attention_forward(layer(), q, k, v, mask, indices=longer, output_attentions=True)
    assert torch.equal(again, out)
    with pytest.raises(ValueError, match=r"continuous batching .* needs transformers 5\.24"):
        integration.attention_forward(layer(), q, k, v, mask, cache=object())


def test_chosen_blocks() -> None:
    """The 7 keys are in blocks of 3, and two groups of heads choose different blocks."""
    q, k, v = heads(4, 5), heads(2, 7), heads(2, 7, 6)
    mask = PositionalMask((2, 5, 7), (-1, 0), 2, None, "cpu")
    indices = torch.tensor([[0, -1], [2, 0], [1, 1], [2, -1], [-1, -1]])
    indices = torch.stack([indices, indices.flip(0), indices.flip(1), (indices - 1).clamp(-1)]).unflatten(
        0, (2, 2)
    )
    module = layer()
    with pytest.raises(ValueError, match=r"block_indices need .*module\.indexer\.block_size"):
        integration.attention_forward(module, q, k, v, mask, block_indices=indices)
    module.indexer = SimpleNamespace(block_size=3)
    out, weights = integration.attention_forward(
        module, q, k, v, mask, block_indices=indices, output_attentions=True
    )
    chosen = (indices.unsqueeze(-2) == (torch.arange(7) // 3).unsqueeze(-1)).any(-1).repeat_interleave(2, 1)
    assert torch.equal(weights > 0, chosen & mask.dense())
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_what_sdpa_of_transformers_cannot(name: str) -> None:
    """It refuses GPT-OSS. It ignores Gemma 2's softcap in 4.57, and refuses it from 5 on."""
    model = built(DECODERS[name]())
    ids = tokens()
    with torch.no_grad():
        expected = as_implementation(model, FORMULA)(ids).logits
        torch.testing.assert_close(as_implementation(model, NAME)(ids).logits, expected)
        if (name, VERSION >= (5, 0)) == ("gemma2", False):
            theirs = as_implementation(model, "sdpa")(ids).logits
            assert (theirs - expected).abs().max() > 0.01
        else:
            with pytest.raises(ValueError, match=r"softcap|does not support"):
                as_implementation(model, "sdpa")(ids)
