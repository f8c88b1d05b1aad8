"""Attention layers and rotary position embedding.

All layers project with torch's linear layers and attend with
:func:`selfattn_ext.scaled_dot_product_attention`, so that gradients, dtypes, devices and numerics are those
of that function. A query that may see no key gets zeros from the attention, never NaN.
"""

from .multihead_attention import MultiheadAttention
from .rotary import apply_rotary, rotary_embedding, rotary_factors
from .self_attention import MultiHeadSelfAttention, SelfAttention

__all__ = [
    "MultiHeadSelfAttention",
    "MultiheadAttention",
    "SelfAttention",
    "apply_rotary",
    "rotary_embedding",
    "rotary_factors",
]
