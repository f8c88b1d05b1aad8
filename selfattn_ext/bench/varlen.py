"""Cases of batches with several sequence lengths: packed, or padded to the longest."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfattn_ext import varlen_attention
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import OURS, TORCH, Call, Contender

_MOST_NESTED = 1e10


def draw_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Draws two or more lengths, the same on every machine: first the longest, last the shortest."""
    drawn = random.Random(seed)
    return (longest, *(drawn.randint(shortest, longest) for _ in range(count - 2)), shortest)


@dataclass(frozen=True)
class VarlenCase(Case):
    """Self-attention in sequences of ``lengths``, with no option but ``causal``.

    ``batch`` is their number and ``length`` the longest, so that inputs() makes padded tensors.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, head_dim: int, **fields: Any) -> VarlenCase:
        return cls(len(lengths), heads, max(lengths), head_dim, lengths=tuple(lengths), **fields)

    def options(self) -> str:
        return f"lengths={min(self.lengths)}-{self.length} {super().options()}".strip()

    def pairs(self) -> int:
        return sum(self.element(index).pairs() for index in range(self.batch))

    def total_queries(self) -> int:
        return sum(self.lengths)

    def total_keys(self) -> int:
        return sum(self.lengths)

    def element(self, index: int) -> Case:
        return Case(
            1,
            self.heads,
            self.lengths[index],
            self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
            backward=self.backward,
            kv_heads=self.kv_heads,
        )

    def further(self) -> dict[str, Any]:
        return {"lengths": self.lengths}

    def starts(self) -> Tensor:
        """Returns the row at which each packed sequence begins, and the end of all: (B + 1,), int32."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    def is_real(self) -> Tensor:
        """Returns which rows of a padded tensor are not padding: (B, L), bool."""
        return torch.arange(self.length) < torch.tensor(self.lengths)[:, None]


def _varlen(case: Case) -> VarlenCase:
    assert isinstance(case, VarlenCase)
    return case


def _packed_inputs(case: Case, tensors: Inputs) -> Inputs:
    """Returns query, key, value and grad_out as (total, H, E), the first three as leaves."""
    real = _varlen(case).is_real().to(tensors.query.device)

    def packed(tensor: Tensor) -> Tensor:
        return tensor.detach().transpose(1, 2)[real].requires_grad_(tensor.requires_grad)

    return Inputs(
        packed(tensors.query), packed(tensors.key), packed(tensors.value), packed(tensors.grad_out), mask=None
    )


def _unpacked(case: Case, result: Tensor) -> Tensor:
    """Unpacks (total, H, E) to (B, H, L, E) with zeros as padding."""
    out = result.new_zeros(case.batch, case.length, *result.shape[1:])
    out[_varlen(case).is_real().to(result.device)] = result.detach()
    return out.transpose(1, 2)


def _padded_inputs(case: Case, tensors: Inputs) -> Inputs:
    """Adds a mask (B, 1, 1, L) that hides the padding, and makes the gradient of the padding's output 0."""
    real = _varlen(case).is_real().to(tensors.query.device)
    grad_out = tensors.grad_out * real[:, None, :, None]
    return replace(tensors, mask=real[:, None, None, :], grad_out=grad_out)


def _prepare_packed(case: Case, tensors: Inputs) -> Call:
    starts = _varlen(case).starts().to(tensors.query.device)
    grouped = case.kv_head_count != case.heads

    def call() -> Tensor:
        out = varlen_attention(
            tensors.query,
            tensors.key,
            tensors.value,
            starts,
            starts,
            case.length,
            case.length,
            is_causal=case.causal,
            enable_gqa=grouped,
        )
        assert isinstance(out, Tensor)
        return out

    return call


def _prepare_nested(case: Case, tensors: Inputs) -> Call:
    grouped = case.kv_head_count != case.heads
    on_cpu = tensors.query.device.type == "cpu"
    if on_cpu and case.flops() > _MOST_NESTED:
        raise NotImplementedError(f"cases of more than {_MOST_NESTED:.0e} operations take minutes on the CPU")
    if on_cpu and (case.causal or grouped):
        raise NotImplementedError(
            "torch takes neither is_causal nor enable_gqa with nested tensors on the CPU"
        )
    starts = _varlen(case).starts().to(tensors.query.device, torch.int64)
    shortest = min(_varlen(case).lengths)

    def jagged(tensor: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(
            tensor, starts, min_seqlen=shortest, max_seqlen=case.length
        )
        return nested.transpose(1, 2)

    def call() -> Tensor:
        query, key, value = (jagged(tensor) for tensor in (tensors.query, tensors.key, tensors.value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2).values()

    return call


def _prepare_torch_varlen(case: Case, tensors: Inputs) -> Call:
    if tensors.query.device.type != "cuda":
        raise NotImplementedError("torch.nn.attention.varlen computes only on CUDA")
    attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    starts = _varlen(case).starts().to(tensors.query.device)
    options: dict[str, Any] = {"window_size": (-1, 0)} if case.causal else {}

    def call() -> Tensor:
        return attend(
            tensors.query, tensors.key, tensors.value, starts, starts, case.length, case.length, **options
        )

    return call


#: This package on padded tensors, as it is called without varlen_attention.
PADDED = Contender("padded", OURS.prepare, _padded_inputs)
NESTED = Contender("nested", _prepare_nested, _packed_inputs, _unpacked)
TORCH_VARLEN = Contender("varlen", _prepare_torch_varlen, _packed_inputs, _unpacked)

CONTENDERS = (
    Contender(OURS.name, _prepare_packed, _packed_inputs, _unpacked),
    Contender(TORCH.name, TORCH.prepare, _padded_inputs),
    PADDED,
    NESTED,
)
