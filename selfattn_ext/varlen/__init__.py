"""Attention to packed sequences of different lengths."""

from . import jagged
from .packed_attention import varlen_attention

__all__ = ["jagged", "varlen_attention"]
