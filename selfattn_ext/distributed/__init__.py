"""Attention over sequences that are split over processes, on torch.distributed."""

from __future__ import annotations

from .context import context_parallel
from .dtensor import register_sharding
from .packed import ring_varlen_attention
from .shard import shard_sequence, unshard_sequence
from .split_attention import ring_attention, ulysses_attention
from .traffic import bytes_sent

__all__ = [
    "bytes_sent",
    "context_parallel",
    "register_sharding",
    "ring_attention",
    "ring_varlen_attention",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]
