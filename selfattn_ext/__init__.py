"""Exact attention for PyTorch with hand-written C++ kernels, forward and backward.

>>> import torch, selfattn_ext
>>> query = key = value = torch.randn(2, 8, 128, 64)
>>> selfattn_ext.scaled_dot_product_attention(query, key, value, is_causal=True).shape
torch.Size([2, 8, 128, 64])
>>> selfattn_ext.__version__.split(".")[0]
'0'
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "selfattn_ext needs torch 2.11 or newer: pip install torch, then install selfattn_ext again"
    ) from None

from . import backends, jit, masks, nn, reference, sources
from .arguments.batch_invariance import batch_invariant
from .aux_request import AuxRequest
from .collecting import collect_statistics
from .flex import flex_attention
from .functional import attention_weights, scaled_dot_product_attention
from .integrations import flop_counter as _flops  # noqa: F401
from .integrations import torch_sdpa as _torch_sdpa
from .integrations.flex_mode import as_flex
from .integrations.sdpa_mode import as_sdpa
from .kv_cache import KVCache, attention_with_kvcache
from .merging import merge_attention
from .nn import MultiheadAttention, MultiHeadSelfAttention, SelfAttention, apply_rotary, rotary_factors
from .reference_statistics import AuxOutput
from .scores_and_softmax import attention_scores, masked_softmax
from .sparse import sparse_attention
from .varlen import varlen_attention

_torch_sdpa.register()

__version__ = sources.version()

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "KVCache",
    "MultiHeadSelfAttention",
    "MultiheadAttention",
    "SelfAttention",
    "__version__",
    "apply_rotary",
    "as_flex",
    "as_sdpa",
    "attention_scores",
    "attention_weights",
    "attention_with_kvcache",
    "backends",
    "batch_invariant",
    "collect_statistics",
    "flex_attention",
    "jit",
    "masked_softmax",
    "masks",
    "merge_attention",
    "nn",
    "reference",
    "rotary_factors",
    "scaled_dot_product_attention",
    "sources",
    "sparse_attention",
    "varlen_attention",
]
