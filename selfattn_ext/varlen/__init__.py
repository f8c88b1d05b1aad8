"""Attention to packed sequences of unlike lengths."""

from . import nested
from .attention import varlen_attention

__all__ = ["nested", "varlen_attention"]
