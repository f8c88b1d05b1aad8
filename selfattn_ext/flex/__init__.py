"""Functions of scores that users write: flex_attention."""

from .attention_with_functions import flex_attention

__all__ = ["flex_attention"]
