"""Notebooks that write self-attention from scratch have the same results through this package."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_accurate
from torch import nn

from selfattn_ext import MultiHeadSelfAttention, SelfAttention, scaled_dot_product_attention


class NotebookSelfAttention(nn.Module):
    """A notebook's class for one head, word for word."""

    def __init__(self, d_model, d_k=None, d_v=None):
        super().__init__()
        self.d_k = d_k or d_model
        self.d_v = d_v or d_model
        self.W_q = nn.Linear(d_model, self.d_k, bias=False)
        self.W_k = nn.Linear(d_model, self.d_k, bias=False)
        self.W_v = nn.Linear(d_model, self.d_v, bias=False)
        self.W_o = nn.Linear(self.d_v, d_model, bias=False)

    def forward(self, x):
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        attention_weights = F.softmax(scores, dim=-1)
        return self.W_o(torch.matmul(attention_weights, v)), attention_weights


class NotebookMultiHeadSelfAttention(nn.Module):
    """A notebook's class for several heads, word for word."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None):
        b, n, d = x.size()
        q = self.Wq(x).view(b, n, self.num_heads, self.d_k).transpose(1, 2)
        k = self.Wk(x).view(b, n, self.num_heads, self.d_k).transpose(1, 2)
        v = self.Wv(x).view(b, n, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        out = torch.softmax(scores, dim=-1) @ v
        return self.Wo(out.transpose(1, 2).contiguous().view(b, n, d))


@pytest.mark.parametrize("sizes", [(), (24,), (24, 40)])
@pytest.mark.parametrize("shape", [(6, 32), (1, 6, 32), (4, 6, 32)], ids=str)
def test_single_head_returns_output_and_weights(sizes, shape):
    torch.manual_seed(0)
    model, notebook = SelfAttention(32, *sizes), NotebookSelfAttention(32, *sizes)
    notebook.load_state_dict(model.state_dict())
    x = torch.randn(shape)
    output, attention_weights = model(x)
    torch.testing.assert_close((output, attention_weights), notebook(x))
    torch.testing.assert_close(attention_weights.sum(dim=-1), torch.ones(shape[:-1]))


@pytest.mark.parametrize("kind", ["none", "tril", "tril4", "padding", "bool", "int"])
def test_multi_head_with_a_mask_of_zero_and_one(kind):
    torch.manual_seed(0)
    model, notebook = MultiHeadSelfAttention(d_model=64, num_heads=8), NotebookMultiHeadSelfAttention(64, 8)
    notebook.load_state_dict(model.state_dict())
    x = torch.randn(2, 10, 64)
    tril = torch.tril(torch.ones(10, 10))
    mask = {
        "none": None,
        "tril": tril,
        "tril4": tril.unsqueeze(0).unsqueeze(0),
        "padding": (torch.arange(10) < torch.tensor([[10], [6]])).long()[:, None, None, :],
        "bool": tril.bool(),
        "int": tril.int().expand(2, 1, 10, 10),
    }[kind]
    actual, expected = model(x, mask), notebook(x, mask)
    torch.testing.assert_close(actual, expected)
    gradients = (
        torch.autograd.grad(o.sin().sum(), m.parameters()) for o, m in ((actual, model), (expected, notebook))
    )
    torch.testing.assert_close(*gradients)


def notebook_head(x, key, query):
    T = x.shape[1]
    wei = query(x) @ key(x).transpose(-2, -1)
    tril = torch.tril(torch.ones(T, T))
    wei = wei.masked_fill(tril == 0, float("-inf"))
    wei = F.softmax(wei, dim=-1)
    return wei @ x, wei


@pytest.mark.parametrize("options", ["is_causal", "bool", "additive"])
def test_unscaled_causal_head(options):
    torch.manual_seed(1337)
    B, T, C = 4, 8, 32
    x = torch.randn(B, T, C, requires_grad=True)
    key, query = nn.Linear(C, 16, bias=False), nn.Linear(C, 16, bias=False)
    tril = torch.tril(torch.ones(T, T))
    mask = {
        "is_causal": {"is_causal": True},
        "bool": {"attn_mask": tril == 1},
        "additive": {"attn_mask": tril.log()},
    }

    def with_gradients(head, *modules):
        modules = modules or (key, query)
        out, wei = head(x.to(modules[0].weight.dtype), *modules)
        leaves = [x, *(module.weight for module in modules)]
        return [out, wei, *torch.autograd.grad(out.square().sum(), leaves)]

    actual = with_gradients(
        lambda x, key, query: scaled_dot_product_attention(
            query(x), key(x), x, scale=1.0, return_weights=True, **mask[options]
        )
    )
    peer = with_gradients(notebook_head)
    exact = with_gradients(notebook_head, copy.deepcopy(key).double(), copy.deepcopy(query).double())
    assert actual[0].shape == (4, 8, 32)
    for name, *results in zip(
        ["out", "wei", "x.grad", "key.grad", "query.grad"], actual, exact, peer, strict=True
    ):
        assert_accurate(name, *(result.detach() for result in results))


def softmax(x):
    return (np.exp(x).T / np.sum(np.exp(x), axis=-1)).T


def numpy_attention(q, k, v, mask=None):
    scaled = np.matmul(q, k.T) / math.sqrt(q.shape[-1])
    if mask is not None:
        scaled = scaled + mask
    attention = softmax(scaled)
    return np.matmul(attention, v), attention


@pytest.mark.parametrize("masked", [False, True])
def test_two_dimensional_functional_with_an_additive_mask(masked):
    np.random.seed(0)
    L, d_k, d_v = 4, 8, 8
    q, k, v = np.random.randn(L, d_k), np.random.randn(L, d_k), np.random.randn(L, d_v)
    mask = np.tril(np.ones((L, L)))
    mask[mask == 0] = -np.inf
    mask[mask == 1] = 0
    mask = mask if masked else None
    exact = [torch.from_numpy(array) for array in numpy_attention(q, k, v, mask)]
    for dtype in (np.float64, np.float32):
        arrays = [None if array is None else array.astype(dtype) for array in (q, k, v, mask)]
        peer = [torch.from_numpy(array) for array in numpy_attention(*arrays)]
        tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
        results = scaled_dot_product_attention(*tensors, return_weights=True)
        for name, result, *judges in zip(("values", "attention"), results, exact, peer, strict=True):
            assert result.dtype == tensors[0].dtype
            assert_accurate(name, result, *judges)
