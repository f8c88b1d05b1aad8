"""If calls of one rank or of all are refused, every rank gets an error that says so, and none waits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Processes, group_of
from torch import nn, zeros
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import selfattn_ext
from selfattn_ext import distributed
from selfattn_ext.distributed import agreement, context_parallel, ring_varlen_attention, unshard_sequence

pytestmark = pytest.mark.xdist_group("split_attention")

Call = Callable[[], Any]

X = zeros(1, 2, 8, 8)
ROWS = zeros(8, 2, 8)
STARTS = torch.tensor([0, 16])
OTHERS = torch.tensor([0, 8, 16])


def meta() -> torch.Tensor:
    return zeros(1, 2, 8, 8, device="meta")


def under_fake_tensors(attention: Callable[..., Any]) -> None:
    with FakeTensorMode() as mode:
        attention(*3 * (mode.from_tensor(X),))


def with_a_tangent(attention: Callable[..., Any]) -> None:
    with forward_ad.dual_level():
        attention(forward_ad.make_dual(X, X), X, X)


def dense_calls(name: str) -> dict[str, tuple[Call, str]]:
    """Returns the name of each mistake -> (one rank's wrong call, what its own error says)."""
    attention = getattr(distributed, name)
    options: dict[str, tuple[dict[str, Any], str]] = {
        "layout": ({"layout": "stripes"}, "layout must be one of zigzag, contiguous, head-tail"),
        "rotate": ({"rotate": "x"}, "rotate must be one of p2p, allgather, but it is 'x'"),
        "keyword": ({"windows": (1, 2)}, "unexpected keyword argument 'windows'"),
        "is_causal": ({"is_causal": 1}, "is_causal must be a bool"),
        "enable_gqa": ({"enable_gqa": "yes"}, "enable_gqa must be a bool"),
        "return_lse": ({"return_lse": None}, "return_lse must be a bool"),
        "group": ({"group": "cp"}, "group must be a ProcessGroup, a DeviceMesh or None, not str"),
        "scale": ({"scale": float("nan")}, "scale must be finite"),
        "dropout": ({"dropout_p": 2}, "dropout_p must lie between 0 and 1"),
        "window": ({"window_size": (1,)}, "window_size must be a pair"),
        "softcap": ({"softcap": -1.0}, "softcap must be 0"),
        "offset": ({"query_offset": 1.5}, "query_offset must be an int"),
        "slopes": ({"alibi_slopes": zeros(3)}, r"alibi_slopes of shape \(3,\) does not broadcast"),
        "sinks": ({"sinks": zeros(2, dtype=torch.int64)}, "sinks must be float64"),
        "rows of a mask": ({"attn_mask": zeros(3, 16)}, "attn_mask must have this rank's 8 rows"),
        "heads of a mask": ({"attn_mask": zeros(3, 8, 16)}, r"attn_mask of shape \(3, 8, 16\) does not"),
        "batch of a mask": ({"attn_mask": zeros(4, 1, 8, 16)}, r"attn_mask of shape \(4, 1, 8, 16\) does"),
        "dtype of a mask": ({"attn_mask": zeros(8, 16, dtype=torch.int32)}, "attn_mask must be bool"),
    }
    found: dict[str, tuple[Call, str]] = {
        what: (partial(attention, X, X, X, **given), own) for what, (given, own) in options.items()
    }
    return found | {
        "no value": (lambda: attention(X, X), "missing 1 required positional argument: 'value'"),
        "no tensor": (lambda: attention(X, None, X), "key must be a torch.Tensor"),
        "unlike dtypes": (
            lambda: attention(X, X.double(), X),
            "key is torch.float64 and query torch.float32",
        ),
        "integers": (lambda: attention(X.int(), X, X), "query must be float64"),
        "meta": (lambda: attention(meta(), meta(), meta()), "query is on the meta device"),
        "sparse": (lambda: attention(X.to_sparse(), X, X), "query must be a dense tensor"),
        "one dimension": (lambda: attention(X[0, 0, 0], X, X), "query must have at least 2 dimensions"),
        "heads": (lambda: attention(X, X[:, [0, 0, 0]], X[:, [0, 0, 0]]), "query has 2 heads"),
        "vmap": (lambda: torch.vmap(attention)(*3 * (X[None],)), "torch.func transforms, vmap included"),
        "grad": (lambda: torch.func.grad(lambda x: attention(x, X, X).sum())(X), "torch.func transforms"),
        "tangent": (lambda: with_a_tangent(attention), "query has a tangent"),
        "fake": (lambda: under_fake_tensors(attention), "FakeTensor"),
    }


def packed_calls() -> dict[str, tuple[Call, str]]:
    def attention(*arguments: Any, **options: Any) -> Call:
        given = (*arguments, *(ROWS, ROWS, ROWS, STARTS)[len(arguments) :])
        return lambda: ring_varlen_attention(*given, **options)

    def mask_for_two(*shape: int, **options: Any) -> Call:
        return attention(ROWS, ROWS, ROWS, torch.tensor([0, 4, 16]), zeros(shape, **options))

    return {
        "layout": (attention(layout="stripes"), "layout must be one of"),
        "keyword": (attention(query_offset=0), "unexpected keyword argument 'query_offset'"),
        "is_causal": (attention(is_causal=None), "is_causal must be a bool"),
        "group": (attention(group=0), "group must be a ProcessGroup, a DeviceMesh or None, not int"),
        "rows": (attention(ROWS[:5], ROWS[:5], ROWS[:5]), r"rank \d has 5 rows of query and 5 of key"),
        "no offsets": (attention(ROWS, ROWS, ROWS, None), "cu_seqlens must be a tensor"),
        "float offsets": (attention(ROWS, ROWS, ROWS, STARTS.float()), "cu_seqlens must be integers"),
        "meta offsets": (attention(ROWS, ROWS, ROWS, STARTS.to("meta")), "must be integers on the"),
        "falling offsets": (attention(ROWS, ROWS, ROWS, torch.tensor([0, 20, 16])), "and never fall"),
        "later offsets": (attention(ROWS, ROWS, ROWS, STARTS + 1), "cu_seqlens must begin with 0"),
        "more rows": (attention(ROWS, ROWS, ROWS, torch.tensor([0, 24])), r"rank \d has 8 rows of query"),
        "mask": (attention(attn_mask=zeros(8, 3)), r"attn_mask of shape \(8, 3\) does not broadcast"),
        "keys of all": (mask_for_two(8, 16), r"\(8, 16\) does not broadcast to \(2, 8, 12\)"),
        "mask of each": (mask_for_two(2, 1, 8, 12), r"does not broadcast to \(2, 8, 12\)"),
        "integers": (mask_for_two(8, 12, dtype=torch.int64), r"must be bool \(True = attend\) or float64"),
        "dimensions": (attention(X), "query"),
        "meta": (attention(*3 * (ROWS.to("meta"),)), "meta device"),
        "vmap": (lambda: torch.vmap(lambda x: attention(x)())(ROWS[None]), "torch.func transforms, vmap"),
    }


def unshard_calls() -> dict[str, tuple[Call, str]]:
    return {
        "layout": (lambda: unshard_sequence(X, 2, layout="stripes"), "layout must be one of"),
        "keyword": (lambda: unshard_sequence(X, 2, rotate="p2p"), "unexpected keyword argument 'rotate'"),
        "dim": (lambda: unshard_sequence(X, 4), "Dimension out of range"),
        "no tensor": (lambda: unshard_sequence([1.0], 0), "tensor must be a torch.Tensor"),
        "meta": (lambda: unshard_sequence(meta(), 2), "meta device"),
        "offsets": (lambda: unshard_sequence(X, 2, cu_seqlens=STARTS + 1), "cu_seqlens must begin with 0"),
        "group": (lambda: unshard_sequence(X, 2, group=[0, 1]), "group must be a ProcessGroup"),
        "vmap": (lambda: torch.vmap(lambda x: unshard_sequence(x, 1))(X), "torch.func transforms, vmap"),
    }


def cached() -> None:
    cache = selfattn_ext.KVCache(layers=1, sequences=1, kv_heads=2, head_dim=8, capacity=64)
    cache.extend(8)
    cache.attend(0, X, X, X)


def torchs_flex() -> None:
    with selfattn_ext.as_flex():
        torch_flex(X, X, X)


def rotary() -> None:
    layer = selfattn_ext.MultiheadAttention(16, 2, rotary=True, batch_first=True)
    layer(*3 * (zeros(1, 8, 16),), need_weights=False)


def block_calls() -> dict[str, tuple[Call, str]]:
    """Returns wrong calls in a block of context_parallel: most would take a part for the whole sequence."""
    attention, varlen = selfattn_ext.scaled_dot_product_attention, selfattn_ext.varlen_attention
    packed = (ROWS, ROWS, ROWS, STARTS)
    found: dict[str, tuple[Call, str]] = {
        "weights": (lambda: attention(X, X, X, return_weights=True), "returns its weights cannot be split"),
        "attention_weights": (lambda: selfattn_ext.attention_weights(X, X), "weights cannot be split"),
        "attention_scores": (lambda: selfattn_ext.attention_scores(X, X), "attention_scores cannot be split"),
        "masked_softmax": (lambda: selfattn_ext.masked_softmax(X), "masked_softmax cannot be split"),
        "sparse": (lambda: selfattn_ext.sparse_attention(X, X, X), "sparse_attention cannot be split"),
        "flex": (lambda: selfattn_ext.flex_attention(X, X, X), "flex_attention cannot be split"),
        "torch's flex": (torchs_flex, "flex_attention cannot be split"),
        "caches": (
            lambda: selfattn_ext.attention_with_kvcache(X, X, X, cache_seqlens=8),
            "attention_with_kvcache cannot be split",
        ),
        "KVCache": (cached, "KVCache.attend cannot be split"),
        "rotary": (rotary, "counts rotary positions itself cannot be split"),
        "CausalBias": (
            lambda: attention(X, X, X, causal_lower_right(8, 8)),
            "a CausalBias, .*cannot be split",
        ),
        "needed weights": (lambda: nn.MultiheadAttention(16, 2)(*3 * (zeros(8, 16),)), "need_weights=True"),
        "packed lengths": (lambda: varlen(*packed, OTHERS, 16, 8), "different lengths .*cannot be split"),
        "packed mask": (
            lambda: varlen(*packed, STARTS, 16, 16, zeros(16, 16)),
            "varlen_attention with attn_mask, which ring_varlen_attention takes, cannot be split",
        ),
        "packed weights": (
            lambda: varlen(*packed, STARTS, 16, 16, return_weights=True),
            "returns its weights cannot be split",
        ),
    }
    found = {what: (call, f"NotImplementedError: .*{own}") for what, (call, own) in found.items()}
    found |= {
        "multi-head": (
            lambda: nn.MultiheadAttention(16, 2)(*3 * (zeros(8, 12),), need_weights=False),
            "expecting embedding dimension of 16, but got 12",
        ),
        "no tensor": (lambda: attention(X, X, None), "value must be a torch.Tensor"),
        "mask of a part": (lambda: attention(X, X, X, zeros(7, 16)), "this rank's 8 rows"),
        "a part's rows": (
            lambda: varlen(ROWS[1:], ROWS, ROWS, STARTS, STARTS, 16, 16),
            r"rank \d has 7 rows of query",
        ),
    }
    return {what: (partial(in_a_block, call), own) for what, (call, own) in found.items()}


def in_a_block(call: Call) -> Any:
    with context_parallel():
        return call()


def good_calls() -> dict[str, Call]:
    return {
        "ring_attention": lambda: distributed.ring_attention(X, X, X),
        "ulysses_attention": lambda: distributed.ulysses_attention(X, X, X),
        "ring_varlen_attention": lambda: ring_varlen_attention(ROWS, ROWS, ROWS, STARTS),
        "unshard_sequence": lambda: unshard_sequence(X, 2),
        "context_parallel": lambda: in_a_block(partial(F.scaled_dot_product_attention, X, X, X)),
    }


def wrong_calls(name: str) -> dict[str, tuple[Call, str]]:
    if name == "ulysses_attention":
        ring = {
            "ring_group": (lambda: distributed.ulysses_attention(X, X, X, ring_group="x"), "group must be")
        }
        return dense_calls(name) | ring
    return {
        "ring_attention": partial(dense_calls, name),
        "ring_varlen_attention": packed_calls,
        "unshard_sequence": unshard_calls,
        "context_parallel": block_calls,
    }[name]()


def refused(name: str, what: str) -> list[tuple[float, str]]:
    """Runs on a rank; returns after how long it got an error, and its text, if rank 1 calls wrongly, and if
    both ranks do.
    """
    good, wrong = good_calls()[name], wrong_calls(name)[what][0]
    found = []
    for call in (wrong if dist.get_rank() == 1 else good, wrong):
        said = ""
        begin = time.monotonic()
        try:
            call()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found.append((time.monotonic() - begin, said))
        good()  # The group works as before.
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    """Two ranks with the default group alone, which no other module can find broken."""
    with group_of(2, timeout=10) as processes:
        yield processes


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in good_calls() for what in wrong_calls(name)]
)
def test_refusals(two: Processes, name: str, what: str) -> None:
    (heard, other), (own, again) = two(refused, name, what)
    says = wrong_calls(name)[what][1]
    for _, text in (other, own, again):
        assert re.search(says, text)
    told = f"rank 1 has made no call, as its arguments were refused: {own[1].partition(': ')[2]}"
    assert heard[1] == f"ValueError: {told}"
    assert max(took for took, _ in (heard, other, own, again)) < 5


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda:3"), ("cpu:gloo,cuda:gloo", "cpu")],
)
def test_where_calls_are_compared(backends: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the group can, ranks compare calls on the CPU: no GPU is waited for, and tensors may be anywhere."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert agreement._device_of(None) == torch.device(device)
