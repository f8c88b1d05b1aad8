"""Caches of keys and values: attention to them, and memory for the layers of a decoder."""

from .attention import attention_with_kvcache
from .cache import KVCache

__all__ = ["KVCache", "attention_with_kvcache"]
