"""Continuous batching of transformers on our kernels, judged by each request alone.

The cache is too small for all requests at once, and holds NaN wherever no token has been written.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tolerances import assert_accurate
from torch import Tensor, nn
from transformers_models import (
    DECODERS,
    NAME,
    SIZES,
    TOKENS,
    VERSION,
    Trio,
    as_implementation,
    built,
)

from selfattn_ext import collect_statistics, reference
from selfattn_ext.integrations import transformers as integration
from selfattn_ext.integrations import transformers_paged

pytestmark = pytest.mark.skipif(VERSION < (5, 24), reason="older versions hand their cache to the attention")

PAGE = 4
STEPS = 6
#: Layers of this model do not say their window when they call attention.
WINDOW_UNSAID = {**SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 2}
WINDOW_UNSAID |= {"num_experts_per_tok": 1, "shared_expert_intermediate_size": 16, "use_sliding_window": True}
WINDOW_UNSAID |= {"sliding_window": 5, "max_window_layers": 1}
MODELS = {name: DECODERS[name] for name in ("llama gqa", "qwen2", "mistral", "gemma2", "gpt-oss")}
MODELS["qwen2 moe"] = lambda: transformers.Qwen2MoeConfig(**WINDOW_UNSAID)
#: What transformers itself can run there with the same results: it drops Gemma 2's softcap.
PEERS = {"gemma2": [], "gpt-oss": ["paged|eager"], "llama gqa": ["sdpa", "paged|eager"]}
WITHOUT_WINDOWS = ("llama gqa", "qwen2")


def prompts() -> list[list[int]]:
    """Requests of unlike length; some begin alike."""
    generator = torch.Generator().manual_seed(5)
    beginning, *rest = (
        torch.randint(3, TOKENS, (length,), generator=generator).tolist()
        for length in (13, 1, 3, 7, 1, 23, 6, 31)
    )
    return [beginning + ids if turn % 2 else ids for turn, ids in enumerate(rest)] + [beginning]


def settings(**options: Any) -> dict[str, Any]:
    """The configurations of a run: room for 96 tokens, of which a step takes 16."""
    sizes = {"page_size": PAGE, "num_blocks": 24, "max_batch_tokens": 16}
    return {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            **sizes, return_logprobs=True, **options
        ),
    }


def run(model: nn.Module, implementation: str = NAME, **options: Any) -> list[Any]:
    model.set_attn_implementation(implementation)
    results = list(model.generate_batch(prompts(), **settings(**options)).values())
    assert [result.error for result in results] == [None] * len(prompts())
    return results


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of our functions, and the tokens that requests have found in pages of others; puts NaN
    into caches."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    counts: Counter[str] = Counter()

    def counting(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[function.__name__] += 1
            return function(*args, **kwargs)

        return counted

    init, search = PagedAttentionCache.__init__, PagedAttentionCache.search_prefix_match

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # The first two sectors belong to no request, and transformers keeps the first at zero.
        self.cache_tensor[2 * self.bytes_per_sector :].view(self.dtype).fill_(torch.nan)

    def searched(self: Any, *args: Any) -> int:
        found: int = search(self, *args)
        counts["shared tokens"] += found
        return found

    monkeypatch.setattr(PagedAttentionCache, "__init__", spoiled)
    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searched)
    for function in (transformers_paged.attention_with_kvcache, transformers_paged.varlen_attention):
        monkeypatch.setattr(transformers_paged, function.__name__, counting(function))
    return counts


def alone(model: nn.Module, results: list[Any]) -> Tensor:
    """The logarithms of all tokens' probabilities, (requests * STEPS, TOKENS), one request at a time."""
    with torch.no_grad():
        return torch.cat(
            [
                model(torch.tensor([prompt + result.generated_tokens])).logits[0, len(prompt) - 1 : -1]
                for prompt, result in zip(prompts(), results, strict=True)
            ]
        ).log_softmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_requests(name: str, seen: Counter[str]) -> None:
    """Each request gets the tokens that it gets alone, and that transformers' own functions give."""
    trio = Trio(built(MODELS[name]()))
    results = run(trio.ours)
    windows = name not in WITHOUT_WINDOWS
    assert (seen["attention_with_kvcache"] == 0) == windows
    assert seen["varlen_attention"] > 0
    assert (seen["shared tokens"] == 0) == windows
    chosen = torch.tensor([result.generated_tokens for result in results]).reshape(-1, 1)
    exact, peer = alone(trio.exact, results), alone(trio.peer, results)
    assert torch.equal(exact.argmax(-1, keepdim=True), chosen)
    ours = torch.tensor([result.logprobs for result in results]).reshape(-1, 1)
    assert_accurate(name, ours, exact.gather(1, chosen), peer.gather(1, chosen))
    calls = seen.copy()
    for own in PEERS.get(name, ["sdpa"]):
        theirs = run(trio.ours, own)
        assert [result.generated_tokens for result in theirs] == chosen.reshape(-1, STEPS).tolist()
    calls["shared tokens"] = seen["shared tokens"]
    assert calls == seen, "the peers used our functions"


def test_without_shared_pages_and_block_tables(seen: Counter[str]) -> None:
    model = built(MODELS["llama gqa"]())
    expected = [result.generated_tokens for result in run(model)]
    assert seen["shared tokens"] > 0
    assert seen["attention_with_kvcache"] > 0
    seen.clear()
    results = run(model, allow_block_sharing=False, max_blocks_per_request=0)
    assert [result.generated_tokens for result in results] == expected
    assert list(seen.elements()) == ["varlen_attention"] * seen["varlen_attention"]


def test_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are added while others run; the model keeps its implementation, and no mask is made."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    model = built(MODELS["llama gqa"]())
    first, *later = prompts()
    expected = [result.generated_tokens for result in run(model)]
    for _ in range(2):  # the second time with the manager of the first
        found: dict[str, list[int]] = {}
        names: list[str] = []
        with model.continuous_batching_context_manager(**settings(), persistent_manager=True) as manager:
            names.append(manager.add_request(first, streaming=True))
            for result in manager:
                if len(names) == 1:
                    names += manager.add_requests(later)
                if result.is_finished():
                    found[result.request_id] = result.generated_tokens
                if len(found) == len(expected):
                    break
            assert model.config._attn_implementation == NAME
            assert manager.batch_processor.inputs_and_outputs.attention_mask is None
        assert [found[name] for name in names] == expected
    model.destroy_cached_continuous_batching_manager()
    assert model.config._attn_implementation == NAME


def test_other_implementations_are_not_let_in() -> None:
    model = as_implementation(built(MODELS["llama gqa"]()), "formula")
    with pytest.raises(ValueError, match="Implementation formula is not supported for continuous batching"):
        model.generate_batch(prompts(), **settings())


def test_nothing_is_collected() -> None:
    model = built(MODELS["llama gqa"]())
    with pytest.raises(RuntimeError, match="no layer of the model"), collect_statistics(model):
        run(model)


def test_a_step_with_block_tables() -> None:
    """Pages of keys and of values alternate; a request that fills the batch up changes nothing."""
    kv_heads, dim = 2, 8
    lengths = [PAGE + 1, PAGE, 1, 0]
    table = torch.tensor([[4, 10, -1], [6, -1, -1], [8, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 4, dim) for heads in (4, kv_heads, kv_heads))
    key[:, :, 3] = value[:, :, 3] = torch.nan
    pool = torch.full((12, PAGE, kv_heads, dim), torch.nan)
    pool[:2] = 0  # page 0 of keys and of values, which no request has
    pool[4:6] = torch.randn(2, PAGE, kv_heads, dim)
    pool[6:8, : PAGE - 1] = torch.randn(2, PAGE - 1, kv_heads, dim)
    expected = pool.clone()
    for request, (page, row) in enumerate([(10, 0), (6, PAGE - 1), (8, 0)]):
        expected[page, row], expected[page + 1, row] = key[0, :, request], value[0, :, request]
    arguments = {
        "cu_seq_lens_q": torch.arange(5, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, *lengths]).cumsum(0).int(),
        "write_index": [],
        "block_table": table,
        "k_cache": pool[:-1],
        "v_cache": pool[1:],
    }
    out, weights = integration.attention_forward(
        nn.Identity(), query, key, value, None, scaling=0.5, softcap=2.0, **arguments
    )
    assert weights is None
    assert out.shape == (1, 4, 4, dim)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    for request, length in enumerate(lengths):
        pages = table[request][table[request] >= 0].long()
        keys, values = (
            expected[pages + part].reshape(-1, kv_heads, dim)[:length].transpose(0, 1) for part in (0, 1)
        )
        own = query[0, :, request : request + 1]
        exact, peer = (
            reference.attention(*(part.to(dtype) for part in (own, keys, values)), scale=0.5, softcap=2.0).out
            for dtype in (torch.float64, torch.float32)
        )
        assert_accurate(f"request {request}", out[0, request], exact[:, 0], peer[:, 0])


def test_what_a_step_cannot_have() -> None:
    query = torch.zeros(1, 2, 3, 8)
    module: Any = SimpleNamespace(config=None)
    with pytest.raises(ValueError, match="continuous batching takes no attention_mask, position_bias"):
        integration.attention_forward(module, query, query, query, query, position_bias=query, write_index=[])
