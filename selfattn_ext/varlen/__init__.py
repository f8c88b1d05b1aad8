"""Attention to packed sequences of unlike lengths."""

from . import jagged
from .packed_attention import varlen_attention

__all__ = ["jagged", "varlen_attention"]
