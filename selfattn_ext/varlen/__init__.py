"""Attention to packed sequences of unlike lengths."""
