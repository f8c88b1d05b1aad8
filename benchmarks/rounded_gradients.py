"""Errors of query gradients by rounding to bfloat16, for keys that share a component.

The kernels with bfloat16 products compute dQ from dS in one bfloat16 piece, and dS from an output whose
weights were rounded. This computes the same in float32 on any machine, and tries ways to keep the common
component of the keys out of dQ. It prints the root mean square error of each against float64, relative to
that of the gradient. docs/performance-lessons.md has the outcome.

Run: python benchmarks/rounded_gradients.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = 4


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_with_carry(grads: Tensor) -> Tensor:
    """Rounds, adding each rounding error to the next key's number, so that errors of neighbours cancel."""
    result, carry = torch.zeros_like(grads), torch.zeros_like(grads[..., 0])
    for key in range(grads.size(-1)):
        seen = grads[..., key] != 0
        wanted = grads[..., key] + carry
        result[..., key] = torch.where(seen, rounded(wanted), 0.0)
        carry = torch.where(seen, wanted - result[..., key], carry)
    return result


def along(keys: Tensor, weights: Tensor) -> Tensor:
    """Projects the mean of the keys by each row's weights onto the plain mean of the keys.

    The result is that plain mean times a number per row, which is the row's weights times a number per key.
    """
    mean = keys.mean(-2, keepdim=True)
    shares = (keys * mean).sum(-1) / (mean * mean).sum(-1).clamp(min=1e-30)
    return (weights @ shares.unsqueeze(-1)) * mean


def errors(query: Tensor, key: Tensor, value: Tensor, cotangent: Tensor, causal: bool) -> dict[str, float]:
    scale = query.size(-1) ** -0.5
    hidden = torch.ones(query.size(-2), key.size(-2)).tril(key.size(-2) - query.size(-2)) == 0
    hidden &= causal

    def scores_of(dtype: torch.dtype) -> Tensor:
        return (scale * query.to(dtype) @ key.to(dtype).mT).masked_fill(hidden, -torch.inf)

    weights = scores_of(torch.float64).softmax(-1)
    grads = cotangent.double() @ value.double().mT
    exact = scale * (weights * (grads - (weights * grads).sum(-1, keepdim=True))) @ key.double()

    k, v, g = (tensor.float() for tensor in (key, value, cotangent))
    scores = scores_of(torch.float32)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    used = rounded(exponentials)
    grads = g @ v.mT
    delta = (used @ v / used.sum(-1, keepdim=True) * g).sum(-1, keepdim=True)
    score_grads = weights * (grads - delta)
    better = weights * (grads - (weights * grads).sum(-1, keepdim=True))
    taken = rounded(score_grads)
    rest = taken.sum(-1, keepdim=True)  # 0 except for rounding
    found = {
        "as it is": taken @ k,
        "dS in float": score_grads @ k,
        "exact delta": rounded(better) @ k,
        "carry": rounded_with_carry(score_grads) @ k,
        "carry, exact delta": rounded_with_carry(better) @ k,
        "mean": taken @ k - rest * k.mean(-2, keepdim=True),
        "share of mean": taken @ k - rest * along(k, weights),
        "one more product": taken @ k - rest * (weights @ k),
    }
    results = {name: rounded(scale * result) for name, result in found.items()}
    if not causal:
        leaf = query.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(leaf, key, value)
        results["torch's kernel"] = torch.autograd.grad(out, leaf, cotangent)[0]

    def size(x: Tensor) -> float:
        return float(x.double().square().mean().sqrt())

    return {name: size(result.double() - exact) / size(exact) for name, result in results.items()}


def main() -> None:
    torch.manual_seed(0)

    def case(name: str, shift: Tensor, queries: int, keys: int, dim: int, causal: bool = False) -> None:
        shapes = ((queries, dim), (keys, dim), (keys, dim), (queries, dim))
        query, key, value, cotangent = (torch.randn(1, HEADS, *shape) for shape in shapes)
        tensors = (query - 0.5, key + shift, value, cotangent)
        found = errors(*(tensor.to(torch.bfloat16) for tensor in tensors), causal=causal)
        numbers = ", ".join(f"{way} {error:.4f}" for way, error in found.items())
        print(f"{queries} x {keys}, {dim} dims{', causal' * causal}, {name}: {numbers}")

    for queries, keys, dim in ((128, 128, 64), (256, 512, 64), (64, 1000, 32)):
        for causal in (False, True):
            for size in (0.0, 1.0, 10.0, 120.0):
                common = size * torch.randn(1, HEADS, 1, dim).sign()
                case(f"{size:.0f} in common", common, queries, keys, dim, causal)
        for size in (10.0, 120.0):
            for attended in (2, 8):
                others = torch.full((keys, 1), size)
                others[:attended] = 0.0
                case(f"{attended} keys without {size:.0f}", others, queries, keys, dim)
        halves = 10.0 * (torch.arange(keys) % 2).unsqueeze(-1)
        case("every other key has 10", halves, queries, keys, dim)
        clusters = torch.randn(1, HEADS, 8, dim).repeat_interleave(keys // 8, -2)
        case("eight clusters of 10", 10 * clusters, queries, keys, dim)


if __name__ == "__main__":
    main()
