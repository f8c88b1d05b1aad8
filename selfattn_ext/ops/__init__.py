"""The operators of the compiled library, each with its types, its shapes and a fake kernel.

A function here that :func:`.operator` decorates is written as the fake kernel of the operator of its name: it
makes results of the right shapes, dtypes and strides without data, for torch.compile, torch.export and
FakeTensorMode. The name then stands for the dispatcher's own callable, so that a call costs nothing on top.

All tensors are four-dimensional here; :mod:`selfattn_ext.functional` brings user input into that form.
``options`` are those of csrc/ops/attention_options.h. The operators know no gradients and no vmap: those are
in :mod:`selfattn_ext.autograd.attention_function`.
"""

from .attention_operators import (
    attention_backward,
    attention_backward_backward,
    attention_captured_gradients,
    attention_forward,
    attention_jvp,
    attention_scores,
    attention_scores_backward,
    attention_statistics,
    attention_weight_sums,
    attention_weights,
    masked_softmax,
    masked_softmax_backward,
    sorted_selection,
)
from .attention_operators import attention_refusals as attention_refusals
from .attention_operators import direct_backward as direct_backward
from .attention_operators import direct_forward as direct_forward
from .basic_operators import (
    basic_attention,
    basic_attention_backward,
    basic_attention_forward,
    causal_attention,
    causal_attention_backward,
    causal_attention_forward,
    masked_attention,
    masked_attention_backward,
    masked_attention_forward,
    packed_attention,
    packed_attention_backward,
    packed_attention_forward,
)
from .cache_operators import append_to_cache, attention_with_cache, statistics_with_cache
from .cache_operators import direct_with_cache as direct_with_cache
from .registration import NAMESPACE
from .registration import SIXTEEN_BITS as SIXTEEN_BITS

__all__ = [
    "NAMESPACE",
    "append_to_cache",
    "attention_backward",
    "attention_backward_backward",
    "attention_captured_gradients",
    "attention_forward",
    "attention_jvp",
    "attention_scores",
    "attention_scores_backward",
    "attention_statistics",
    "attention_weight_sums",
    "attention_weights",
    "attention_with_cache",
    "basic_attention",
    "basic_attention_backward",
    "basic_attention_forward",
    "causal_attention",
    "causal_attention_backward",
    "causal_attention_forward",
    "masked_attention",
    "masked_attention_backward",
    "masked_attention_forward",
    "masked_softmax",
    "masked_softmax_backward",
    "packed_attention",
    "packed_attention_backward",
    "packed_attention_forward",
    "sorted_selection",
    "statistics_with_cache",
]
