"""Caches of keys and values: attention to them, and memory for the layers of a decoder."""

from .cache import KVCache
from .cache_attention import attention_with_kvcache

__all__ = ["KVCache", "attention_with_kvcache"]
